// Devices and their contexts: who may call, and what a device says of itself.
#include <cstdio>
#include <cstring>

#include "driver.h"

namespace standin {

bool is_broken = false;
static bool is_initialized = false;
static std::recursive_mutex lock;
static thread_local Device* current = nullptr;

static std::deque<Device>& devices() {
    static std::deque<Device> all = [] {
        std::deque<Device> made;
        for (int i = 0; i < settings().devices; i++) made.push_back(Device{i});
        return made;
    }();
    return all;
}

int locked(const std::function<int()>& act) {
    const std::lock_guard<std::recursive_mutex> guard(lock);
    if (!is_initialized) return NOT_INITIALIZED;
    return act();
}

int in_context(const Act& act) {
    return locked([&]() -> int {
        if (!current) return INVALID_CONTEXT;
        if (!current->retained) fail("the context of device %d was released", current->ordinal);
        if (is_broken) return LAUNCH_FAILED;
        return act(*current);
    });
}

static int with_device(int ordinal, const Act& act) {
    return locked([&]() -> int {
        if (ordinal < 0 || ordinal >= settings().devices) return INVALID_DEVICE;
        return act(devices()[size_t(ordinal)]);
    });
}

static void check_leaks(const Device& device) {
    const size_t memory = allocations_of(device), handles = streams_and_events_of(device);
    const size_t modules = modules_of(device), pinned = pinned_of(device);
    if (memory || handles || modules || pinned)
        fail("the context of device %d is released with %zu allocations, %zu streams and events, "
             "%zu modules and %zu pinned buffers",
             device.ordinal, memory, handles, modules, pinned);
}

// A program that ends without releasing a context never had its leaks looked at.
__attribute__((destructor)) static void check_at_exit() {
    if (!settings().checks_leaks || !is_initialized || is_broken) return;
    for (const Device& device : devices())
        if (device.retained) fail("the context of device %d is never released", device.ordinal);
}

struct Model {
    int multiprocessors, shared_per_multiprocessor, shared_per_block_optin;
};

static Model model() {
    switch (settings().capability) {
        case 75: return {40, 65536, 65536};
        case 80: return {108, 167936, 166912};
        case 89: return {142, 102400, 101376};
        case 90: return {132, 233472, 232448};
        case 100: return {148, 233472, 232448};
        default: fail("no device of capability %d is known here", settings().capability);
    }
}

int shared_optin_max() { return model().shared_per_block_optin; }

// CUdevice_attribute, as far as programs ask here.
static int attribute(int which) {
    switch (which) {
        case 1: return 1024;        // threads a block
        case 2: case 3: return 1024;  // block x, y
        case 4: return 64;          // block z
        case 5: return 0x7fffffff;  // grid x
        case 6: case 7: return 65535;  // grid y, z
        case 8: return 49152;       // shared bytes a block, without opt-in
        case 10: return 32;         // warp
        case 12: return 65536;      // registers a block
        case 16: return model().multiprocessors;
        case 39: return 2048;       // threads a multiprocessor
        case 40: return 2;          // copy engines
        case 41: return 1;          // one address space
        case 75: return settings().capability / 10;
        case 76: return settings().capability % 10;
        case 81: return model().shared_per_multiprocessor;
        case 82: return 65536;      // registers a multiprocessor
        case 97: return model().shared_per_block_optin;
        case 115: return 0;         // memory pools
        default: fail("device attribute %d of CUdevice_attribute is not modelled", which);
    }
}

}  // namespace standin

using namespace standin;

DRIVER_FUNCTION cuInit(unsigned flags) {
    if (flags) return INVALID_VALUE;
    if (!settings().devices) return NO_DEVICE;
    model();
    const std::lock_guard<std::recursive_mutex> guard(lock);
    is_initialized = true;
    return SUCCESS;
}

// NVRTC from 13.0 on asks a driver it finds for tables of its own; there are none.
DRIVER_FUNCTION cuGetExportTable(const void** table, const void*) {
    *table = nullptr;
    return NOT_FOUND;
}

DRIVER_FUNCTION cuDriverGetVersion(int* version) {
    *version = settings().driver;
    return SUCCESS;
}

DRIVER_FUNCTION cuDeviceGetCount(int* count) {
    return locked([&] { return *count = settings().devices, SUCCESS; });
}

DRIVER_FUNCTION cuDeviceGet(int* device, int ordinal) {
    return with_device(ordinal, [&](Device&) { return *device = ordinal, SUCCESS; });
}

DRIVER_FUNCTION cuDeviceGetName(char* name, int size, int device) {
    return with_device(device, [&](Device&) {
        snprintf(name, size_t(size), "stand-in for sm_%d", settings().capability);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuDeviceGetUuid_v2(void* uuid, int device) {
    return with_device(device, [&](Device&) { return memset(uuid, device + 1, 16), SUCCESS; });
}

DRIVER_FUNCTION cuDeviceGetPCIBusId(char* text, int size, int device) {
    return with_device(device, [&](Device&) {
        snprintf(text, size_t(size), "0000:%02x:00.0", device + 1);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuDeviceTotalMem_v2(size_t* bytes, int device) {
    return with_device(device, [&](Device&) { return *bytes = settings().memory, SUCCESS; });
}

DRIVER_FUNCTION cuDeviceGetAttribute(int* value, int which, int device) {
    return with_device(device, [&](Device&) { return *value = attribute(which), SUCCESS; });
}

// A context is known by its device; there is one for each.
DRIVER_FUNCTION cuDevicePrimaryCtxRetain(void** context, int device) {
    return with_device(device, [&](Device& d) {
        d.retained++;
        *context = &d;
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuDevicePrimaryCtxRelease_v2(int device) {
    return with_device(device, [&](Device& d) {
        if (!d.retained) fail("the context of device %d is released twice", device);
        if (d.retained == 1 && !is_broken) {
            finish_all(d);
            if (settings().checks_leaks) check_leaks(d);
        }
        d.retained--;
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuCtxSetCurrent(void* context) {
    return locked([&] {
        current = nullptr;
        for (Device& device : devices())
            if (&device == context) current = &device;
        if (context && !current) fail("%p is no context", context);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuCtxGetCurrent(void** context) {
    return locked([&] { return *context = current, SUCCESS; });
}

DRIVER_FUNCTION cuCtxGetDevice(int* device) {
    return in_context([&](Device& d) { return *device = d.ordinal, SUCCESS; });
}

DRIVER_FUNCTION cuCtxSynchronize() {
    return in_context([](Device& device) {
        note("synchronise device");
        finish_all(device);
        return is_broken ? LAUNCH_FAILED : SUCCESS;
    });
}

DRIVER_FUNCTION cuGetErrorName(int status, const char** name) {
    switch (status) {
        case SUCCESS: *name = "CUDA_SUCCESS"; break;
        case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
        case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
        case NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; break;
        case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
        case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
        case INVALID_IMAGE: *name = "CUDA_ERROR_INVALID_IMAGE"; break;
        case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
        case NO_BINARY_FOR_GPU: *name = "CUDA_ERROR_NO_BINARY_FOR_GPU"; break;
        case INVALID_PTX: *name = "CUDA_ERROR_INVALID_PTX"; break;
        case UNSUPPORTED_PTX_VERSION: *name = "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"; break;
        case NOT_FOUND: *name = "CUDA_ERROR_NOT_FOUND"; break;
        case NOT_READY: *name = "CUDA_ERROR_NOT_READY"; break;
        case LAUNCH_OUT_OF_RESOURCES: *name = "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"; break;
        case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; break;
        default: *name = nullptr; return INVALID_VALUE;
    }
    return SUCCESS;
}

DRIVER_FUNCTION cuGetErrorString(int status, const char** text) {
    return cuGetErrorName(status, text);
}
