// The algorithms that the stand-in for cuBLASLt has on offer. They differ as the library's do:
// in the sizes they take, in the workspace they need, and in the order of their sums.
#pragma once

#include <cstddef>
#include <cstdint>

namespace standin {

// What a product is, of (m, k) · (k, n) by columns: what an algorithm was chosen for but for n,
// which may differ when it is used.
struct ProductKind {
    uint64_t m = 0, k = 0;
    int input = 0, output = 0;  // types, as cudaDataType says them
    int transposes = 0;         // 1 of A, 2 of B
    int epilogue = 0;
    bool is_aligned = true;  // every column at a multiple of 16 bytes
};

struct Preference {
    uint64_t workspace_max = 0;
    uint32_t reductions = 7;  // mask of cublasLtReductionScheme_t: all
    uint32_t alignment = 256;
};

// cublasLtMatmulAlgo_t: 64 bytes that programs keep and don't look into.
struct Algorithm {
    uint32_t id, tile, stages, splits, reduction;
    uint32_t alignment;  // that pointers were promised to have
    uint64_t workspace;
    uint64_t kind;  // hash of what it was chosen for
    uint64_t unused[3];
};
static_assert(sizeof(Algorithm) == 64, "as in the library");

// The one at `rank` of those that heuristics offer for the product, best first; false past the
// last.
bool candidate(const ProductKind& kind, const Preference& preference, uint64_t n, int rank,
               Algorithm& out);

// Whether an algorithm takes the product.
bool takes(const Algorithm& algorithm, const ProductKind& kind, uint64_t n);

// In how many parts, added up at the end, an algorithm sums over k: what decides a number's bits.
int parts_of(const Algorithm& algorithm, uint64_t n);

}  // namespace standin
