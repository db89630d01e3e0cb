// Fibers: stacks switched by hand, and what the sanitizers must be told at each switch.
#include <sys/mman.h>

#include <cstdlib>

#include "engine.h"

#ifdef EMULATOR_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef EMULATOR_TSAN
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_read_range(void* at, unsigned long bytes);
extern "C" void __tsan_write_range(void* at, unsigned long bytes);
#endif

#if !defined(__x86_64__)
#error "the emulator switches stacks in x86-64 assembly"
#endif

namespace emulator {

Engine engine;

// Saves the callee-saved registers and the stack pointer in *from, and goes on at `to`.
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.globl emulator_switch
.type emulator_switch,@function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulator_switch,.-emulator_switch
)");

void switch_to(Fiber& fiber) {
    engine.current = &fiber;
#ifdef EMULATOR_TSAN
    __tsan_switch_to_fiber(fiber.tsan_fiber, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef EMULATOR_ASAN
    __sanitizer_start_switch_fiber(&engine.scheduler_fake, fiber.stack, STACK_BYTES);
#endif
    emulator_switch(&engine.scheduler_stack_pointer, fiber.stack_pointer);
#ifdef EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(engine.scheduler_fake, nullptr, nullptr);
#endif
    engine.current = nullptr;
}

void switch_to_scheduler() {
    Fiber& fiber = *engine.current;
#ifdef EMULATOR_TSAN
    __tsan_switch_to_fiber(engine.scheduler_tsan, __tsan_switch_to_fiber_no_sync);
#endif
#ifdef EMULATOR_ASAN
    void** fake = fiber.state == State::Done ? nullptr : &fiber.asan_fake;
    __sanitizer_start_switch_fiber(fake, engine.scheduler_bottom, engine.scheduler_size);
#endif
    emulator_switch(&fiber.stack_pointer, engine.scheduler_stack_pointer);
#ifdef EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(fiber.asan_fake, nullptr, nullptr);
#endif
}

static void enter() {
#ifdef EMULATOR_ASAN
    __sanitizer_finish_switch_fiber(nullptr, &engine.scheduler_bottom, &engine.scheduler_size);
#endif
    run_kernel();
    switch_to_scheduler();
    __builtin_trap();
}

// A stack on which a switch starts `enter`: six registers to restore, and where to return to.
void prepare(Fiber& fiber) {
    void** top = reinterpret_cast<void**>(fiber.stack + STACK_BYTES - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(enter);
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber.stack_pointer = top;
    fiber.asan_fake = nullptr;
}

static Fiber new_fiber() {
    Fiber fiber{};
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stack == MAP_FAILED) fail("no memory for the stack of a thread");
    mprotect(stack, 4096, PROT_NONE);
    fiber.stack = static_cast<char*>(stack);
#ifdef EMULATOR_TSAN
    fiber.tsan_fiber = __tsan_create_fiber(0);
#endif
    return fiber;
}

void make_fibers(size_t count) {
    while (engine.fibers.size() < count) engine.fibers.push_back(new_fiber());
    while (engine.fibers.size() > count) {
#ifdef EMULATOR_TSAN
        __tsan_destroy_fiber(engine.fibers.back().tsan_fiber);
#endif
        munmap(engine.fibers.back().stack, STACK_BYTES);
        engine.fibers.pop_back();
    }
#ifdef EMULATOR_TSAN
    engine.scheduler_tsan = __tsan_get_current_fiber();
#endif
}

void note_read([[maybe_unused]] const void* at, [[maybe_unused]] size_t bytes) {
#ifdef EMULATOR_TSAN
    __tsan_read_range(const_cast<void*>(at), bytes);
#endif
}

void note_write([[maybe_unused]] void* at, [[maybe_unused]] size_t bytes) {
#ifdef EMULATOR_TSAN
    __tsan_write_range(at, bytes);
#endif
}

void note_release([[maybe_unused]] void* at) {
#ifdef EMULATOR_TSAN
    __tsan_release(at);
#endif
}

void note_acquire([[maybe_unused]] void* at) {
#ifdef EMULATOR_TSAN
    __tsan_acquire(at);
#endif
}

}  // namespace emulator
