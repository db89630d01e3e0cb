// Causal attention over packed sequences on tensor cores: flash attention (Dao 2023,
// arXiv:2307.08691), bf16 in and out, scores and sums in fp32. One block of 128 threads a tile and
// kv head: grid (tiles, kv_heads). What a tile is stands in attention.cuh.
//
//   load Q of the tile
//   for each block of keys that some row sees:
//       S = Q · Kᵀ                          while V arrives
//       mask S; fold it into the running maximum and sum of each row
//       O = O · shrink + exp(S - maximum) · V    while the next K arrives
//   write O / sum
//
// Each warp owns M · 16 rows; each thread holds of every 16 rows the two numbered lane / 4 and
// lane / 4 + 8, and of these two neighbouring columns in every 8, as mma.m16n8k16 lays them out.
//
// Tiles, by the widths of keys and values, which may be narrower than the kernel's:
//   kernel              keys  values  rows  keys a block  shared bytes
//   attention_64          64      64   128            64         36864
//   attention_80          80      80   128            64         45056
//   attention_96          96      96   128            64         53248
//   attention_128        128     128   128            48         60928
//   attention_192_128    192     128   128            48         83456
//   attention_256        256     256    64            64        101376
// 48 keys where 64 would not fit the registers.
#include "attention.cuh"

constexpr int WARPS = 4;
// Numbers between the rows of a shared matrix, over its width: with 8, the rows that ldmatrix
// reads together lie in different banks.
constexpr int SKEW = 8;

struct AttentionData {
    bf16* out;             // (Q, heads · value_dim)
    const bf16* q;         // (Q, heads · head_dim)
    const bf16* k;         // (T, kv_heads · head_dim)
    const bf16* v;         // (T, kv_heads · value_dim)
    const int* positions;  // (Q), of each query in its sequence
    const KeySpan* spans;
    const f32* sinks;  // (heads), or null
};

// D and DV: widths of keys and values in the kernel. M: 16-row pieces a warp. B: keys a block.
template <int D, int DV, int M, int B>
struct Attention {
    static constexpr int ROWS = WARPS * M * 16;
    static constexpr int KEY_STEP = D + SKEW, VALUE_STEP = DV + SKEW;

    const AttentionShape& shape;
    const AttentionData& data;
    const AttentionTile* tile;
    bf16* const q;  // shared: (ROWS, KEY_STEP), (B, KEY_STEP), (B, VALUE_STEP)
    const KeyRange& keys;  // shared: behind the first query, where nothing else lies
    bf16* const k = q + ROWS * KEY_STEP;
    bf16* const v = k + B * KEY_STEP;

    float scores[M][B / 8][4];         // of the block of keys at hand, then their weights
    float sum[M][DV / 8][4];           // unnormalised output
    float maximum[M][2], total[M][2];  // of each row's scores, and of its weights

    DEVICE_METHOD Attention(const AttentionShape& shape, const AttentionData& data,
                            const AttentionTile* tile, bf16* shared)
        : shape(shape),
          data(data),
          tile(tile),
          q(shared),
          keys(*reinterpret_cast<const KeyRange*>(shared + D)) {
        static_assert(sizeof(KeyRange) == SKEW * sizeof(bf16), "it fits between two rows");
        if (threadIdx.x == 0)
            *reinterpret_cast<KeyRange*>(shared + D) = keys_of(tile_rows(), shape, data.positions);
        __syncthreads();
    }

    DEVICE_METHOD void run() {
        // Scores become powers of two: the capped ones are scaled already.
        const float unit = (shape.cap != 0.0f ? 1.0f : shape.scale) * LOG2_E;
        const int first = keys.first / B * B;
        start();
        stage_queries();
        stage_keys(first);
        for (int block = first; block < keys.end; block += B) {
            cp_async_wait<0>();
            __syncthreads();  // the keys are there, and nobody reads the values any more
            stage_values(block);
            multiply_keys();
            cap_and_mask(block);
            cp_async_wait<0>();
            __syncthreads();  // the values are there, and nobody reads the keys any more
            if (block + B < keys.end) stage_keys(block + B);
            for_rows([&](int m, int half) { softmax_step(m, half, unit); });
            multiply_values();
        }
        for_rows([&](int m, int half) { finish(m, half, unit); });
    }

    // Calls f(m, half) for each of this thread's rows.
    template <class F>
    DEVICE_METHOD void for_rows(F f) {
        UNROLL
        for (int m = 0; m < M; m++)
            UNROLL
            for (int half = 0; half < 2; half++) f(m, half);
    }

    // Read again wherever it is needed, not kept: that is seldom, and registers are short.
    DEVICE_METHOD TileRows tile_rows() const { return rows_of(*tile, shape, blockIdx.y, ROWS); }

    DEVICE_METHOD int row_of(int m, int half) const {
        return (threadIdx.x / 32 * M + m) * 16 + half * 8 + threadIdx.x % 32 / 4;
    }

    DEVICE_METHOD void start() {
        for_rows([&](int m, int half) {
            maximum[m][half] = NEGATIVE_INFINITY;
            total[m][half] = 0.0f;
        });
        UNROLL
        for (int m = 0; m < M; m++)
            UNROLL
            for (int n = 0; n < DV / 8; n++)
                UNROLL
                for (int i = 0; i < 4; i++) sum[m][n][i] = 0.0f;
    }

    DEVICE_METHOD void stage_queries() {
        const TileRows rows = tile_rows();
        const int width = shape.head_dim, others = shape.heads - rows.group;
        const bf16* from = data.q + ((size_t)rows.query * shape.heads + rows.head) * width;
        UNROLL_TWICE
        for (int i = threadIdx.x; i < ROWS * (D / 8); i += WARPS * 32) {
            const int row = i / (D / 8), column = i % (D / 8) * 8;
            // Packed row p is head p % group of query p / group.
            const int packed = rows.first + (rows.has(row) ? row : 0);
            const bf16* head = from + ((size_t)(packed / rows.group) * others + packed) * width;
            stage_8(q + row * KEY_STEP + column, head + column,
                    rows.has(row) ? width - column : 0, width % 8 == 0);
        }
    }

    // Brings a block of keys or of values; zeros past the last key, so that nothing that lies
    // there meets a weight of 0. `width` of WIDTH numbers are there.
    template <int WIDTH>
    DEVICE_METHOD void stage(bf16* to, const bf16* from, int width, int block) {
        const KeySpan* spans = data.spans + tile->span;
        from += blockIdx.y * width;
        if (keys.end <= spans->end && width % 8 == 0)
            stage_together<WIDTH>(to, from, width, block, block + spans->shift);
        else
            stage_apart<WIDTH>(to, from, width, block, spans);
        cp_async_commit();
    }

    // Where all keys lie in one span: row `row` of `from` and those behind it.
    template <int WIDTH>
    DEVICE_METHOD void stage_together(bf16* to, const bf16* from, int width, int block, int row) {
        constexpr int PIECES = WIDTH / 8, THREADS = WARPS * 32;
        const int step = shape.kv_heads * width, left = keys.end - block;
        if constexpr (THREADS % PIECES == 0) {
            constexpr int APART = THREADS / PIECES;
            const int key = threadIdx.x / PIECES, column = threadIdx.x % PIECES * 8;
            const int there = column < width ? left - key : 0;
            const bf16* at = from + (size_t)(row + key) * step + column;
            to += key * (WIDTH + SKEW) + column;
            UNROLL
            for (int i = 0; i < B / APART; i++) {
                cp_async_16(to + i * APART * (WIDTH + SKEW), at, i * APART >= there);
                at += APART * step;
            }
        } else {
            UNROLL_TWICE
            for (int i = threadIdx.x; i < B * PIECES; i += THREADS) {
                const int key = i / PIECES, column = i % PIECES * 8;
                cp_async_16(to + key * (WIDTH + SKEW) + column,
                            from + (size_t)(row + key) * step + column,
                            key >= left || column >= width);
            }
        }
    }

    template <int WIDTH>
    DEVICE_METHOD void stage_apart(bf16* to, const bf16* from, int width, int block,
                                   const KeySpan* spans) {
        KEEP_ROLLED
        for (int i = threadIdx.x; i < B * (WIDTH / 8); i += WARPS * 32) {
            const int key = i / (WIDTH / 8), column = i % (WIDTH / 8) * 8;
            const bool is_there = block + key < keys.end;
            const size_t row = key_row(spans, is_there ? block + key : block);
            stage_8(to + key * (WIDTH + SKEW) + column,
                    from + row * shape.kv_heads * width + column, is_there ? width - column : 0,
                    width % 8 == 0);
        }
    }
    DEVICE_METHOD void stage_keys(int block) { stage<D>(k, data.k, shape.head_dim, block); }
    DEVICE_METHOD void stage_values(int block) { stage<DV>(v, data.v, shape.value_dim, block); }

    // scores = Q · Kᵀ
    DEVICE_METHOD void multiply_keys() {
        const int lane = threadIdx.x % 32;
        UNROLL
        for (int m = 0; m < M; m++)
            UNROLL
            for (int n = 0; n < B / 8; n++)
                UNROLL
                for (int i = 0; i < 4; i++) scores[m][n][i] = 0.0f;
        UNROLL_TWICE
        for (int d = 0; d < D; d += 16) {
            unsigned a[M][4];
            UNROLL
            for (int m = 0; m < M; m++) {
                const int row = (threadIdx.x / 32 * M + m) * 16 + lane % 16;
                ldmatrix_x4(a[m], q + row * KEY_STEP + d + lane / 16 * 8);
            }
            UNROLL
            for (int n = 0; n < B / 8; n += 2) {
                unsigned b[4];  // of keys 8 n to 8 n + 7, then of the next 8
                const int key = n * 8 + lane / 16 * 8 + lane % 8;
                ldmatrix_x4(b, k + key * KEY_STEP + d + lane / 8 % 2 * 8);
                UNROLL
                for (int m = 0; m < M; m++) {
                    mma_m16n8k16(scores[m][n], a[m], b);
                    mma_m16n8k16(scores[m][n + 1], a[m], b + 2);
                }
            }
        }
    }

    // Scores through the soft cap, and -inf where a row may not look.
    DEVICE_METHOD void cap_and_mask(int block) {
        if (shape.cap != 0.0f)
            UNROLL
            for (int m = 0; m < M; m++)
                UNROLL
                for (int n = 0; n < B / 8; n++)
                    UNROLL
                    for (int i = 0; i < 4; i++)
                        scores[m][n][i] = soft_cap(scores[m][n][i] * shape.scale, shape.cap);
        if (block >= keys.first_common && block + B <= keys.end_common) return;
        const TileRows rows = tile_rows();
        for_rows([&](int m, int half) {
            const int row = row_of(m, half);
            const int last = rows.has(row) ? data.positions[rows.query_of(row)] : -1;
            const int first = first_key(shape, last);
            UNROLL
            for (int n = 0; n < B / 8; n++)
                UNROLL
                for (int i = 0; i < 2; i++) {
                    const int key = block + n * 8 + threadIdx.x % 4 * 2 + i;
                    if (key < first || key > last)
                        scores[m][n][2 * half + i] = NEGATIVE_INFINITY;
                }
        });
    }

    // Turns the scores of a row into weights relative to its new maximum, and what was summed so
    // far with them. `unit` makes a difference of scores a power of two.
    DEVICE_METHOD void softmax_step(int m, int half, float unit) {
        float highest = maximum[m][half];
        UNROLL
        for (int n = 0; n < B / 8; n++)
            UNROLL
            for (int i = 0; i < 2; i++) highest = fmaxf(highest, scores[m][n][2 * half + i]);
        // The row's columns are spread over four neighbouring lanes.
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 1));
        highest = fmaxf(highest, __shfl_xor_sync(ALL_LANES, highest, 2));
        // A row that has seen no key yet: its weights are 0, not exp(-inf + inf).
        const float base = highest == NEGATIVE_INFINITY ? 0.0f : highest * unit;
        const float shrink = exp2_flush(maximum[m][half] * unit - base);
        maximum[m][half] = highest;
        total[m][half] *= shrink;
        UNROLL
        for (int n = 0; n < B / 8; n++)
            UNROLL
            for (int i = 0; i < 2; i++) {
                float& score = scores[m][n][2 * half + i];
                score = exp2_flush(fmaf(score, unit, -base));
                total[m][half] += score;
            }
        UNROLL
        for (int n = 0; n < DV / 8; n++)
            UNROLL
            for (int i = 0; i < 2; i++) sum[m][n][2 * half + i] *= shrink;
    }

    // sum += weights · V. The layout of mma's result is that of its left side: what two pieces of
    // 8 columns of scores are is one piece of 16 here.
    DEVICE_METHOD void multiply_values() {
        const int lane = threadIdx.x % 32;
        UNROLL
        for (int n = 0; n < B / 8; n += 2) {
            unsigned a[M][4];
            UNROLL
            for (int m = 0; m < M; m++)
                UNROLL
                for (int i = 0; i < 4; i++) {
                    const float* pair = scores[m][n + i / 2] + i % 2 * 2;
                    a[m][i] = pack_bf16(pair[0], pair[1]);
                }
            UNROLL
            for (int d = 0; d < DV / 8; d += 2) {
                unsigned b[4];  // of values 8 d to 8 d + 7, then of the next 8
                const int key = n * 8 + lane % 16;
                ldmatrix_x4_transposed(b, v + key * VALUE_STEP + d * 8 + lane / 16 * 8);
                UNROLL
                for (int m = 0; m < M; m++) {
                    mma_m16n8k16(sum[m][d], a[m], b);
                    mma_m16n8k16(sum[m][d + 1], a[m], b + 2);
                }
            }
        }
    }

    // out = sum / total, where a sink is a score that brings no value.
    DEVICE_METHOD void finish(int m, int half, float unit) {
        float all = total[m][half];
        all += __shfl_xor_sync(ALL_LANES, all, 1);
        all += __shfl_xor_sync(ALL_LANES, all, 2);
        const TileRows rows = tile_rows();
        const int row = row_of(m, half);
        if (!rows.has(row)) return;
        const int head = rows.head_of(row);
        if (data.sinks)
            all += exp2_flush(data.sinks[head] * LOG2_E - maximum[m][half] * unit);
        const int width = shape.value_dim;
        bf16* out = data.out + ((size_t)rows.query_of(row) * shape.heads + head) * width;
        const float factor = 1.0f / all;
        UNROLL
        for (int n = 0; n < DV / 8; n++) {
            const int column = n * 8 + threadIdx.x % 4 * 2;
            const float* pair = sum[m][n] + 2 * half;
            if (width % 2 == 0 && column < width)
                store_pair(out + column, pair[0] * factor, pair[1] * factor);
            else
                UNROLL
                for (int i = 0; i < 2 && column + i < width; i++)
                    out[column + i] = float_to_bf16(pair[i] * factor);
        }
    }
};

template <int D, int DV, int M, int B>
DEVICE void attend(const AttentionShape& shape, const AttentionTile* tiles,
                   const AttentionData& data) {
    DYN_SMEM(bf16, shared);
    Attention<D, DV, M, B>(shape, data, tiles + blockIdx.x, shared).run();
}

#define ATTENTION(name, D, DV, M, B)                                             \
    KERNEL(WARPS * 32)                                                           \
    name(AttentionShape shape, const AttentionTile* tiles, AttentionData data) { \
        attend<D, DV, M, B>(shape, tiles, data);                                 \
    }                                                                            \
    REGISTER_KERNEL(name)

ATTENTION(attention_64, 64, 64, 2, 64)
ATTENTION(attention_80, 80, 80, 2, 64)
ATTENTION(attention_96, 96, 96, 2, 64)
ATTENTION(attention_128, 128, 128, 2, 48)
ATTENTION(attention_192_128, 192, 128, 2, 48)
ATTENTION(attention_256, 256, 256, 1, 64)
