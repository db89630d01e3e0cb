// Norms of rows, or of equal pieces of them, with sums in fp32.
//
// blockDim.x threads take a piece: 32 up to 1,024 numbers, 256 up to 8,192, else 1,024; blockDim.y
// pieces go to a block: 8 where a warp takes a piece, else 1. That depends on the width alone, and
// with it the order of the sums.
#include "common.cuh"

struct NormShape {
    int width;        // of a piece
    int pieces;       // in a row
    int count;        // of pieces in all
    int weight_step;  // numbers from one piece's weight to the next: width, or 0 for the same
    int bias_step;
    float eps;
};

// The sum over the blockDim.x threads of a piece. More than a warp are the whole block.
DEVICE float piece_sum(float x, float* spare) {
    x = warp_sum(x);
    if (blockDim.x == 32) return x;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (lane == 0) spare[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? spare[lane] : 0.0f);
    __syncthreads();
    return x;
}

// y (T, N) = (x - mean) / sqrt(var + eps) · weight + bias; an RMS norm has no mean. `y` may be
// `x`: a thread reads each number for the last time before it writes it.
template <bool CENTRED, class TO, class FROM>
DEVICE void norm(TO* y, const FROM* x, const f32* weight, const f32* bias, const NormShape& s) {
    SHARED(float, spare, [32]);
    const int index = blockIdx.x * blockDim.y + threadIdx.y;
    if (index >= s.count) return;  // a whole warp, and no barrier follows for blocks of warps
    const FROM* from = x + (size_t)index * s.width;
    TO* to = y + (size_t)index * s.width;
    const auto sum_of = [&](auto f) {
        float sum = 0.0f;
        for_pieces(s.width, threadIdx.x, blockDim.x, [&](auto n, int at) {
            const auto v = load<decltype(n)::value>(from + at);
            for (int i = 0; i < decltype(n)::value; i++) sum += f(v.v[i]);
        });
        return piece_sum(sum, spare);
    };
    const float mean = CENTRED ? sum_of([](float v) { return v; }) / s.width : 0.0f;
    const float variance = sum_of([=](float v) { return (v - mean) * (v - mean); }) / s.width;
    const float factor = rsqrtf(variance + s.eps);
    const int piece = index % s.pieces;
    for_pieces(s.width, threadIdx.x, blockDim.x, [&](auto n, int at) {
        constexpr int N = decltype(n)::value;
        Numbers<N> v = load<N>(from + at);
        for (int i = 0; i < N; i++) v.v[i] = (v.v[i] - mean) * factor;
        if (weight) {
            const Numbers<N> w = load<N>(weight + piece * s.weight_step + at);
            for (int i = 0; i < N; i++) v.v[i] *= w.v[i];
        }
        if (bias) {
            const Numbers<N> b = load<N>(bias + piece * s.bias_step + at);
            for (int i = 0; i < N; i++) v.v[i] += b.v[i];
        }
        store(to + at, v);
    });
}

#define NORM(FROM, TO)                                                                         \
    KERNEL(1024, 1) rms_norm_##FROM##_##TO(TO* y, const FROM* x, const f32* weight,               \
                                        const f32* bias, NormShape shape) {                    \
        norm<false>(y, x, weight, bias, shape);                                                \
    }                                                                                          \
    REGISTER_KERNEL(rms_norm_##FROM##_##TO)                                                    \
    KERNEL(1024, 1) layer_norm_##FROM##_##TO(TO* y, const FROM* x, const f32* weight,             \
                                          const f32* bias, NormShape shape) {                  \
        norm<true>(y, x, weight, bias, shape);                                                 \
    }                                                                                          \
    REGISTER_KERNEL(layer_norm_##FROM##_##TO)

NORM(f32, f32)
NORM(f32, bf16)
NORM(bf16, bf16)
