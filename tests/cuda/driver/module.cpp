// Modules, functions and launches: images are held against the device and the driver, launches
// against what image, device and kernel allow, and then run on the emulator.
#include <algorithm>
#include <cstring>
#include <vector>

#include "driver.h"
#include "image.h"

extern "C" int emulator_launch(const char* name, const unsigned* grid, const unsigned* block,
                               size_t dynamic_bytes, void** arguments);
extern "C" int emulator_signature(const char* name, const uint16_t** sizes,
                                  const uint8_t** is_pointer);

namespace standin {

static constexpr int WITHOUT_OPT_IN = 48 << 10;  // most shared bytes of a block
static constexpr int REGISTERS_A_BLOCK = 65536;

struct Module {
    Device* device;
    Image image;
    std::vector<void*> functions;
};

struct Signature {
    int count = 0;
    const uint16_t* sizes = nullptr;
    const uint8_t* is_pointer = nullptr;
};

struct Function {
    Device* device;
    std::string name;
    KernelFacts facts;
    Signature signature;
    int dynamic_max;
};

static Handles<Module> modules("module");
static Handles<Function> functions("function");
static long launches = 0;

size_t modules_of(const Device& device) { return modules.count_of(device); }

// The newest PTX that a driver translates, by its minor version.
static int newest_ptx(int driver) {
    static const int of_12[] = {80, 81, 82, 83, 84, 85, 85, 86, 87, 88};
    const int minor = driver % 1000 / 10;
    if (driver >= 13000) return 90 + minor;
    return of_12[std::min(minor, 9)];
}

static int check_image(const Image& image) {
    const int capability = settings().capability, driver = settings().driver;
    if (image.is_ptx) {
        if (image.ptx_version > newest_ptx(driver)) return UNSUPPORTED_PTX_VERSION;
        return image.architecture > capability ? INVALID_PTX : SUCCESS;
    }
    // A cubin serves its own major architecture, from its own minor version on.
    if (image.is_new_abi && driver < 13000) return INVALID_IMAGE;
    const bool fits =
        image.architecture / 10 == capability / 10 && image.architecture <= capability;
    return fits ? SUCCESS : NO_BINARY_FOR_GPU;
}

// The image and the emulator's build of a kernel must be of one source.
static void check_same_source(const Function& f) {
    const std::vector<int>& bytes = f.facts.parameter_bytes;
    if (bytes.empty()) return;
    bool is_same = int(bytes.size()) == f.signature.count;
    for (int i = 0; is_same && i < f.signature.count; i++)
        is_same = bytes[size_t(i)] == f.signature.sizes[i];
    if (!is_same)
        fail("%s takes other arguments in its image than on the emulator; build anew",
             f.name.c_str());
}

static std::shared_ptr<Function> make_function(Module& module, const std::string& name) {
    auto f = std::make_shared<Function>();
    f->device = module.device;
    f->name = name;
    f->facts = module.image.kernels.at(name);
    f->signature.count =
        emulator_signature(name.c_str(), &f->signature.sizes, &f->signature.is_pointer);
    if (f->signature.count < 0) fail("the emulator has no kernel %s", name.c_str());
    check_same_source(*f);
    f->dynamic_max = WITHOUT_OPT_IN - f->facts.static_shared;
    return f;
}

struct Launch {
    unsigned grid[3], block[3];
    unsigned dynamic_bytes;
};

static int check_launch(const Function& f, const Launch& l) {
    const unsigned grid_max[] = {0x7fffffff, 65535, 65535}, block_max[] = {1024, 1024, 64};
    for (int i = 0; i < 3; i++)
        if (!l.grid[i] || l.grid[i] > grid_max[i] || !l.block[i] || l.block[i] > block_max[i])
            return INVALID_VALUE;
    const unsigned long threads = (unsigned long)l.block[0] * l.block[1] * l.block[2];
    if (threads > (unsigned long)f.facts.threads_max) return INVALID_VALUE;
    if (int(l.dynamic_bytes) > f.dynamic_max) return INVALID_VALUE;
    const unsigned long registers = threads * (unsigned long)((f.facts.registers + 7) / 8 * 8);
    return registers > REGISTERS_A_BLOCK ? LAUNCH_OUT_OF_RESOURCES : SUCCESS;
}

// Arguments are read when the launch is asked for, as a driver does.
class Arguments {
  public:
    Arguments(const Function& f, void** given, const Device& device) {
        for (int i = 0; i < f.signature.count; i++) {
            const size_t bytes = f.signature.sizes[i];
            std::vector<Pointer> words((bytes + 7) / 8 + 1);
            memcpy(words.data(), given[i], bytes);
            values.push_back(std::move(words));
            check(f, i, device);
        }
        for (std::vector<Pointer>& words : values) addresses.push_back(words.data());
    }
    void** data() { return addresses.data(); }

  private:
    // A pointer leads to live memory of the device; what looks like an address of a device inside
    // a struct, too.
    void check(const Function& f, int index, const Device& device) const {
        const std::vector<Pointer>& words = values[size_t(index)];
        const std::string what = "argument " + std::to_string(index) + " of " + f.name;
        if (f.signature.is_pointer[index]) {
            if (words[0]) check_range(what.c_str(), words[0], 1, device);
            return;
        }
        for (const Pointer word : words)
            if (is_device_address(word)) check_range(what.c_str(), word, 1, device);
    }

    std::vector<std::vector<Pointer>> values;
    std::vector<void*> addresses;
};

// The device is lost in the middle of a kernel: what it wrote is nobody's business any more.
static bool breaks_now() {
    launches++;
    if (!settings().break_at || launches < settings().break_at) return false;
    note("the device is lost");
    return is_broken = true;
}

static void run(const Function& f, const Launch& l, Arguments& arguments) {
    if (breaks_now()) return;
    running_kernel = f.name.c_str();
    const int status =
        emulator_launch(f.name.c_str(), l.grid, l.block, l.dynamic_bytes, arguments.data());
    running_kernel = nullptr;
    if (status) fail("the emulator refuses the launch of %s (%d)", f.name.c_str(), status);
}

}  // namespace standin

using namespace standin;

DRIVER_FUNCTION cuModuleLoadData(void** handle, const void* data) {
    return in_context([&](Device& device) -> int {
        auto module = std::make_shared<Module>();
        module->device = &device;
        if (!read_image(data, module->image)) return INVALID_IMAGE;
        const Image& image = module->image;
        note("load %s sm_%d ptx %d kernels %zu", image.is_ptx ? "ptx" : "cubin",
             image.architecture, image.ptx_version, image.kernels.size());
        if (const int status = check_image(image)) return status;
        *handle = modules.add(module);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuModuleUnload(void* handle) {
    return in_context([&](Device& device) {
        finish_all(device);
        const std::shared_ptr<Module> module = modules.take(handle);
        for (void* function : module->functions) functions.take(function);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuModuleGetFunction(void** handle, void* module_handle, const char* name) {
    return in_context([&](Device&) -> int {
        const std::shared_ptr<Module> module = modules.find(module_handle);
        if (!module->image.kernels.count(name)) return NOT_FOUND;
        *handle = functions.add(make_function(*module, name));
        module->functions.push_back(*handle);
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuFuncSetAttribute(void* handle, int which, int value) {
    return in_context([&](Device&) -> int {
        const std::shared_ptr<Function> f = functions.find(handle);
        if (which != 8) fail("attribute %d of CUfunction_attribute is not modelled", which);
        if (value < 0 || value + f->facts.static_shared > shared_optin_max()) return INVALID_VALUE;
        f->dynamic_max = value;
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuFuncGetAttribute(int* value, int which, void* handle) {
    return in_context([&](Device&) {
        const std::shared_ptr<Function> f = functions.find(handle);
        switch (which) {
            case 0: *value = f->facts.threads_max; break;
            case 1: *value = f->facts.static_shared; break;
            case 4: *value = f->facts.registers; break;
            case 8: *value = f->dynamic_max; break;
            default: fail("attribute %d of CUfunction_attribute is not modelled", which);
        }
        return SUCCESS;
    });
}

// Where each argument lies isn't known here, and nobody asks.
DRIVER_FUNCTION cuFuncGetParamInfo(void* handle, size_t index, size_t* place, size_t* bytes) {
    return in_context([&](Device&) -> int {
        const Signature& signature = functions.find(handle)->signature;
        if (index >= size_t(signature.count)) return INVALID_VALUE;
        *place = 0;
        *bytes = signature.sizes[index];
        return SUCCESS;
    });
}

DRIVER_FUNCTION cuLaunchKernel(void* handle, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                               unsigned block_x, unsigned block_y, unsigned block_z,
                               unsigned dynamic_bytes, void* stream, void** given, void** extra) {
    return in_context([&](Device& device) -> int {
        const std::shared_ptr<Function> f = functions.find(handle);
        const Launch l{{grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, dynamic_bytes};
        if (extra) fail("%s: arguments come as an array of pointers here", f->name.c_str());
        if (f->device != &device) fail("%s was loaded on another device", f->name.c_str());
        const int status = check_launch(*f, l);
        const std::shared_ptr<Stream> on = stream_of(stream, device);
        note("launch %s grid %u,%u,%u block %u,%u,%u shared %u stream %d%s", f->name.c_str(),
             grid_x, grid_y, grid_z, block_x, block_y, block_z, dynamic_bytes, on->number,
             status ? " refused" : "");
        if (status) return status;
        const auto arguments = std::make_shared<Arguments>(*f, given, device);
        submit(on, [=] { run(*f, l, *arguments); });
        return is_broken ? LAUNCH_FAILED : SUCCESS;
    });
}
