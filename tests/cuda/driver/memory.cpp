// Device memory: addresses used once, poison until written, nothing behind an allocation's end,
// and nothing at all where one was freed. Pinned host memory, and copies between the two.
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

#include "driver.h"

namespace standin {

const char* running_kernel = nullptr;

struct Allocation {
    size_t bytes;
    Device* device;  // null once freed
};

struct Pinned {
    size_t bytes;
    Device* device;  // in whose context it was made
};

static constexpr size_t PAGE = 4096;
static constexpr size_t ALIGNMENT = 256;  // as a driver's
static constexpr size_t SPACE = size_t(4) << 40;
static constexpr size_t PIECE = size_t(16) << 20;  // of poison, mapped again and again

static std::map<Pointer, Allocation> allocations;  // all that ever were
static std::map<Pointer, Pinned> pinned;

static size_t round_up(size_t bytes, size_t step) { return (bytes + step - 1) / step * step; }

// The range that device addresses come from; its addresses mean nothing until they are allocated.
static Pointer space() {
    static const Pointer start = [] {
        void* found = mmap(nullptr, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                           -1, 0);
        if (found == MAP_FAILED) fail("no range of addresses is free for device memory");
        return Pointer(found);
    }();
    return start;
}

static int poison_file() {
    static const int file = [] {
        const int made = memfd_create("poison", 0);
        const std::vector<char> poison(PIECE, char(settings().poison));
        if (made < 0 || write(made, poison.data(), PIECE) != ssize_t(PIECE))
            fail("no memory for poison");
        return made;
    }();
    return file;
}

// Poison costs nothing until it is written: all pages are copies of the same ones.
static void map_poison(Pointer at, size_t bytes) {
    for (size_t done = 0; done < bytes; done += PIECE) {
        const size_t piece = bytes - done < PIECE ? bytes - done : PIECE;
        void* wanted = reinterpret_cast<void*>(at + done);
        const int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
        if (mmap(wanted, piece, PROT_READ | PROT_WRITE, flags, poison_file(), 0) != wanted)
            fail("no memory for %zu bytes of a device", bytes);
    }
}

static std::map<Pointer, Allocation>::iterator allocation_at(Pointer at) {
    auto found = allocations.upper_bound(at);
    return found == allocations.begin() ? allocations.end() : std::prev(found);
}

static std::string place_of(Pointer at) {
    const auto found = allocation_at(at);
    if (!is_device_address(at)) return "no address of a device";
    if (found == allocations.end()) return "before all allocations";
    const char* state = found->second.device ? "allocation" : "freed allocation";
    return "byte " + std::to_string(at - found->first) + " of the " + state + " of " +
           std::to_string(found->second.bytes) + " bytes";
}

// Kernels run in this process, so what a device would report later stops here, at the access.
static void on_wrong_access(int signal, siginfo_t* info, void*) {
    const Pointer at = Pointer(info->si_addr);
    if (running_kernel && is_device_address(at))
        fail("%s touches %s", running_kernel, place_of(at).c_str());
    if (running_kernel) fail("%s touches %p, no address of a device", running_kernel,
                             info->si_addr);
    ::signal(signal, SIG_DFL);  // the program's own fault, met again on return
}

static void watch_accesses() {
    static const bool done = [] {
        struct sigaction action {};
        action.sa_sigaction = on_wrong_access;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigaction(SIGSEGV, &action, nullptr);
        sigaction(SIGBUS, &action, nullptr);
        return true;
    }();
    (void)done;
}

bool is_device_address(Pointer at) { return at >= space() && at - space() < SPACE; }

void check_range(const char* what, Pointer at, size_t bytes, const Device& device) {
    const auto found = allocation_at(at);
    if (found == allocations.end() || !is_device_address(at))
        fail("%s: %#lx is %s", what, at, place_of(at).c_str());
    const Allocation& allocation = found->second;
    if (!allocation.device || at + bytes > found->first + allocation.bytes)
        fail("%s: %zu bytes from %s", what, bytes, place_of(at).c_str());
    if (allocation.device != &device)
        fail("%s: memory of device %d is used on device %d", what, allocation.device->ordinal,
             device.ordinal);
}

size_t allocations_of(const Device& device) {
    size_t count = 0;
    for (const auto& [at, allocation] : allocations) count += allocation.device == &device;
    return count;
}

size_t pinned_of(const Device& device) {
    size_t count = 0;
    for (const auto& [at, buffer] : pinned) count += buffer.device == &device;
    return count;
}

static int allocate(Device& device, Pointer* at, size_t bytes) {
    static Pointer next = space() + PAGE;
    if (!bytes) return INVALID_VALUE;
    watch_accesses();
    const bool is_refused = device.used + bytes + settings().memory_taken > settings().memory;
    note("allocate %zu%s", bytes, is_refused ? " refused" : "");
    if (is_refused) return OUT_OF_MEMORY;
    // The end lies on the end of a page, and the page behind is never mapped.
    const size_t span = round_up(bytes, PAGE);
    if (next + span + PAGE > space() + SPACE) fail("all addresses of devices are used up");
    map_poison(next, span);
    *at = next + span - round_up(bytes, ALIGNMENT);
    allocations[*at] = {bytes, &device};
    device.used += bytes;
    next += span + PAGE;
    return SUCCESS;
}

static void release(Device& device, Pointer at) {
    const auto found = allocations.find(at);
    if (found == allocations.end()) fail("free of %#lx, %s", at, place_of(at).c_str());
    Allocation& allocation = found->second;
    if (!allocation.device) fail("%zu bytes are freed twice", allocation.bytes);
    allocation.device->used -= allocation.bytes;
    if (allocation.device != &device) fail("memory is freed in another device's context");
    allocation.device = nullptr;
    note("free %zu", allocation.bytes);
    const Pointer start = at / PAGE * PAGE;
    const size_t span = round_up(at + allocation.bytes - start, PAGE);
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    mmap(reinterpret_cast<void*>(start), span, PROT_NONE, flags, -1, 0);
}

// Whether the whole range is pinned; a range that only begins in pinned memory is an error.
static bool is_pinned(const void* at, size_t bytes) {
    auto found = pinned.upper_bound(Pointer(at));
    if (found == pinned.begin()) return false;
    found--;
    const Pointer end = found->first + found->second.bytes;
    if (Pointer(at) >= end) return false;
    if (Pointer(at) + bytes > end)
        fail("a copy of %zu bytes begins in a pinned buffer of %zu and ends behind it", bytes,
             found->second.bytes);
    return true;
}

static void check_host(const void* at) {
    if (is_device_address(Pointer(at))) fail("a device's address where a host's belongs");
}

// Pinned memory is read when the copy runs; other memory has been read when the call returns.
static int upload(Device& device, Pointer to, const void* from, size_t bytes,
                  const std::shared_ptr<Stream>& stream) {
    check_host(from);
    check_range("copy to the device", to, bytes, device);
    const bool direct = is_pinned(from, bytes);
    note("upload %zu stream %d %s", bytes, stream->number, direct ? "pinned" : "pageable");
    std::vector<char> kept;
    if (!direct)
        kept.assign(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    submit(stream, [=, &device] {
        check_range("copy to the device", to, bytes, device);
        memcpy(reinterpret_cast<void*>(to), direct ? from : kept.data(), bytes);
    });
    if (settings().streams == Streams::Hasty) finish(*stream);
    return SUCCESS;
}

// A pinned buffer is anybody's guess until the copy has run; other memory is filled on return.
static int download(Device& device, void* to, Pointer from, size_t bytes,
                    const std::shared_ptr<Stream>& stream) {
    check_host(to);
    check_range("copy from the device", from, bytes, device);
    const bool direct = is_pinned(to, bytes);
    note("download %zu stream %d %s", bytes, stream->number, direct ? "pinned" : "pageable");
    if (direct && settings().streams != Streams::Eager) memset(to, settings().poison, bytes);
    submit(stream, [=, &device] {
        check_range("copy from the device", from, bytes, device);
        memcpy(to, reinterpret_cast<const void*>(from), bytes);
    });
    if (!direct) finish(*stream);
    return SUCCESS;
}

}  // namespace standin

using namespace standin;

DRIVER_FUNCTION cuMemGetInfo_v2(size_t* free, size_t* total) {
    return in_context([&](Device& device) {
        *total = settings().memory;
        *free = settings().memory - device.used;
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuMemAlloc_v2(Pointer* at, size_t bytes) {
    return in_context([&](Device& device) { return allocate(device, at, bytes); });
}

DRIVER_FUNCTION cuMemFree_v2(Pointer at) {
    return in_context([&](Device& device) {
        finish_all(device);
        if (at) release(device, at);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuMemHostAlloc(void** at, size_t bytes, unsigned) {
    return in_context([&](Device& device) -> int {
        if (!bytes) return INVALID_VALUE;
        *at = aligned_alloc(PAGE, round_up(bytes, PAGE));
        if (!*at) return OUT_OF_MEMORY;
        memset(*at, settings().poison, bytes);
        pinned[Pointer(*at)] = {bytes, &device};
        note("pin %zu", bytes);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuMemFreeHost(void* at) {
    return in_context([&](Device& device) {
        finish_all(device);
        if (!pinned.erase(Pointer(at))) fail("%p is no pinned buffer, or no longer", at);
        free(at);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuMemcpyHtoDAsync_v2(Pointer to, const void* from, size_t bytes, void* stream) {
    return in_context(
        [&](Device& d) { return upload(d, to, from, bytes, stream_of(stream, d)); });
}

DRIVER_FUNCTION cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t bytes, void* stream) {
    return in_context(
        [&](Device& d) { return download(d, to, from, bytes, stream_of(stream, d)); });
}

DRIVER_FUNCTION cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, void* stream) {
    return in_context([&](Device& device) {
        check_range("copy on the device, source", from, bytes, device);
        check_range("copy on the device, target", to, bytes, device);
        note("copy %zu", bytes);
        submit(stream_of(stream, device), [=] {
            memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
        });
        return SUCCESS;
    });
}

// Without a stream: at once, and in no order with the work of streams that don't block.
DRIVER_FUNCTION cuMemcpyHtoD_v2(Pointer to, const void* from, size_t bytes) {
    return in_context([&](Device& device) {
        check_host(from);
        check_range("copy to the device", to, bytes, device);
        note("upload %zu at once", bytes);
        memcpy(reinterpret_cast<void*>(to), from, bytes);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuMemcpyDtoH_v2(void* to, Pointer from, size_t bytes) {
    return in_context([&](Device& device) {
        check_host(to);
        check_range("copy from the device", from, bytes, device);
        note("download %zu at once", bytes);
        memcpy(to, reinterpret_cast<const void*>(from), bytes);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuMemsetD8Async(Pointer at, unsigned char value, size_t bytes, void* stream) {
    return in_context([&](Device& device) {
        check_range("fill", at, bytes, device);
        note("fill %zu", bytes);
        void* start = reinterpret_cast<void*>(at);
        submit(stream_of(stream, device), [=] { memset(start, value, bytes); });
        return SUCCESS;
    });
}
