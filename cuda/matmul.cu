// Linear maps by the project's own product, for where a library can't keep a row's bits.
#include "matmul.cuh"

struct LinearShape {
    int m, n, k;
    int adds;  // 1: out +=, 0: out =
};

// out (M, N) = or += x (M, K) · wᵀ (N, K) + bias (N). Grid (tiles of M, tiles of N), so that
// blocks that run side by side read the same weights.
template <class T, class OUT>
DEVICE void linear(OUT* out, const T* x, const T* w, const f32* bias, const LinearShape& s,
                   int tile) {
    Product<T, OUT> p;
    p.out = out, p.x = x, p.w = w, p.bias = bias;
    p.rows = nullptr, p.divisor = 1;
    p.n = s.n, p.k = s.k, p.adds = s.adds;
    p.first_row = blockIdx.x * tile, p.first_column = blockIdx.y * tile;
    p.count = s.m - p.first_row;
    multiply_tile(p);
}

#define LINEAR(T, OUT, TILE)                                                                   \
    KERNEL(TILE_THREADS) matmul_##T##_##OUT(OUT* out, const T* x, const T* w, const f32* bias, \
                                            LinearShape shape) {                               \
        linear(out, x, w, bias, shape, TILE);                                                  \
    }                                                                                          \
    REGISTER_KERNEL(matmul_##T##_##OUT)

LINEAR(bf16, bf16, TILE)
LINEAR(bf16, f32, TILE)
LINEAR(f32, f32, TILE_F32)
