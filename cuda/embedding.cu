// Rows of a table, into the residual stream.
#include "common.cuh"

// out (T, H) = or += rows `rows` of `table` (V, H). One block of 128 threads a token.
template <bool ADD, class T>
DEVICE void embed(f32* out, const T* table, const unsigned* rows, int width) {
    const T* from = table + (size_t)rows[blockIdx.x] * width;
    f32* to = out + (size_t)blockIdx.x * width;
    for_pieces(width, threadIdx.x, blockDim.x, [&](auto n, int at) {
        constexpr int N = decltype(n)::value;
        Numbers<N> x = load<N>(from + at);
        if (ADD) {
            const Numbers<N> before = load<N>(to + at);
            for (int i = 0; i < N; i++) x.v[i] += before.v[i];
        }
        store(to + at, x);
    });
}

#define EMBED(T)                                                                                 \
    KERNEL(128) embed_replace_##T(f32* out, const T* table, const unsigned* rows, int width) {   \
        embed<false>(out, table, rows, width);                                                   \
    }                                                                                            \
    REGISTER_KERNEL(embed_replace_##T)                                                           \
    KERNEL(128) embed_add_##T(f32* out, const T* table, const unsigned* rows, int width) {       \
        embed<true>(out, table, rows, width);                                                    \
    }                                                                                            \
    REGISTER_KERNEL(embed_add_##T)

EMBED(bf16)
EMBED(f32)
