// Kernels with a mistake each, and sound ones beside them: what the emulator must stop, and what
// it must let pass.
#include "common.cuh"

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
