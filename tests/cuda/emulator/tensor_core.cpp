// The collectives of a warp, lane for lane as the PTX ISA describes them: shuffles, votes,
// ldmatrix, mma.m16n8k16, and cp.async.
#include "engine.h"

namespace emulator {

void combine_shuffle(Slot* lanes) {
    uint64_t taken[WARP];
    for (int i = 0; i < WARP; i++) taken[i] = lanes[lanes[i].words[1]].words[0];
    for (int i = 0; i < WARP; i++) lanes[i].words[0] = taken[i];
}

void combine_ballot(Slot* lanes) {
    uint64_t votes = 0;
    for (int i = 0; i < WARP; i++) votes |= uint64_t(lanes[i].words[0] != 0) << i;
    for (int i = 0; i < WARP; i++) lanes[i].words[0] = votes;
}

// ldmatrix .x4: lane 8 m + r brings the address of row r of matrix m, eight 16-bit numbers. Lane l
// takes of each matrix the numbers (l / 4, 2 (l % 4)) and the one beside it, or, transposed, those
// at the swapped coordinates.
template <bool TRANSPOSED>
static void combine_ldmatrix(Slot* lanes) {
    const uint16_t* rows[WARP];
    for (int i = 0; i < WARP; i++) rows[i] = value_of<const uint16_t*>(lanes[i]);
    for (int lane = 0; lane < WARP; lane++) {
        MatrixFragments taken{};
        for (int matrix = 0; matrix < 4; matrix++)
            for (int half = 0; half < 2; half++) {
                const int along = lane / 4, across = lane % 4 * 2 + half;
                const int row = TRANSPOSED ? across : along, column = TRANSPOSED ? along : across;
                taken.r[matrix] |= unsigned(rows[matrix * 8 + row][column]) << (16 * half);
            }
        lanes[lane] = slot_of(taken);
    }
}

Slot load_matrices(const void* row, bool transposed, int line) {
    if (reinterpret_cast<uintptr_t>(row) % 16)
        fail("%s: ldmatrix at line %d from an address that is not a multiple of 16",
             engine.kernel->name, line);
    note_read(row, 16);
    return exchange("ldmatrix", line, slot_of(row),
                    transposed ? combine_ldmatrix<true> : combine_ldmatrix<false>);
}

static float half_of(unsigned pair, int half) {
    return bf16_to_float((unsigned short)(pair >> (16 * half)));
}

// Fragments of mma.m16n8k16 (row, column): with g = lane / 4 and t = lane % 4, register i of A
// holds row g + 8 (i % 2), columns 2 t + 8 (i / 2) and the next; register i of B holds column g,
// rows 2 t + 8 i and the next; number i of D is at row g + 8 (i / 2), column 2 t + i % 2.
static void combine_mma(Slot* lanes) {
    float a[16][16], b[8][16];  // (M, K), (N, K)
    for (int lane = 0; lane < WARP; lane++) {
        const auto brought = value_of<MmaFragments>(lanes[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; i++)
            for (int half = 0; half < 2; half++)
                a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + half] = half_of(brought.a[i], half);
        for (int i = 0; i < 2; i++)
            for (int half = 0; half < 2; half++)
                b[g][2 * t + 8 * i + half] = half_of(brought.b[i], half);
    }
    for (int lane = 0; lane < WARP; lane++) {
        auto taken = value_of<MmaFragments>(lanes[lane]);
        for (int i = 0; i < 4; i++) {
            const float* row = a[lane / 4 + 8 * (i / 2)];
            const float* column = b[lane % 4 * 2 + i % 2];
            float sum = 0;
            for (int k = 0; k < 16; k++) sum += row[k] * column[k];
            taken.d[i] += sum;
        }
        lanes[lane] = slot_of(taken);
    }
}

Slot multiply(const Slot& fragments, int line) {
    return exchange("mma", line, fragments, combine_mma);
}

struct Sixteen {
    uint64_t words[2];
};

// The bytes arrive at the wait and not before; until then the place holds poison.
void copy_async(void* to, const void* from, bool is_zero, int line) {
    const auto misaligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 != 0; };
    if (misaligned(to) || (!is_zero && misaligned(from)))
        fail("%s: cp.async at line %d is not aligned to 16 bytes", engine.kernel->name, line);
    note_write(to, 16);
    const uint64_t poison = 0x0101010101010101u * engine.settings.poison;
    *static_cast<Sixteen*>(to) = {{poison, poison}};
    engine.current->copies.push_back({to, is_zero ? nullptr : from});
}

void commit_copies() {
    engine.current->group_end.push_back(engine.current->copies.size());
}

void wait_for_copies(int groups_left) {
    Fiber& fiber = *engine.current;
    const size_t groups = fiber.group_end.size();
    if (groups <= size_t(groups_left)) return;
    const size_t arriving = groups - size_t(groups_left);
    const size_t copies = fiber.group_end[arriving - 1];
    for (size_t i = 0; i < copies; i++) {
        const Copy& copy = fiber.copies[i];
        if (copy.from) note_read(copy.from, 16);
        note_write(copy.to, 16);
        *static_cast<Sixteen*>(copy.to) =
            copy.from ? *static_cast<const Sixteen*>(copy.from) : Sixteen{};
    }
    fiber.copies.erase(fiber.copies.begin(), fiber.copies.begin() + long(copies));
    fiber.group_end.erase(fiber.group_end.begin(), fiber.group_end.begin() + long(arriving));
    for (size_t& end : fiber.group_end) end -= copies;
}

}  // namespace emulator
