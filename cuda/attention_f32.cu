// Attention in fp32, for the fp32 reference mode: the same walk over keys as attention.cu, without
// tensor cores. One block of 128 threads a tile of 16 packed rows and kv head: grid (tiles,
// kv_heads). Each warp owns 4 rows; a lane holds one key of 32, then every 32nd number of the
// values. Dynamic shared memory: 4 · (16 · D + 32 · (D + 1) + 32 · DV) bytes for heads of D and
// values of DV numbers, at most 256 each.
#include "attention.cuh"

constexpr int WARPS = 4;
constexpr int WARP_ROWS = 4;
constexpr int ROWS = WARPS * WARP_ROWS;
constexpr int BLOCK_KEYS = 32;
constexpr int LANE_VALUES = 8;  // numbers of a value a lane holds at most

struct AttentionData {
    f32* out;              // (Q, heads · value_dim)
    const f32* q;          // (Q, heads · head_dim)
    const f32* k;          // (T, kv_heads · head_dim)
    const f32* v;          // (T, kv_heads · value_dim)
    const int* positions;  // (Q), of each query in its sequence
    const KeySpan* spans;
    const f32* sinks;  // (heads), or null
};

// Running softmax of one row, the same in all lanes but for `sum`.
struct Row {
    float maximum, total;
    float sum[LANE_VALUES];  // numbers lane, lane + 32, ... of the unnormalised output
    int position;            // of the query; -1 for a row that doesn't exist
};

// (rows, width) to shared memory; rows `step` apart there.
template <class RowAt>
DEVICE void stage(float* to, int rows, int width, int step, RowAt row_at) {
    for (int i = threadIdx.x; i < rows * width; i += blockDim.x) {
        const f32* row = row_at(i / width);
        to[i / width * step + i % width] = row ? row[i % width] : 0.0f;
    }
}

// Folds the score of this lane's key, and 32 values, into a row.
DEVICE void softmax_step(Row& row, float score, const float* v, int value_dim) {
    const int lane = threadIdx.x % 32;
    const float highest = fmaxf(row.maximum, warp_max(score));
    if (highest == NEGATIVE_INFINITY) return;  // the same in all lanes: no key seen yet
    const float shrink = expf(row.maximum - highest);
    const float weight = expf(score - highest);
    row.maximum = highest;
    row.total = row.total * shrink + warp_sum(weight);
    UNROLL
    for (int i = 0; i < LANE_VALUES; i++) row.sum[i] *= shrink;
    for (int key = 0; key < BLOCK_KEYS; key++) {
        const float w = __shfl_sync(ALL_LANES, weight, key);
        UNROLL
        for (int i = 0; i < LANE_VALUES; i++) {
            const int at = lane + 32 * i;
            if (at < value_dim) row.sum[i] += w * v[key * value_dim + at];
        }
    }
}

DEVICE float score_of(const AttentionShape& s, const float* q, const float* k) {
    float dot = 0.0f;
    for (int i = 0; i < s.head_dim; i++) dot += q[i] * k[i];
    const float score = dot * s.scale;
    return s.cap != 0.0f ? soft_cap(score, s.cap) : score;
}

DEVICE void finish(const AttentionShape& s, const AttentionData& data, const TileRows& rows,
                   int index, const Row& row) {
    const int head = rows.head_of(index);
    float total = row.total;
    if (data.sinks) total += expf(data.sinks[head] - row.maximum);
    f32* out = data.out + ((size_t)rows.query_of(index) * s.heads + head) * s.value_dim;
    UNROLL
    for (int i = 0; i < LANE_VALUES; i++) {
        const int at = threadIdx.x % 32 + 32 * i;
        if (at < s.value_dim) out[at] = row.sum[i] / total;
    }
}

KERNEL(WARPS * 32)
attention_f32(AttentionShape shape, const AttentionTile* tiles, AttentionData data) {
    DYN_SMEM(float, q);                             // (ROWS, head_dim)
    float* k = q + ROWS * shape.head_dim;           // (BLOCK_KEYS, head_dim + 1)
    float* v = k + BLOCK_KEYS * (shape.head_dim + 1);  // (BLOCK_KEYS, value_dim)
    const AttentionTile tile = tiles[blockIdx.x];
    const int kv_head = blockIdx.y, lane = threadIdx.x % 32;
    const KeySpan* spans = data.spans + tile.span;
    const TileRows rows = rows_of(tile, shape, kv_head, ROWS);
    const KeyRange keys = keys_of(rows, shape, data.positions);
    const int first_row = threadIdx.x / 32 * WARP_ROWS;

    stage(q, ROWS, shape.head_dim, shape.head_dim, [&](int row) -> const f32* {
        if (!rows.has(row)) return nullptr;
        const size_t head = (size_t)rows.query_of(row) * shape.heads + rows.head_of(row);
        return data.q + head * shape.head_dim;
    });
    Row state[WARP_ROWS];
    UNROLL
    for (int r = 0; r < WARP_ROWS; r++) {
        const int row = first_row + r;
        state[r].position = rows.has(row) ? data.positions[rows.query_of(row)] : -1;
        state[r].maximum = NEGATIVE_INFINITY;
        state[r].total = 0.0f;
        UNROLL
        for (int i = 0; i < LANE_VALUES; i++) state[r].sum[i] = 0.0f;
    }
    for (int block = keys.first / BLOCK_KEYS * BLOCK_KEYS; block < keys.end; block += BLOCK_KEYS) {
        const auto head_at = [&](const f32* from, int width) {
            return [=](int key) -> const f32* {
                if (block + key >= keys.end) return nullptr;
                const size_t row = key_row(spans, block + key);
                return from + (row * shape.kv_heads + kv_head) * width;
            };
        };
        stage(k, BLOCK_KEYS, shape.head_dim, shape.head_dim + 1, head_at(data.k, shape.head_dim));
        stage(v, BLOCK_KEYS, shape.value_dim, shape.value_dim, head_at(data.v, shape.value_dim));
        __syncthreads();
        UNROLL
        for (int r = 0; r < WARP_ROWS; r++) {
            const int key = block + lane, last = state[r].position;
            const bool is_seen = key <= last && key >= first_key(shape, last);
            const float score = score_of(shape, q + (first_row + r) * shape.head_dim,
                                         k + lane * (shape.head_dim + 1));
            softmax_step(state[r], is_seen ? score : NEGATIVE_INFINITY, v, shape.value_dim);
        }
        __syncthreads();
    }
    UNROLL
    for (int r = 0; r < WARP_ROWS; r++)
        if (rows.has(first_row + r)) finish(shape, data, rows, first_row + r, state[r]);
}
REGISTER_KERNEL(attention_f32)
