// The scheduler: runs the threads of a block by turns, and stops at every misuse of a barrier or
// a collective.
#include "engine.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

namespace emulator {

void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "emulator: ");
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    va_end(arguments);
    abort();
}

static std::map<std::string, Kernel>& kernels() {
    static std::map<std::string, Kernel> all;
    return all;
}

Registration::Registration(const Kernel& kernel) { kernels()[kernel.name] = kernel; }

const uint3& thread_index() { return engine.current->thread; }
const uint3& block_index() { return engine.block; }
const dim3& block_size() { return engine.block_dim; }
const dim3& grid_size() { return engine.grid_dim; }
int lane() { return engine.current->lane; }

static void wait(State state, const char* what, int line) {
    Fiber& fiber = *engine.current;
    fiber.state = state;
    fiber.waits_for = what;
    fiber.line = line;
    switch_to_scheduler();
}

void block_barrier(int line) {
    Fiber& me = *engine.current;
    note_release(engine.order_block);
    me.line = line;
    if (++engine.at_barrier < int(engine.fibers.size())) {
        wait(State::AtBlock, "__syncthreads", line);
    } else {
        for (Fiber& other : engine.fibers) {
            if (&other != &me && other.line != line)
                fail("%s: thread %d is at __syncthreads of line %d, thread %d at line %d",
                     engine.kernel->name, me.index, line, other.index, other.line);
            other.state = State::Ready;
        }
        engine.at_barrier = 0;
        // Goes to the back of the queue, so that the order of the next phase is the chosen one.
        switch_to_scheduler();
    }
    note_acquire(engine.order_block);
}

// Lanes leave what they bring; the last one computes for all, and the others go on.
Slot exchange(const char* name, int line, const Slot& brought, Combine combine) {
    Fiber& me = *engine.current;
    Warp& warp = engine.warps[size_t(me.warp)];
    if (warp.arrived && (warp.name != name || warp.line != line))
        fail("%s: lanes of warp %d differ: %s at line %d, %s at line %d", engine.kernel->name,
             me.warp, name, line, warp.name, warp.line);
    warp.name = name;
    warp.line = line;
    warp.lanes[me.lane] = brought;
    warp.arrived |= 1u << me.lane;
    if (warp.arrived != 0xffffffffu) {
        wait(State::AtWarp, name, line);
    } else {
        warp.arrived = 0;
        combine(warp.lanes);
        Fiber* first = &engine.fibers[size_t(me.warp) * WARP];
        for (int i = 0; i < WARP; i++) first[i].state = State::Ready;
    }
    return warp.lanes[me.lane];
}

// Unlike a shuffle, orders the memory of its lanes.
void warp_barrier(int line) {
    uint64_t* order = engine.order_block + 1 + engine.current->warp;
    note_release(order);
    exchange("__syncwarp", line, Slot{}, [](Slot*) {});
    note_acquire(order);
}

void run_kernel() {
    Fiber& me = *engine.current;
    note_acquire(&engine.order_start);
    engine.kernel->call(engine.arguments);
    note_release(&engine.order_end);
    if (!me.copies.empty())
        fail("%s: thread %d ends with cp.async in flight", engine.kernel->name, me.index);
    me.state = State::Done;
    me.line = -1;
    engine.alive--;
    if (engine.at_barrier)
        fail("%s: thread %d ends while others wait at __syncthreads", engine.kernel->name,
             me.index);
}

static uint64_t next_random() {
    uint64_t& x = engine.random;
    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    return x;
}

static void start_threads() {
    const size_t count = engine.fibers.size();
    const dim3& size = engine.block_dim;
    for (size_t i = 0; i < count; i++) {
        Fiber& fiber = engine.fibers[i];
#ifdef EMULATOR_TSAN
        // Identities move on by one at every block, so that thread i of two blocks is not one
        // thread to the race detector.
        Fiber& next = engine.fibers[(i + 1) % count];
        if (i + 1 < count) {
            std::swap(fiber.tsan_fiber, next.tsan_fiber);
            std::swap(fiber.stack, next.stack);
        }
#endif
        fiber.index = int(i);
        fiber.lane = int(i) % WARP;
        fiber.warp = int(i) / WARP;
        const unsigned n = unsigned(i);
        fiber.thread = {n % size.x, n / size.x % size.y, n / size.x / size.y};
        fiber.state = State::Ready;
        fiber.line = 0;
        fiber.copies.clear();
        fiber.group_end.clear();
        prepare(fiber);
    }
    engine.warps.assign(count / WARP, Warp{});
    engine.order_block = fresh_orders(1 + count / WARP);
    engine.alive = int(count);
    engine.at_barrier = 0;
}

[[noreturn]] static void report_deadlock() {
    int shown = 0;
    for (const Fiber& fiber : engine.fibers)
        if (fiber.state != State::Done && shown++ < 8)
            fprintf(stderr, "  thread %d waits in %s at line %d\n", fiber.index, fiber.waits_for,
                    fiber.line);
    fail("%s: no thread of block (%u, %u, %u) can go on", engine.kernel->name, engine.block.x,
         engine.block.y, engine.block.z);
}

static void run_block(std::vector<int>& turns) {
    start_threads();
    while (engine.alive) {
        if (engine.settings.order == Order::Random)
            for (size_t i = turns.size() - 1; i > 0; i--)
                std::swap(turns[i], turns[next_random() % (i + 1)]);
        bool ran = false;
        for (int turn : turns) {
            Fiber& fiber = engine.fibers[size_t(turn)];
            if (fiber.state != State::Ready) continue;
            ran = true;
            switch_to(fiber);
        }
        if (!ran) report_deadlock();
    }
}

static bool is_launchable(const dim3& grid, const dim3& block) {
    const size_t threads = size_t(block.x) * block.y * block.z;
    return threads && threads % WARP == 0 && threads <= THREADS_MAX && grid.x && grid.y && grid.z &&
           grid.y <= 65535 && grid.z <= 65535;
}

static void run_grid(size_t dynamic_bytes) {
    const dim3 grid = engine.grid_dim;
    const size_t threads = engine.fibers.size(), blocks = size_t(grid.x) * grid.y * grid.z;
    std::vector<int> turns(threads);
    for (size_t i = 0; i < threads; i++)
        turns[i] = int(engine.settings.order == Order::Reverse ? threads - 1 - i : i);
    for (size_t i = 0; i < blocks; i++) {
        const size_t at = engine.settings.order == Order::Reverse ? blocks - 1 - i : i;
        engine.block = {unsigned(at % grid.x), unsigned(at / grid.x % grid.y),
                        unsigned(at / grid.x / grid.y)};
        start_block_memory(dynamic_bytes);
        run_block(turns);
        end_block_memory();
    }
}

}  // namespace emulator

using namespace emulator;

extern "C" void emulator_configure(int order, uint64_t seed, int poison) {
    engine.settings = {Order(order), seed, (unsigned char)poison};
    engine.random = seed * 2654435761u + 1;
}

// 0, 1 for a launch that a device would refuse, or 2 for a kernel that doesn't exist.
extern "C" int emulator_launch(const char* name, const unsigned* grid, const unsigned* block,
                               size_t dynamic_bytes, void** arguments) {
    const auto found = kernels().find(name);
    if (found == kernels().end()) return 2;
    engine.grid_dim = {grid[0], grid[1], grid[2]};
    engine.block_dim = {block[0], block[1], block[2]};
    if (!is_launchable(engine.grid_dim, engine.block_dim)) return 1;
    engine.kernel = &found->second;
    engine.arguments = arguments;
    make_fibers(size_t(block[0]) * block[1] * block[2]);
    note_release(&engine.order_start);
    run_grid(dynamic_bytes);
    note_acquire(&engine.order_end);
    return 0;
}

// Bytes of each argument and whether it is a pointer; the number of arguments, or -1.
extern "C" int emulator_signature(const char* name, const uint16_t** sizes,
                                  const uint8_t** is_pointer) {
    const auto found = kernels().find(name);
    if (found == kernels().end()) return -1;
    *sizes = found->second.sizes;
    *is_pointer = found->second.is_pointer;
    return found->second.count;
}
