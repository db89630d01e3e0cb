// Memory of the pretended device: poisoned when it is handed out, exact to the byte so that
// AddressSanitizer sees every access beside it.
#include <sys/mman.h>

#include <cstdlib>
#include <vector>

#include "engine.h"

namespace emulator {

static std::vector<void*> of_this_block;

#ifdef EMULATOR_TSAN
// Shared memory of a launch, never used twice: the race detector remembers addresses, and blocks
// that share one by turns would look like threads that race.
static constexpr size_t ARENA_BYTES = size_t(1) << 30;
static size_t arena_used = 0;

// Mapped before the first launch, since mapping counts as writing.
static char* const arena = static_cast<char*>(
    mmap(nullptr, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
         -1, 0));

static void* shared_memory(size_t bytes, size_t alignment) {
    arena_used = (arena_used + alignment - 1) / alignment * alignment;
    char* found = arena + arena_used;
    arena_used += bytes + 64;
    if (arena_used > ARENA_BYTES) fail("a process that looks for races has no shared memory left");
    return found;
}
#else
static void* shared_memory(size_t bytes, size_t alignment) {
    void* found = nullptr;
    if (posix_memalign(&found, alignment, bytes)) fail("no memory for a shared array");
    of_this_block.push_back(found);
    return found;
}
#endif

// Addresses that no other block orders by, or a barrier would seem to order the blocks, too.
uint64_t* fresh_orders(size_t count) {
#ifdef EMULATOR_TSAN
    return static_cast<uint64_t*>(shared_memory(count * sizeof(uint64_t), 8));
#else
    (void)count;
    static uint64_t unused[1 + THREADS_MAX / WARP];
    return unused;
#endif
}

// Byte by byte and volatile, so that no intercepted memset reports it as an access.
static void fill(void* at, size_t bytes, unsigned char value) {
    volatile unsigned char* p = static_cast<unsigned char*>(at);
    for (size_t i = 0; i < bytes; i++) p[i] = value;
}

static char* new_shared(size_t bytes, size_t alignment) {
    engine.shared_bytes += bytes;
    if (engine.shared_bytes > SHARED_BYTES_MAX)
        fail("%s: %zu bytes of shared memory, %zu are the most", engine.kernel->name,
             engine.shared_bytes, SHARED_BYTES_MAX);
    void* memory = shared_memory(bytes, alignment);
    fill(memory, bytes, engine.settings.poison);
    return static_cast<char*>(memory);
}

void start_block_memory(size_t dynamic_bytes) {
    engine.shared.clear();
    engine.shared_bytes = 0;
    engine.dynamic_bytes = dynamic_bytes;
    engine.dynamic = dynamic_bytes ? new_shared(dynamic_bytes, 128) : nullptr;
}

void end_block_memory() {
    for (void* memory : of_this_block) free(memory);
    of_this_block.clear();
}

void* shared_array(const void* key, size_t bytes, size_t alignment) {
    for (const SharedArray& array : engine.shared)
        if (array.key == key) return array.data;
    engine.shared.push_back({key, new_shared(bytes, alignment < 16 ? 16 : alignment)});
    return engine.shared.back().data;
}

void* dynamic_shared() {
    if (!engine.dynamic) fail("%s: launched without dynamic shared memory", engine.kernel->name);
    return engine.dynamic;
}

}  // namespace emulator

// Device memory for tests: poisoned, 256-byte aligned as a driver's, with nothing behind it.
extern "C" void* emulator_allocate(size_t bytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 256, bytes ? bytes : 1)) return nullptr;
    emulator::fill(memory, bytes, emulator::engine.settings.poison);
    return memory;
}

extern "C" void emulator_free(void* memory) { free(memory); }

extern "C" void emulator_copy(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
