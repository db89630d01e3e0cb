// Which algorithms there are, when one is offered or taken, and how each sums.
//
// Usual: the first on offer takes only many rows, so that it can't be the one for all; the next
// takes every number of rows and sums in one order, given that rows come in whole tiles. With
// fewer rows, unaligned columns, and wherever a program lets it split k, the bits depend on the
// number of rows, as they do in the library. Varying: no check refuses, but no algorithm's bits are
// constant. Refusing: no algorithm takes few rows. Absent: none is offered.
#include "algorithm.h"

#include "driver.h"

namespace standin {

enum Id : uint32_t { UNALIGNED = 11, SPLIT = 20, WIDE = 66, EVEN = 67, SMALL = 71 };

static constexpr uint64_t TILE_ROWS = 128;   // whole tiles of these are summed in one order
static constexpr uint64_t WIDE_ROWS = 1024;  // the least that WIDE takes
static constexpr uint64_t WIDE_WORKSPACE = 4 << 20;

static uint64_t hash_of(const ProductKind& kind) {
    uint64_t hash = 14695981039346656037u;
    const int facts[] = {kind.input, kind.output, kind.transposes, kind.epilogue, kind.is_aligned};
    for (const uint64_t side : {kind.m, kind.k}) hash = (hash ^ side) * 1099511628211u;
    for (const int fact : facts) hash = (hash ^ uint64_t(fact)) * 1099511628211u;
    return hash;
}

bool candidate(const ProductKind& kind, const Preference& preference, uint64_t n, int rank,
               Algorithm& out) {
    if (settings().algorithms == Algorithms::Absent) return false;
    const Algorithm all[] = {
        {SPLIT, 20, 4, 4, 2, 0, 0, 0, {}},
        {WIDE, 24, 3, 1, 0, 0, WIDE_WORKSPACE, 0, {}},
        {EVEN, 20, 4, 1, 0, 0, 0, 0, {}},
        {SMALL, 15, 6, 1, 0, 0, 0, 0, {}},
        {UNALIGNED, 11, 0, 1, 0, 0, 0, 0, {}},
    };
    for (Algorithm algorithm : all) {
        if (algorithm.reduction && !(preference.reductions & algorithm.reduction)) continue;
        if (algorithm.workspace > preference.workspace_max) continue;
        algorithm.alignment = preference.alignment;
        algorithm.kind = hash_of(kind);
        if (!takes(algorithm, kind, n) || rank-- > 0) continue;
        out = algorithm;
        return true;
    }
    return false;
}

bool takes(const Algorithm& algorithm, const ProductKind& kind, uint64_t n) {
    if (algorithm.kind != hash_of(kind)) return false;
    if ((algorithm.id == UNALIGNED) == kind.is_aligned) return false;
    const bool is_choosy =
        algorithm.id == WIDE || settings().algorithms == Algorithms::Refusing;
    return !is_choosy || n >= WIDE_ROWS;
}

int parts_of(const Algorithm& algorithm, uint64_t n) {
    const bool varies = algorithm.splits > 1 || algorithm.id == UNALIGNED || n % TILE_ROWS != 0 ||
                        settings().algorithms == Algorithms::Varying;
    if (!varies) return 1;
    return n <= TILE_ROWS ? 8 : n <= WIDE_ROWS ? 4 : 2;
}

}  // namespace standin
