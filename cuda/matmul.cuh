// The project's own matrix product, x (M, K) · wᵀ (N, K): one tile of the result by one block,
// with sums over K in one fixed order, whatever M is and wherever a row lies in it.
#pragma once
#include "common.cuh"

// One tile's part in a product.
template <class T, class OUT>
struct Product {
    OUT* out;              // (M, N)
    const T* x;            // (·, K)
    const unsigned* rows;  // row of x for each row of out, or null for the same; divided by:
    int divisor;
    const T* w;       // (N, K)
    const f32* bias;  // (N), or null
    int n, k;
    bool adds;             // to what is in out, instead of replacing it
    int first_row, count;  // of out: the tile's first row, and how many exist from there
    int first_column;

    DEVICE_METHOD const T* x_row(int row) const {
        const int at = first_row + row;
        return x + (size_t)(rows ? rows[at] / divisor : at) * k;
    }
    DEVICE_METHOD void write(int row, int column, float value) const {
        if (row >= count || first_column + column >= n) return;
        OUT* to = out + (size_t)(first_row + row) * n + first_column + column;
        if (bias) value += bias[first_column + column];
        if (adds) value += to_float(*to);
        *to = from_float<OUT>(value);
    }
    // The same for two numbers side by side, `column` even: at once where rows are pairs.
    DEVICE_METHOD void write_pair(int row, int column, float low, float high) const {
        if (n % 2) return write(row, column, low), write(row, column + 1, high);
        const int at = first_column + column;
        if (row >= count || at >= n) return;
        OUT* to = out + (size_t)(first_row + row) * n + at;
        if (bias) low += bias[at], high += bias[at + 1];
        if (adds) low += to_float(to[0]), high += to_float(to[1]);
        store_pair(to, low, high);
    }
};

// bf16 on tensor cores: 128 x 128 by 256 threads, K in steps of 32, three of them in flight. Eight
// warps in two rows of four; each has 64 x 32 of the tile. 61,440 bytes of dynamic shared memory.
constexpr int TILE = 128;
constexpr int TILE_K = 32;
constexpr int STAGES = 3;
constexpr int STEP = TILE_K + 8;  // numbers from one staged row to the next: no bank conflicts
constexpr int TILE_THREADS = 256;

// What one thread stages of every step: the same 8 columns of two rows of x and two of w, found
// once.
struct StagedRows {
    static constexpr int PIECES = TILE_K / 8;
    static constexpr int APART = TILE_THREADS / PIECES;  // rows that all threads stage together
    static_assert(TILE == 2 * APART, "two rows a thread");

    const bf16 *x[2], *w[2];
    bool in_x[2], in_w[2];
    int row, column, k;

    template <class OUT>
    DEVICE_METHOD explicit StagedRows(const Product<bf16, OUT>& p)
        : row(threadIdx.x / PIECES), column(threadIdx.x % PIECES * 8), k(p.k) {
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int at = row + i * APART;
            in_x[i] = at < p.count;
            in_w[i] = p.first_column + at < p.n;
            x[i] = p.x_row(in_x[i] ? at : 0);
            w[i] = p.w + (size_t)(p.first_column + (in_w[i] ? at : 0)) * k;
        }
    }
    // Columns from_k to from_k + TILE_K to two (TILE, STEP); zeros past every edge.
    DEVICE_METHOD void stage(bf16* to_x, bf16* to_w, int from_k) const {
        const int left = k - from_k - column, at = left > 0 ? from_k + column : 0;
        UNROLL
        for (int i = 0; i < 2; i++) {
            const int to = (row + i * APART) * STEP + column;
            stage_8(to_x + to, x[i] + at, in_x[i] ? left : 0, k % 8 == 0);
            stage_8(to_w + to, w[i] + at, in_w[i] ? left : 0, k % 8 == 0);
        }
    }
};

// sum += x (64, TILE_K) · wᵀ (32, TILE_K) of this warp's part of a stage.
DEVICE void multiply_stage(float (&sum)[4][4][4], const bf16* x, const bf16* w) {
    const int lane = threadIdx.x % 32;
    UNROLL
    for (int k = 0; k < TILE_K; k += 16) {
        unsigned a[4][4], b[2][4];
        UNROLL
        for (int m = 0; m < 4; m++)
            ldmatrix_x4(a[m], x + (m * 16 + lane % 16) * STEP + k + lane / 16 * 8);
        UNROLL
        for (int n = 0; n < 2; n++) {
            const int row = n * 16 + lane / 16 * 8 + lane % 8;
            ldmatrix_x4(b[n], w + row * STEP + k + lane / 8 % 2 * 8);
        }
        UNROLL
        for (int m = 0; m < 4; m++)
            UNROLL
            for (int n = 0; n < 4; n++) mma_m16n8k16(sum[m][n], a[m], b[n / 2] + n % 2 * 2);
    }
}

template <class OUT>
DEVICE void multiply_tile(const Product<bf16, OUT>& p) {
    DYN_SMEM(bf16, shared);  // (STAGES, x and w, TILE, STEP)
    const auto x_of = [&](int step) { return shared + step % STAGES * 2 * TILE * STEP; };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    const int steps = (p.k + TILE_K - 1) / TILE_K;
    const StagedRows rows(p);
    float sum[4][4][4] = {};
    for (int step = 0; step < STAGES - 1; step++) {
        if (step < steps) rows.stage(x_of(step), x_of(step) + TILE * STEP, step * TILE_K);
        cp_async_commit();
    }
    for (int step = 0; step < steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // this step has arrived, and nobody reads the one before any more
        const int next = step + STAGES - 1;
        if (next < steps) rows.stage(x_of(next), x_of(next) + TILE * STEP, next * TILE_K);
        cp_async_commit();
        const bf16* x = x_of(step);
        multiply_stage(sum, x + warp_row * STEP, x + (TILE + warp_column) * STEP);
    }
    cp_async_wait<0>();
    UNROLL
    for (int m = 0; m < 4; m++)
        UNROLL
        for (int n = 0; n < 4; n++)
            UNROLL
            for (int half = 0; half < 2; half++)
                p.write_pair(warp_row + m * 16 + half * 8 + lane / 4,
                             warp_column + n * 8 + lane % 4 * 2, sum[m][n][2 * half],
                             sum[m][n][2 * half + 1]);
}

// fp32: 64 x 64 by 256 threads, each 4 x 4 of the tile, 16 apart. K in steps of 16.
constexpr int TILE_F32 = 64;
constexpr int TILE_F32_K = 16;

DEVICE void multiply_tile(const Product<f32, f32>& p) {
    SHARED(float, x, [TILE_F32_K][TILE_F32 + 1]);
    SHARED(float, w, [TILE_F32_K][TILE_F32 + 1]);
    const int row = threadIdx.x / 16, column = threadIdx.x % 16;
    float sum[4][4] = {};
    for (int from_k = 0; from_k < p.k; from_k += TILE_F32_K) {
        for (int i = threadIdx.x; i < TILE_F32 * TILE_F32_K; i += TILE_THREADS) {
            const int line = i / TILE_F32_K, at = i % TILE_F32_K, k = from_k + at;
            const bool in_x = line < p.count && k < p.k;
            const bool in_w = p.first_column + line < p.n && k < p.k;
            x[at][line] = in_x ? p.x_row(line)[k] : 0.0f;
            w[at][line] = in_w ? p.w[(size_t)(p.first_column + line) * p.k + k] : 0.0f;
        }
        __syncthreads();
        for (int k = 0; k < TILE_F32_K; k++)
            UNROLL
            for (int i = 0; i < 4; i++)
                UNROLL
                for (int j = 0; j < 4; j++)
                    sum[i][j] = fmaf(x[k][row + 16 * i], w[k][column + 16 * j], sum[i][j]);
        __syncthreads();
    }
    UNROLL
    for (int i = 0; i < 4; i++)
        UNROLL
        for (int j = 0; j < 4; j++) p.write(row + 16 * i, column + 16 * j, sum[i][j]);
}
