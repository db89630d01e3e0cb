// What kernels see of the emulator: CUDA's words for C++ on the CPU.
//
// Every CUDA thread is a fiber; blocks run one after another. Threads run one at a time until a
// barrier or a warp collective, in an order that tests choose. Memory starts poisoned, copies that
// are asynchronous arrive as late as the kernel allows, and a collective that not all threads
// reach is an error. Built with -fsanitize=thread, the whole is a race detector over shared and
// global memory; see README.md.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict

namespace emulator {

// What a lane brings to a collective, and what it takes from it.
struct Slot {
    uint64_t words[8];
};
// Computes what every one of the 32 lanes takes, in place.
using Combine = void (*)(Slot* lanes);

struct Kernel {
    const char* name;
    void (*call)(void** arguments);
    int count;
    const uint16_t* sizes;  // (count) bytes of each argument
    const uint8_t* is_pointer;
};

const uint3& thread_index();
const uint3& block_index();
const dim3& block_size();
const dim3& grid_size();

void block_barrier(int line);
void warp_barrier(int line);
Slot exchange(const char* name, int line, const Slot& brought, Combine combine);
int lane();
void* shared_array(const void* key, size_t bytes, size_t alignment);
void* dynamic_shared();
void copy_async(void* to, const void* from, bool is_zero, int line);
void commit_copies();
void wait_for_copies(int groups_left);
Slot load_matrices(const void* row, bool transposed, int line);
Slot multiply(const Slot& fragments, int line);
void combine_shuffle(Slot* lanes);
void combine_ballot(Slot* lanes);

// Makes a kernel callable by name with an array of pointers to its arguments.
template <class F>
struct Signature;
template <class... A>
struct Signature<void (*)(A...)> {
    static constexpr uint16_t sizes[] = {sizeof(A)..., 0};
    static constexpr uint8_t is_pointer[] = {std::is_pointer_v<A>..., 0};
    template <void (*F)(A...), size_t... I>
    static void unpack(void** arguments, std::index_sequence<I...>) {
        F(*static_cast<A*>(arguments[I])...);
    }
    template <void (*F)(A...)>
    static void call(void** arguments) {
        unpack<F>(arguments, std::index_sequence_for<A...>{});
    }
    template <void (*F)(A...)>
    static Kernel kernel(const char* name) {
        return {name, &call<F>, int(sizeof...(A)), sizes, is_pointer};
    }
};
struct Registration {
    explicit Registration(const Kernel& kernel);
};

template <class T>
Slot slot_of(const T& value) {
    static_assert(sizeof(T) <= sizeof(Slot));
    Slot slot{};
    std::memcpy(&slot, &value, sizeof(T));
    return slot;
}
template <class T>
T value_of(const Slot& slot) {
    T value;
    std::memcpy(&value, &slot, sizeof(T));
    return value;
}
template <class T>
T shuffle(T value, int source, int line) {
    static_assert(sizeof(T) <= 8);
    Slot slot = slot_of(value);
    slot.words[1] = uint64_t(source & 31);
    return value_of<T>(exchange("shuffle", line, slot, combine_shuffle));
}
inline unsigned ballot(bool vote, int line) {
    return value_of<unsigned>(exchange("ballot", line, slot_of(uint64_t(vote)), combine_ballot));
}

}  // namespace emulator

#define REGISTER_KERNEL(name)                          \
    static emulator::Registration name##_registration( \
        emulator::Signature<decltype(&name)>::kernel<&name>(#name));

#define threadIdx (emulator::thread_index())
#define blockIdx (emulator::block_index())
#define blockDim (emulator::block_size())
#define gridDim (emulator::grid_size())

// A shared array belongs to its declaration and to the block that runs.
#define SHARED(T, name, dims)                                                             \
    static char name##_key;                                                               \
    using name##_array = std::remove_reference_t<decltype(*static_cast<T(*) dims>(nullptr))>; \
    name##_array& name = *static_cast<name##_array*>(                                     \
        emulator::shared_array(&name##_key, sizeof(name##_array), 16))
#define DYN_SMEM(T, name) T* name = static_cast<T*>(emulator::dynamic_shared())

#define __syncthreads() emulator::block_barrier(__LINE__)
#define __syncwarp() emulator::warp_barrier(__LINE__)
// Only whole warps take part in collectives here, so the mask is not looked at.
#define __shfl_sync(mask, value, source) emulator::shuffle(value, source, __LINE__)
#define __shfl_xor_sync(mask, value, offset) \
    emulator::shuffle(value, emulator::lane() ^ (offset), __LINE__)
#define __ballot_sync(mask, vote) emulator::ballot(vote, __LINE__)

template <class T>
T atomicAdd(T* at, T value) {
    static_assert(std::is_integral_v<T>, "atomics on floats have no fixed order");
    return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline float __uint_as_float(unsigned bits) {
    return emulator::value_of<float>(emulator::slot_of(bits));
}
inline unsigned __float_as_uint(float x) {
    return emulator::value_of<unsigned>(emulator::slot_of(x));
}
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

// The twins of the wrappers in common.cuh.
inline float bf16_to_float(unsigned short x) { return __uint_as_float(unsigned(x) << 16); }
inline unsigned short float_to_bf16(float x) {
    const unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}
inline unsigned pack_bf16(float low, float high) {
    return float_to_bf16(low) | unsigned(float_to_bf16(high)) << 16;
}
inline float reciprocal(float x) { return 1.0f / x; }
inline float exp2_flush(float x) { return x < -126.0f ? 0.0f : std::exp2(x); }

struct MmaFragments {
    float d[4];
    unsigned a[4], b[2];
};
inline void emulated_mma(float (&d)[4], const unsigned (&a)[4], const unsigned* b, int line) {
    MmaFragments all;
    std::memcpy(all.d, d, sizeof(d));
    std::memcpy(all.a, a, sizeof(a));
    std::memcpy(all.b, b, 8);
    all = emulator::value_of<MmaFragments>(emulator::multiply(emulator::slot_of(all), line));
    std::memcpy(d, all.d, sizeof(d));
}
#define mma_m16n8k16(d, a, b) emulated_mma(d, a, b, __LINE__)

struct MatrixFragments {
    unsigned r[4];
};
inline void emulated_ldmatrix(unsigned (&r)[4], const void* row, bool transposed, int line) {
    const auto all = emulator::value_of<MatrixFragments>(
        emulator::load_matrices(row, transposed, line));
    std::memcpy(r, all.r, sizeof(r));
}
#define ldmatrix_x4(r, row) emulated_ldmatrix(r, row, false, __LINE__)
#define ldmatrix_x4_transposed(r, row) emulated_ldmatrix(r, row, true, __LINE__)

#define cp_async_16(to, from, is_zero) emulator::copy_async(to, from, is_zero, __LINE__)
inline void cp_async_commit() { emulator::commit_copies(); }
template <int N>
void cp_async_wait() {
    emulator::wait_for_copies(N);
}
