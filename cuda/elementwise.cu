// Ops that touch each number once. Those without rows run over a whole buffer with any grid of
// 256-thread blocks; those with rows take one block of 128 threads a row.
#include "common.cuh"

// x = f(x) for `count` numbers.
template <class T, class F>
DEVICE void map_all(T* x, long long count, F f) {
    for_all(count, [&](auto n, long long at) {
        constexpr int N = decltype(n)::value;
        Numbers<N> v = load<N>(x + at);
        for (int i = 0; i < N; i++) v.v[i] = f(v.v[i]);
        store(x + at, v);
    });
}

// Row blockIdx.x of x (T, N) times `factor`.
template <class T>
DEVICE void scale_row(T* x, int width, float factor) {
    T* row = x + (size_t)blockIdx.x * width;
    for_pieces(width, threadIdx.x, blockDim.x, [&](auto n, int at) {
        constexpr int N = decltype(n)::value;
        Numbers<N> v = load<N>(row + at);
        for (int i = 0; i < N; i++) v.v[i] *= factor;
        store(row + at, v);
    });
}

// A NaN stays one.
DEVICE float clip(float x, float bound) { return x < -bound ? -bound : x > bound ? bound : x; }

// out (T, N) = x (T, N), in out's type.
template <class TO, class FROM>
DEVICE void copy(TO* out, const FROM* x, long long count) {
    for_all(count, [&](auto n, long long at) {
        constexpr int N = decltype(n)::value;
        store(out + at, load<N>(x + at));
    });
}

// out (T, N) += x (T, N) · factor.
template <class T>
DEVICE void add_scaled(f32* out, const T* x, long long count, float factor) {
    for_all(count, [&](auto n, long long at) {
        constexpr int N = decltype(n)::value;
        Numbers<N> sum = load<N>(out + at);
        const Numbers<N> v = load<N>(x + at);
        for (int i = 0; i < N; i++) sum.v[i] += v.v[i] * factor;
        store(out + at, sum);
    });
}

// Row blockIdx.x of out (R, N) = row `rows[blockIdx.x]` of x (T, N).
template <class T>
DEVICE void gather(T* out, const T* x, const unsigned* rows, int width) {
    const T* from = x + (size_t)rows[blockIdx.x] * width;
    T* to = out + (size_t)blockIdx.x * width;
    for_pieces(width, threadIdx.x, blockDim.x, [&](auto n, int at) {
        store(to + at, load<decltype(n)::value>(from + at));
    });
}

// Row of out (T, heads · (M + N)) = for each head its part of `own` (T, heads · M), then all of
// `shared` (T, N).
template <class T>
DEVICE void join_heads(T* out, const T* own, const T* shared, int heads, int own_width,
                       int shared_width) {
    const size_t row = blockIdx.x;
    const int width = own_width + shared_width;
    for (int head = 0; head < heads; head++) {
        const T* from = own + (row * heads + head) * own_width;
        T* to = out + (row * heads + head) * width;
        for (int i = threadIdx.x; i < width; i += blockDim.x)
            to[i] = i < own_width ? from[i] : shared[row * shared_width + i - own_width];
    }
}

#define ELEMENTWISE(T)                                                                            \
    KERNEL(256) scale_##T(T* x, long long count, float factor) {                                  \
        map_all(x, count, [=](float v) { return v * factor; });                                   \
    }                                                                                             \
    REGISTER_KERNEL(scale_##T)                                                                    \
    KERNEL(256) clip_##T(T* x, long long count, float bound) {                                    \
        map_all(x, count, [=](float v) { return clip(v, bound); });                               \
    }                                                                                             \
    REGISTER_KERNEL(clip_##T)                                                                     \
    KERNEL(256) add_scaled_##T(f32* out, const T* x, long long count, float factor) {             \
        add_scaled(out, x, count, factor);                                                        \
    }                                                                                             \
    REGISTER_KERNEL(add_scaled_##T)                                                               \
    KERNEL(128) scale_rows_##T(T* x, const f32* factors, const unsigned* rows, int width) {       \
        scale_row(x, width, factors[rows[blockIdx.x]]);                                           \
    }                                                                                             \
    REGISTER_KERNEL(scale_rows_##T)                                                               \
    KERNEL(128) gate_rows_##T(T* x, const T* gate, int width) {                                   \
        scale_row(x, width, sigmoid(to_float(gate[blockIdx.x])));                                 \
    }                                                                                             \
    REGISTER_KERNEL(gate_rows_##T)                                                                \
    KERNEL(128) gather_##T(T* out, const T* x, const unsigned* rows, int width) {                 \
        gather(out, x, rows, width);                                                              \
    }                                                                                             \
    REGISTER_KERNEL(gather_##T)                                                                   \
    KERNEL(128) join_heads_##T(T* out, const T* own, const T* shared, int heads, int own_width,   \
                               int shared_width) {                                                \
        join_heads(out, own, shared, heads, own_width, shared_width);                             \
    }                                                                                             \
    REGISTER_KERNEL(join_heads_##T)

ELEMENTWISE(bf16)
ELEMENTWISE(f32)

// A gate that a product left in fp32.
KERNEL(128) gate_rows_bf16_by_f32(bf16* x, const f32* gate, int width) {
    scale_row(x, width, sigmoid(gate[blockIdx.x]));
}
REGISTER_KERNEL(gate_rows_bf16_by_f32)

#define COPY(FROM, TO)                                                              \
    KERNEL(256) copy_##FROM##_##TO(TO* out, const FROM* x, long long count) {       \
        copy(out, x, count);                                                        \
    }                                                                               \
    REGISTER_KERNEL(copy_##FROM##_##TO)

COPY(f32, f32)
COPY(f32, bf16)
COPY(bf16, bf16)
COPY(bf16, f32)
