// What all kernels share: number types, the instructions that C++ has no word for, and sums over
// warps and blocks. No header of a toolkit is needed; the same source compiles with NVRTC for a
// device and with g++ for the emulator in tests/cuda, which has a twin of every wrapper below that
// holds PTX.
//
// Rules that all kernels keep: a row's bits depend on that row's own sequence alone, so block
// shapes and the order of every sum follow from widths, never from the number of rows; no atomics
// on floats; every buffer the arena hands out starts at a multiple of 16 bytes.
#pragma once

typedef unsigned short bf16;
typedef float f32;

#ifdef KDSCORE_EMULATOR
#include "emulator.h"
#define DEVICE static inline
#define DEVICE_METHOD
#define UNROLL
#define KEEP_ROLLED
#define UNROLL_TWICE
#else
#define DEVICE static __device__ __forceinline__
#define DEVICE_METHOD __device__ __forceinline__
// Before loops over arrays that must live in registers.
#define UNROLL _Pragma("unroll")
// Before loops whose steps, laid out side by side, would only take registers.
#define KEEP_ROLLED _Pragma("unroll 1")
#define UNROLL_TWICE _Pragma("unroll 2")
#define SHARED(T, name, dims) __shared__ __align__(16) T name dims
#define DYN_SMEM(T, name)                                          \
    extern __shared__ __align__(128) unsigned char name##_bytes[]; \
    T* name = reinterpret_cast<T*>(name##_bytes)
#define REGISTER_KERNEL(name)

DEVICE float bf16_to_float(bf16 x) { return __uint_as_float((unsigned)x << 16); }
DEVICE bf16 float_to_bf16(float x) {
    bf16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}
// Two numbers in one register, `low` in the lower half.
DEVICE unsigned pack_bf16(float low, float high) {
    unsigned r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
// 2^x within 2^-22 of it, and 0 below 2^-126.
DEVICE float exp2_flush(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// 1 / x within two units in the last place; 0 for infinity.
DEVICE float reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// d (16, 8) += a (16, 16) · b (16, 8), spread over a warp as the PTX ISA says for m16n8k16.
DEVICE void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], const unsigned* b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
// Four 8 x 8 matrices; lane 8 m + r names row r of matrix m.
DEVICE void ldmatrix_x4(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void ldmatrix_x4_transposed(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
// 16 bytes from global to shared memory, there after the wait for their group; or 16 zeros.
DEVICE void cp_async_16(void* to, const void* from, bool is_zero) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(is_zero ? 0 : 16)
                 : "memory");
}
DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all but the last N groups of this thread have arrived.
template <int N>
DEVICE void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
#endif

// Threads of a block, and, where the compiler should not go for more, blocks a multiprocessor.
#define KERNEL(...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__)

#define ALL_LANES 0xffffffffu
#define NEGATIVE_INFINITY (-__uint_as_float(0x7f800000u))
#define LOG2_E 1.44269504088896341f

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return bf16_to_float(x); }
template <class T>
DEVICE T from_float(float x) {
    if constexpr (sizeof(T) == 2)
        return float_to_bf16(x);
    else
        return x;
}

// N numbers of a row, widened: 8 (whole 16-byte pieces) or 1.
template <int N>
struct Numbers {
    float v[N];
};

template <int N, class T>
DEVICE Numbers<N> load(const T* at) {
    Numbers<N> x;
    if constexpr (N == 1) {
        x.v[0] = to_float(*at);
    } else if constexpr (sizeof(T) == 2) {
        const uint4 raw = *reinterpret_cast<const uint4*>(at);
        const unsigned words[4] = {raw.x, raw.y, raw.z, raw.w};
        UNROLL
        for (int i = 0; i < 4; i++) {
            x.v[2 * i] = __uint_as_float(words[i] << 16);
            x.v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    } else {
        UNROLL
        for (int i = 0; i < 2; i++) {
            const float4 raw = *reinterpret_cast<const float4*>(at + 4 * i);
            x.v[4 * i] = raw.x, x.v[4 * i + 1] = raw.y;
            x.v[4 * i + 2] = raw.z, x.v[4 * i + 3] = raw.w;
        }
    }
    return x;
}

template <int N, class T>
DEVICE void store(T* at, const Numbers<N>& x) {
    if constexpr (N == 1) {
        *at = from_float<T>(x.v[0]);
    } else if constexpr (sizeof(T) == 2) {
        uint4 raw;
        raw.x = pack_bf16(x.v[0], x.v[1]), raw.y = pack_bf16(x.v[2], x.v[3]);
        raw.z = pack_bf16(x.v[4], x.v[5]), raw.w = pack_bf16(x.v[6], x.v[7]);
        *reinterpret_cast<uint4*>(at) = raw;
    } else {
        UNROLL
        for (int i = 0; i < 2; i++) {
            float4 raw;
            raw.x = x.v[4 * i], raw.y = x.v[4 * i + 1];
            raw.z = x.v[4 * i + 2], raw.w = x.v[4 * i + 3];
            *reinterpret_cast<float4*>(at + 4 * i) = raw;
        }
    }
}

// Two numbers side by side, the first at an even place.
DEVICE void store_pair(bf16* at, float low, float high) {
    *reinterpret_cast<unsigned*>(at) = pack_bf16(low, high);
}
DEVICE void store_pair(f32* at, float low, float high) {
    float2 pair;
    pair.x = low, pair.y = high;
    *reinterpret_cast<float2*>(at) = pair;
}

template <int N>
struct Count {
    static constexpr int value = N;
};

// Calls f(Count<N>, first number) for pieces of `width` numbers that this thread, one of `threads`,
// takes: N = 8 where rows of that width are whole pieces, else 1.
template <class F>
DEVICE void for_pieces(int width, int thread, int threads, F f) {
    if (width % 8 == 0)
        for (int at = 8 * thread; at < width; at += 8 * threads) f(Count<8>{}, at);
    else
        for (int at = thread; at < width; at += threads) f(Count<1>{}, at);
}

// The same over a whole buffer of `count` numbers and all threads of the grid.
template <class F>
DEVICE void for_all(long long count, F f) {
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long threads = (long long)gridDim.x * blockDim.x;
    const long long pieces = count / 8;
    for (long long i = thread; i < pieces; i += threads) f(Count<8>{}, 8 * i);
    for (long long i = 8 * pieces + thread; i < count; i += threads) f(Count<1>{}, i);
}

template <class T>
DEVICE T warp_sum(T x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}
DEVICE float warp_max(float x) {
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// The same sum in every thread of a block of up to 32 warps. `spare` (32) is shared memory that
// nobody else uses until the block's next barrier but one.
template <class T>
DEVICE T block_sum(T x, T* spare) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_sum(x);
    if (lane == 0) spare[warp] = x;
    __syncthreads();
    x = warp_sum(lane < warps ? spare[lane] : T(0));
    __syncthreads();
    return x;
}
DEVICE float block_max(float x, float* spare) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    x = warp_max(x);
    if (lane == 0) spare[warp] = x;
    __syncthreads();
    x = warp_max(lane < warps ? spare[lane] : NEGATIVE_INFINITY);
    __syncthreads();
    return x;
}

DEVICE float sigmoid(float x) { return reciprocal(1.0f + expf(-x)); }
// cap · tanh(x / cap), by the one exponential that both passes of a kernel then agree on.
DEVICE float soft_cap(float x, float cap) {
    return cap * (1.0f - 2.0f / (1.0f + expf(2.0f * (x / cap))));
}

// Brings numbers [0, count) of 8 from `from` to shared memory, zeros for the rest. Rows that are
// whole 16-byte pieces (`is_whole`) have 8 or none left and are copied asynchronously.
DEVICE void stage_8(bf16* to, const bf16* from, int count, bool is_whole) {
    if (is_whole)
        cp_async_16(to, from, count <= 0);
    else
        for (int i = 0; i < 8; i++) to[i] = i < count ? from[i] : (bf16)0;
}
