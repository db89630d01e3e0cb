// Rotary positions, in place. One block of 128 threads a token.
#include "common.cuh"

struct RopeShape {
    int heads, head_dim;
    int start;  // first number of a head that is rotated
    int half;   // pairs that are rotated, and columns of the tables
};

// Rotates N pairs (a, b) by the angles from `at` on.
template <int N>
DEVICE void rotate(Numbers<N>& a, Numbers<N>& b, const f32* cos, const f32* sin) {
    const Numbers<N> c = load<N>(cos), s = load<N>(sin);
    for (int i = 0; i < N; i++) {
        const float x = a.v[i], y = b.v[i];
        a.v[i] = x * c.v[i] - y * s.v[i];
        b.v[i] = y * c.v[i] + x * s.v[i];
    }
}

// Pairs are number i and i + half of the rotated part.
template <int N, class T>
DEVICE void rotate_halves(T* row, const f32* cos, const f32* sin, const RopeShape& r) {
    const int steps = r.half / N;
    for (int i = threadIdx.x; i < r.heads * steps; i += blockDim.x) {
        const int at = i % steps * N;
        T* low = row + i / steps * r.head_dim + r.start + at;
        T* high = low + r.half;
        Numbers<N> a = load<N>(low), b = load<N>(high);
        rotate(a, b, cos + at, sin + at);
        store(low, a);
        store(high, b);
    }
}

// Pairs are numbers 2 i and 2 i + 1 of the rotated part.
template <class T>
DEVICE void rotate_neighbours(T* row, const f32* cos, const f32* sin, const RopeShape& r) {
    for (int i = threadIdx.x; i < r.heads * r.half; i += blockDim.x) {
        const int at = i % r.half;
        T* pair = row + i / r.half * r.head_dim + r.start + 2 * at;
        Numbers<1> a = load<1>(pair), b = load<1>(pair + 1);
        rotate(a, b, cos + at, sin + at);
        store(pair, a);
        store(pair + 1, b);
    }
}

// Each head of x (T, heads · head_dim) by the angles of its row of the tables: cos and sin
// (P, half), row `positions[t]`.
template <bool HALVES, class T>
DEVICE void rope(T* x, const f32* cos, const f32* sin, const unsigned* positions,
                 const RopeShape& r) {
    T* row = x + (size_t)blockIdx.x * r.heads * r.head_dim;
    const size_t angles = (size_t)positions[blockIdx.x] * r.half;
    const bool is_whole = r.head_dim % 8 == 0 && r.start % 8 == 0 && r.half % 8 == 0;
    if (!HALVES)
        rotate_neighbours(row, cos + angles, sin + angles, r);
    else if (is_whole)
        rotate_halves<8>(row, cos + angles, sin + angles, r);
    else
        rotate_halves<1>(row, cos + angles, sin + angles, r);
}

#define ROPE(T)                                                                               \
    KERNEL(128) rope_halves_##T(T* x, const f32* cos, const f32* sin,                         \
                                const unsigned* positions, RopeShape shape) {                 \
        rope<true>(x, cos, sin, positions, shape);                                            \
    }                                                                                         \
    REGISTER_KERNEL(rope_halves_##T)                                                          \
    KERNEL(128) rope_neighbours_##T(T* x, const f32* cos, const f32* sin,                     \
                                    const unsigned* positions, RopeShape shape) {             \
        rope<false>(x, cos, sin, positions, shape);                                           \
    }                                                                                         \
    REGISTER_KERNEL(rope_neighbours_##T)

ROPE(bf16)
ROPE(f32)
