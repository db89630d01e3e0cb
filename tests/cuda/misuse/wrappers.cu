// The wrappers of common.cuh alone: what lies behind their PTX is proved on a device, and their
// twins on the emulator, by the same check.
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

// Asynchronous copies of one row a lane, every other of them of zeros.
KERNEL(32) copied_rows(unsigned* out, const unsigned* from) {
    SHARED(unsigned, rows, [32][4]);
    cp_async_16(rows[threadIdx.x], from + threadIdx.x * 4, threadIdx.x % 2);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = rows[31 - threadIdx.x][i];
}
REGISTER_KERNEL(copied_rows)

// One number a thread: rounded to bf16, alone and packed before its negative, 2^x, and 1 / x.
KERNEL(256)
converted(bf16* rounded, unsigned* packed, float* powers, float* inverses, const float* x,
          int count) {
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i >= count) return;
    rounded[i] = float_to_bf16(x[i]);
    packed[i] = pack_bf16(x[i], -x[i]);
    powers[i] = exp2_flush(x[i]);
    inverses[i] = reciprocal(x[i]);
}
REGISTER_KERNEL(converted)
