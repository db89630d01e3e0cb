// Kernels with a mistake each, and sound ones beside them: what the emulator must stop, and what
// it must let pass. Also the wrappers of common.cuh alone, for a check of their layouts.
#include "common.cuh"

KERNEL(32) mma_fragments(const unsigned* a, const unsigned* b, float* d) {
    unsigned left[4], right[2];
    float sum[4];
    for (int i = 0; i < 4; i++) left[i] = a[threadIdx.x * 4 + i], sum[i] = d[threadIdx.x * 4 + i];
    for (int i = 0; i < 2; i++) right[i] = b[threadIdx.x * 2 + i];
    mma_m16n8k16(sum, left, right);
    for (int i = 0; i < 4; i++) d[threadIdx.x * 4 + i] = sum[i];
}
REGISTER_KERNEL(mma_fragments)

KERNEL(32) ldmatrix_fragments(unsigned* straight, unsigned* turned, const bf16* from) {
    SHARED(bf16, rows, [32][8]);
    for (int i = 0; i < 8; i++) rows[threadIdx.x][i] = from[threadIdx.x * 8 + i];
    __syncwarp();
    unsigned r[4];
    ldmatrix_x4(r, rows[threadIdx.x]);
    for (int i = 0; i < 4; i++) straight[threadIdx.x * 4 + i] = r[i];
    ldmatrix_x4_transposed(r, rows[threadIdx.x]);
    for (int i = 0; i < 4; i++) turned[threadIdx.x * 4 + i] = r[i];
}
REGISTER_KERNEL(ldmatrix_fragments)

KERNEL(64) exchange_with_barrier(float* out) {
    SHARED(float, s, [64]);
    s[threadIdx.x] = threadIdx.x;
    __syncthreads();
    out[threadIdx.x] = s[63 - threadIdx.x];
}
REGISTER_KERNEL(exchange_with_barrier)

KERNEL(64) exchange_without_barrier(float* out) {
    SHARED(float, s, [64]);
    s[threadIdx.x] = threadIdx.x;
    out[threadIdx.x] = s[63 - threadIdx.x];
}
REGISTER_KERNEL(exchange_without_barrier)

// A shuffle doesn't order memory: this needs a __syncwarp.
KERNEL(32) exchange_by_shuffle(float* out) {
    SHARED(float, s, [32]);
    s[threadIdx.x] = threadIdx.x;
    const float other = __shfl_xor_sync(ALL_LANES, (float)threadIdx.x, 1);
    out[threadIdx.x] = s[threadIdx.x ^ 1] + other;
}
REGISTER_KERNEL(exchange_by_shuffle)

KERNEL(32) blocks_write_one_place(float* out) { out[threadIdx.x] = blockIdx.x; }
REGISTER_KERNEL(blocks_write_one_place)

KERNEL(64) barriers_differ(float* out) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();  // another barrier, by its line
    out[threadIdx.x] = 1;
}
REGISTER_KERNEL(barriers_differ)

KERNEL(64) barrier_of_some(float* out) {
    if (threadIdx.x == 5) return;
    __syncthreads();
    out[threadIdx.x] = 1;
}
REGISTER_KERNEL(barrier_of_some)

KERNEL(32) shuffle_of_some(float* out) {
    float x = threadIdx.x;
    if (threadIdx.x < 16) x = __shfl_xor_sync(ALL_LANES, x, 1);
    out[threadIdx.x] = x;
}
REGISTER_KERNEL(shuffle_of_some)

KERNEL(32) copy_unaligned(float* out, const float* from) {
    SHARED(float, s, [33]);
    cp_async_16(s + 1, from, false);
    cp_async_commit();
    cp_async_wait<0>();
    out[threadIdx.x] = s[1];
}
REGISTER_KERNEL(copy_unaligned)

KERNEL(32) copy_not_waited_for(float* out, const float* from) {
    SHARED(float, s, [128]);
    cp_async_16(s + 4 * threadIdx.x, from + 4 * threadIdx.x, false);
    cp_async_commit();
    out[threadIdx.x] = s[4 * threadIdx.x];
}
REGISTER_KERNEL(copy_not_waited_for)

KERNEL(32) shared_overrun(float* out) {
    DYN_SMEM(float, s);
    s[threadIdx.x + 1] = 1;
    out[threadIdx.x] = 1;
}
REGISTER_KERNEL(shared_overrun)

KERNEL(32) global_overrun(float* out) { out[threadIdx.x + 1] = 1; }
REGISTER_KERNEL(global_overrun)
