// The inside of the emulator: what a launch, a block, a warp and a thread are. Kernels never see
// this file; they see emulator.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "emulator.h"

#if defined(__SANITIZE_ADDRESS__)
#define EMULATOR_ASAN 1
#endif

namespace emulator {

constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 512 << 10;
// The most dynamic and static shared memory a block may have on the smallest architecture that is
// served (sm_89: 99 KiB).
constexpr size_t SHARED_BYTES_MAX = 99 << 10;
constexpr int THREADS_MAX = 1024;

enum class State : uint8_t { Ready, AtWarp, AtBlock, Done };

// A cp.async that was issued and has not arrived.
struct Copy {
    void* to;
    const void* from;  // null: zeros
};

// One CUDA thread: a stack of its own, switched by hand.
struct Fiber {
    void* stack_pointer;
    char* stack;       // STACK_BYTES, lowest page unmapped
    void* tsan_fiber;  // identity in the race detector
    void* asan_fake;   // fake stack that AddressSanitizer keeps
    int index;         // in the block
    int lane, warp;
    uint3 thread;
    State state;
    const char* waits_for;
    int line;                       // of the kernel, where it waits
    std::vector<Copy> copies;       // issued, oldest first
    std::vector<size_t> group_end;  // copies issued when each open group was committed
};

// A collective in the making: lanes leave what they bring, the last one computes for all.
struct Warp {
    uint32_t arrived;
    const char* name;
    int line;
    Slot lanes[WARP];
};

enum class Order : int { Forward, Reverse, Random };

struct Settings {
    Order order = Order::Forward;
    uint64_t seed = 1;
    unsigned char poison = 0xFF;
};

struct SharedArray {
    const void* key;  // the declaration
    char* data;
};

struct Engine {
    Settings settings;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Fiber* current = nullptr;
    uint3 block{};
    dim3 block_dim, grid_dim;
    int alive = 0, at_barrier = 0;
    const Kernel* kernel = nullptr;
    void** arguments = nullptr;
    uint64_t random = 1;

    std::vector<SharedArray> shared;
    char* dynamic = nullptr;
    size_t dynamic_bytes = 0, shared_bytes = 0;

    void* scheduler_stack_pointer = nullptr;
    void* scheduler_tsan = nullptr;
    void* scheduler_fake = nullptr;
    const void* scheduler_bottom = nullptr;
    size_t scheduler_size = 0;

    // Addresses the race detector orders by: the launch before the threads, the threads before its
    // end, and in each block its barrier and the __syncwarp of each warp.
    uint64_t order_start = 0, order_end = 0;
    uint64_t* order_block = nullptr;  // (1 + warps)
};

extern Engine engine;

// fiber.cpp
void switch_to(Fiber& fiber);
void switch_to_scheduler();
void make_fibers(size_t count);
void prepare(Fiber& fiber);
void run_kernel();  // engine.cpp: what a fresh fiber does

// memory.cpp
void start_block_memory(size_t dynamic_bytes);
uint64_t* fresh_orders(size_t count);
void end_block_memory();

// What the race detector is told of accesses and orderings that instrumented code doesn't make.
void note_read(const void* at, size_t bytes);
void note_write(void* at, size_t bytes);
void note_release(void* at);
void note_acquire(void* at);

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace emulator
