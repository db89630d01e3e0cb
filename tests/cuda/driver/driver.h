// The stand-in driver from the inside: what a device, an allocation, a stream and an event are
// here. Programs see only the functions of NVIDIA's driver, by their own names.
//
// Device memory is memory of this process, in a range of addresses that is never used twice.
// Kernels run on the emulator. What a real driver answers with an error is answered with that
// error; what it would let pass to become wrong numbers or a crash (a foreign pointer, a copy past
// an end, a missing opt-in that goes unread) ends the process with a line that says what is wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

// What cuBLASLt's stand-in takes from the driver's, and what programs see.
#define VISIBLE __attribute__((visibility("default")))
#define DRIVER_FUNCTION extern "C" VISIBLE int

namespace standin {

using Pointer = uint64_t;  // an address on a device

// CUresult, as far as it is used.
enum Status : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    INVALID_PTX = 218,
    UNSUPPORTED_PTX_VERSION = 222,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH_OUT_OF_RESOURCES = 701,
    LAUNCH_FAILED = 719,
};

enum class Streams { Eager, Lazy, Hasty };
enum class Algorithms { Usual, Varying, Refusing, Absent };

// What is pretended, from the environment: see README.md.
struct Settings {
    int capability = 90;  // STANDIN_CAPABILITY: 75, 80, 89, 90 or 100
    int driver = 13000;   // STANDIN_DRIVER: as cuDriverGetVersion says it
    int devices = 1;      // STANDIN_DEVICES
    size_t memory = size_t(80) << 30;  // STANDIN_MEMORY: bytes of each
    size_t memory_taken = 0;  // STANDIN_MEMORY_TAKEN: bytes that look free and are not
    Streams streams = Streams::Eager;  // STANDIN_STREAMS: when work is done
    bool forgets_waits = false;  // STANDIN_FORGETS_WAITS: 1 to lose what streams wait for
    int order = 0;            // STANDIN_ORDER: forward, reverse or random, of threads
    int poison = 0xFF;        // STANDIN_POISON: what memory holds before it is written
    long break_at = 0;        // STANDIN_BREAK_AT: the launch at which the device is lost
    bool checks_leaks = false;  // STANDIN_LEAKS: 1 to end a program that leaves something
    Algorithms algorithms = Algorithms::Usual;  // STANDIN_ALGORITHMS, of cuBLASLt
    const char* log = nullptr;                  // STANDIN_LOG: a file that says what was done
};
VISIBLE const Settings& settings();

[[noreturn]] VISIBLE void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
VISIBLE void note(const char* format, ...) __attribute__((format(printf, 1, 2)));

struct Device {
    int ordinal;
    size_t used = 0;   // bytes allocated
    int retained = 0;  // holders of its context
};

// Objects a program holds by handle, so that a stale or foreign handle is seen.
template <class T>
class Handles {
  public:
    explicit Handles(const char* kind) : kind(kind) {}
    T* add(std::shared_ptr<T> object) {
        const std::lock_guard<std::mutex> guard(lock);
        T* handle = object.get();
        live[handle] = std::move(object);
        return handle;
    }
    std::shared_ptr<T> find(const void* handle) {
        const std::lock_guard<std::mutex> guard(lock);
        const auto found = live.find(handle);
        if (found == live.end()) fail("%p is no %s, or no longer", handle, kind);
        return found->second;
    }
    std::shared_ptr<T> take(const void* handle) {
        std::shared_ptr<T> object = find(handle);
        const std::lock_guard<std::mutex> guard(lock);
        live.erase(handle);
        return object;
    }
    size_t count_of(const Device& device) const {
        size_t count = 0;
        for (const auto& [handle, object] : live) count += object->device == &device;
        return count;
    }
    template <class F>
    void for_each(F f) {
        for (auto& [handle, object] : live) f(*object);
    }

  private:
    const char* kind;
    std::mutex lock;
    std::map<const void*, std::shared_ptr<T>> live;
};

// Work in order.
struct Stream {
    Device* device;
    int number;  // of this process's streams, for the log
    std::deque<std::function<void()>> waiting;
    bool is_running = false;
};

// One record of an event, reached when its stream comes to it.
struct Record {
    std::shared_ptr<Stream> stream;
    bool is_reached = false;
    double milliseconds = 0;  // of the clock, when it was
};

struct Event {
    Device* device;
    std::shared_ptr<Record> last;  // null before the first
};

// device.cpp. Both hold the one lock while `act` runs: calls take turns.
using Act = std::function<int(Device&)>;
VISIBLE int locked(const std::function<int()>& act);
VISIBLE int in_context(const Act& act);  // with the thread's current device
int shared_optin_max();                  // bytes a block may have with opt-in
extern VISIBLE bool is_broken;           // the device is lost, for good

// stream.cpp
VISIBLE std::shared_ptr<Stream> stream_of(const void* handle, const Device& device);
VISIBLE void submit(const std::shared_ptr<Stream>& stream, std::function<void()> work);
void finish(Stream& stream);
void finish_all(const Device& device);
size_t streams_and_events_of(const Device& device);

// memory.cpp
VISIBLE void check_range(const char* what, Pointer at, size_t bytes, const Device& device);
bool is_device_address(Pointer at);
size_t allocations_of(const Device& device);
size_t pinned_of(const Device& device);

// module.cpp
size_t modules_of(const Device& device);

// What runs now, for whoever finds a wrong access.
extern VISIBLE const char* running_kernel;

}  // namespace standin
