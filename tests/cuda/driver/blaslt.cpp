// The stand-in for cuBLASLt: its functions by their names, on the stand-in driver's memory and
// streams. One product of matrices by columns, with a bias or added to what is there.
#include <cstring>
#include <vector>

#include "algorithm.h"
#include "driver.h"

#ifndef LIBRARY_VERSION
#error "12 or 13, times 10000"
#endif

using namespace standin;

enum BlasStatus : int {
    BLAS_SUCCESS = 0,
    BLAS_NOT_INITIALIZED = 1,
    BLAS_INVALID_VALUE = 7,
    BLAS_EXECUTION_FAILED = 13,
    BLAS_NOT_SUPPORTED = 15,
};

enum DataType : int { FLOAT32 = 0, BFLOAT16 = 14 };
enum ComputeType : int { COMPUTE_32F = 68, COMPUTE_32F_PEDANTIC = 69, COMPUTE_32F_FAST_TF32 = 77 };
enum Epilogue : int { PLAIN = 1, BIAS = 4 };

struct Handle {
    Device* device;
};
// A description, a layout and a preference belong to no device.
struct Description {
    Device* device = nullptr;
    int compute = 0;
    bool transposes_a = false, transposes_b = false;
    int epilogue = PLAIN;
    Pointer bias = 0;
    int bias_type = -1;  // the output's
};
struct Layout {
    Device* device = nullptr;
    int type = 0;
    uint64_t rows = 0, columns = 0;
    int64_t leading = 0;

    size_t number_bytes() const { return type == FLOAT32 ? 4 : 2; }
    size_t bytes() const {
        return ((columns - 1) * uint64_t(leading) + rows) * number_bytes();
    }
};
struct KeptPreference {
    Device* device = nullptr;
    Preference asked;
};

static Handles<Handle> handles("cuBLASLt handle");
static Handles<Description> descriptions("description of a product");
static Handles<Layout> layouts("layout of a matrix");
static Handles<KeptPreference> preferences("preference");

// Shapes and types of one product, as the library's table of supported ones has them.
struct Product {
    Description d;
    Layout a, b, c, out;

    Product(void* description, void* a, void* b, void* c, void* out)
        : d(*descriptions.find(description)), a(*layouts.find(a)), b(*layouts.find(b)),
          c(*layouts.find(c)), out(*layouts.find(out)) {}

    uint64_t m() const { return out.rows; }
    uint64_t n() const { return out.columns; }
    uint64_t k() const { return d.transposes_a ? a.rows : a.columns; }

    ProductKind kind() const {
        const int transposes = d.transposes_a + 2 * d.transposes_b;
        return {m(), k(), a.type, out.type, transposes, d.epilogue, is_aligned()};
    }
    // Whether all columns start at multiples of 16 bytes, as tensor cores take them.
    bool is_aligned() const {
        for (const Layout* x : {&a, &b, &c, &out})
            if (uint64_t(x->leading) * x->number_bytes() % 16) return false;
        return true;
    }
    int check() const {
        const bool fits = (d.transposes_a ? a.columns : a.rows) == m() &&
                          (d.transposes_b ? b.columns : b.rows) == k() &&
                          (d.transposes_b ? b.rows : b.columns) == n() && c.rows == m() &&
                          c.columns == n();
        if (!fits) return BLAS_INVALID_VALUE;
        const bool known_input = a.type == b.type && (a.type == FLOAT32 || a.type == BFLOAT16);
        const bool known_output = c.type == out.type &&
                                  (out.type == FLOAT32 ||
                                   (out.type == BFLOAT16 && a.type == BFLOAT16));
        const bool bias_fits = d.bias_type < 0 || d.bias_type == out.type;
        const bool known_compute = d.compute == COMPUTE_32F || d.compute == COMPUTE_32F_PEDANTIC ||
                                   (d.compute == COMPUTE_32F_FAST_TF32 && a.type == FLOAT32);
        if (!known_input || !known_output || !bias_fits || !known_compute)
            return BLAS_NOT_SUPPORTED;
        return BLAS_SUCCESS;
    }
};

static float number(const char* at, int type) {
    if (type == FLOAT32) {
        float value;
        memcpy(&value, at, 4);
        return value;
    }
    uint16_t half;
    memcpy(&half, at, 2);
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static void put(char* at, int type, float value) {
    if (type == FLOAT32) {
        memcpy(at, &value, 4);
        return;
    }
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    const uint16_t half = is_nan ? 0x7fff : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    memcpy(at, &half, 2);
}

static float rounded(float value, int type) {
    char kept[4];
    put(kept, type, value);
    return number(kept, type);
}

// As tensor cores read fp32 where TF32 is allowed: 10 bits behind the point.
static float as_tf32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = (bits + 0x1000) & ~0x1fffu;
    memcpy(&value, &bits, 4);
    return value;
}

// One product, with its pointers: what waits in a stream.
struct Job {
    Product p;
    float alpha, beta;
    Pointer a, b, c, out;
    int parts;

    float element(const Layout& x, Pointer start, uint64_t row, uint64_t column) const {
        const char* data = reinterpret_cast<const char*>(start);
        const uint64_t at = column * uint64_t(x.leading) + row;
        const float value = number(data + at * x.number_bytes(), x.type);
        return p.d.compute == COMPUTE_32F_FAST_TF32 ? as_tf32(value) : value;
    }
    void run() const;
    void finish(uint64_t row, uint64_t column, float sum) const;
};

// Rows of the result that are summed side by side, each in its own order.
constexpr uint64_t STRIP = 64;

// sum (STRIP) += strip (from..to, STRIP) · column.
static void add_part(float* __restrict sum, const float* strip, const float* column, uint64_t from,
                     uint64_t to) {
    for (uint64_t k = from; k < to; k++)
        for (uint64_t i = 0; i < STRIP; i++) sum[i] += strip[k * STRIP + i] * column[k];
}

void Job::run() const {
    const uint64_t m = p.m(), n = p.n(), k = p.k();
    std::vector<float> columns(n * k), strip(k * STRIP);
    for (uint64_t j = 0; j < n; j++)
        for (uint64_t i = 0; i < k; i++)
            columns[j * k + i] = p.d.transposes_b ? element(p.b, b, j, i) : element(p.b, b, i, j);
    for (uint64_t first = 0; first < m; first += STRIP) {
        const uint64_t rows = m - first < STRIP ? m - first : STRIP;
        for (uint64_t i = 0; i < k; i++)
            for (uint64_t row = 0; row < rows; row++)
                strip[i * STRIP + row] = p.d.transposes_a ? element(p.a, a, i, first + row)
                                                          : element(p.a, a, first + row, i);
        for (uint64_t j = 0; j < n; j++) {
            float total[STRIP] = {};
            for (int part = 0; part < parts; part++) {
                float sum[STRIP] = {};
                const uint64_t from = k * uint64_t(part) / uint64_t(parts);
                const uint64_t to = k * uint64_t(part + 1) / uint64_t(parts);
                add_part(sum, strip.data(), &columns[j * k], from, to);
                // Parts meet in the result's type, so that few numbers tell how many there were.
                for (uint64_t i = 0; i < STRIP; i++)
                    total[i] += parts > 1 ? rounded(sum[i], p.out.type) : sum[i];
            }
            for (uint64_t row = 0; row < rows; row++) finish(first + row, j, total[row]);
        }
    }
}

void Job::finish(uint64_t row, uint64_t column, float sum) const {
    float value = alpha * sum;
    if (beta != 0.0f) value += beta * element(p.c, c, row, column);
    if (p.d.epilogue == BIAS) {
        const char* bias = reinterpret_cast<const char*>(p.d.bias);
        value += number(bias + row * p.out.number_bytes(), p.out.type);
    }
    char* data = reinterpret_cast<char*>(out);
    put(data + (column * uint64_t(p.out.leading) + row) * p.out.number_bytes(), p.out.type, value);
}

static void check_pointer(const char* what, Pointer at, size_t bytes, uint32_t alignment,
                          const Device& device) {
    check_range(what, at, bytes, device);
    if (at % alignment)
        fail("%s: %#lx is no multiple of the %u bytes the preference promised", what, at,
             alignment);
}

DRIVER_FUNCTION cublasLtMatmul(void* handle, void* description, const float* alpha, Pointer a,
                               void* a_layout, Pointer b, void* b_layout, const float* beta,
                               Pointer c, void* c_layout, Pointer out, void* out_layout,
                               const Algorithm* algorithm, Pointer workspace,
                               size_t workspace_bytes, void* stream) {
    const int status = in_context([&](Device& device) -> int {
        if (handles.find(handle)->device != &device) fail("a cuBLASLt handle of another device");
        const Product p(description, a_layout, b_layout, c_layout, out_layout);
        if (const int refused = p.check()) return refused;
        if (!algorithm) fail("cublasLtMatmul without an algorithm chooses one anew at every call");
        if (!takes(*algorithm, p.kind(), p.n())) return BLAS_NOT_SUPPORTED;
        const uint32_t alignment = algorithm->alignment;
        check_pointer("A of a product", a, p.a.bytes(), alignment, device);
        check_pointer("B of a product", b, p.b.bytes(), alignment, device);
        check_pointer("D of a product", out, p.out.bytes(), alignment, device);
        if (*beta != 0.0f) check_pointer("C of a product", c, p.c.bytes(), alignment, device);
        if (p.d.epilogue == BIAS && !p.d.bias) return BLAS_INVALID_VALUE;
        if (p.d.epilogue == BIAS)
            check_range("bias of a product", p.d.bias, p.m() * p.out.number_bytes(), device);
        if (workspace_bytes < algorithm->workspace) return BLAS_INVALID_VALUE;
        if (algorithm->workspace)
            check_pointer("workspace", workspace, workspace_bytes, 16, device);
        const int parts = parts_of(*algorithm, p.n());
        note("product m %lu n %lu k %lu in %d out %d beta %g epilogue %d algorithm %u parts %d",
             p.m(), p.n(), p.k(), p.a.type, p.out.type, double(*beta), p.d.epilogue, algorithm->id,
             parts);
        const Job job{p, *alpha, *beta, a, b, c, out, parts};
        const size_t scribbled = algorithm->workspace;
        submit(stream_of(stream, device), [=] {
            running_kernel = "cublasLtMatmul";
            memset(reinterpret_cast<void*>(workspace), settings().poison, scribbled);
            job.run();
            running_kernel = nullptr;
        });
        return BLAS_SUCCESS;
    });
    return status == LAUNCH_FAILED || status == INVALID_CONTEXT ? BLAS_EXECUTION_FAILED : status;
}

// cublasLtMatmulHeuristicResult_t.
struct HeuristicResult {
    Algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};

static void report(HeuristicResult& result, const Algorithm& algorithm) {
    result = {algorithm, algorithm.workspace, BLAS_SUCCESS, 1.0f, {}};
}

DRIVER_FUNCTION cublasLtMatmulAlgoGetHeuristic(void* handle, void* description, void* a, void* b,
                                               void* c, void* out, void* preference, int asked,
                                               HeuristicResult* results, int* count) {
    return in_context([&](Device&) -> int {
        handles.find(handle);
        const Product p(description, a, b, c, out);
        *count = 0;
        if (asked < 1) return BLAS_INVALID_VALUE;
        if (const int refused = p.check()) return refused;
        const Preference preferred = preferences.find(preference)->asked;
        Algorithm algorithm;
        while (*count < asked && candidate(p.kind(), preferred, p.n(), *count, algorithm))
            report(results[(*count)++], algorithm);
        return *count ? BLAS_SUCCESS : BLAS_NOT_SUPPORTED;
    });
}

DRIVER_FUNCTION cublasLtMatmulAlgoCheck(void* handle, void* description, void* a, void* b, void* c,
                                        void* out, const Algorithm* algorithm,
                                        HeuristicResult* result) {
    return in_context([&](Device&) -> int {
        handles.find(handle);
        const Product p(description, a, b, c, out);
        if (const int refused = p.check()) return refused;
        if (!takes(*algorithm, p.kind(), p.n())) return BLAS_NOT_SUPPORTED;
        report(*result, *algorithm);
        return BLAS_SUCCESS;
    });
}

DRIVER_FUNCTION cublasLtMatmulAlgoConfigGetAttribute(const Algorithm* algorithm, int which,
                                                     void* value, size_t bytes, size_t* written) {
    const uint32_t fields[] = {algorithm->id, algorithm->tile, algorithm->splits,
                               algorithm->reduction, 0, 0, algorithm->stages};
    uint32_t found = 0;
    if (which < 7)
        found = fields[which];
    else if (which > 8)  // shapes inside a tile and of clusters have no meaning here
        fail("algorithm attribute %d of cublasLtMatmulAlgoConfigAttributes_t is not modelled",
             which);
    const size_t size = which > 6 ? 2 : 4;
    if (written) *written = size;
    if (bytes < size) return BLAS_INVALID_VALUE;
    memcpy(value, &found, size);
    return BLAS_SUCCESS;
}

DRIVER_FUNCTION cublasLtCreate(void** handle) {
    const int status = in_context([&](Device& device) {
        auto made = std::make_shared<Handle>();
        made->device = &device;
        *handle = handles.add(made);
        return SUCCESS;
    });
    // A library of a newer major than the driver's doesn't start.
    const bool is_newer = LIBRARY_VERSION / 10000 > settings().driver / 1000;
    return status || is_newer ? BLAS_NOT_INITIALIZED : BLAS_SUCCESS;
}

DRIVER_FUNCTION cublasLtDestroy(void* handle) {
    handles.take(handle);
    return BLAS_SUCCESS;
}

extern "C" VISIBLE size_t cublasLtGetVersion() { return LIBRARY_VERSION; }

extern "C" VISIBLE const char* cublasLtGetStatusString(int status) {
    switch (status) {
        case BLAS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
        case BLAS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
        case BLAS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
        case BLAS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
        case BLAS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
        default: return "unknown";
    }
}

extern "C" VISIBLE const char* cublasLtGetStatusName(int status) {
    return cublasLtGetStatusString(status);
}

DRIVER_FUNCTION cublasLtMatmulDescCreate(void** out, int compute, int scale) {
    if (scale != FLOAT32) return BLAS_NOT_SUPPORTED;
    auto made = std::make_shared<Description>();
    made->compute = compute;
    *out = descriptions.add(made);
    return BLAS_SUCCESS;
}

DRIVER_FUNCTION cublasLtMatmulDescDestroy(void* description) {
    descriptions.take(description);
    return BLAS_SUCCESS;
}

template <class T>
static T read(const void* value, size_t bytes) {
    if (bytes != sizeof(T)) fail("an attribute of %zu bytes is given as %zu", sizeof(T), bytes);
    T found;
    memcpy(&found, value, sizeof(T));
    return found;
}

DRIVER_FUNCTION cublasLtMatmulDescSetAttribute(void* description, int which, const void* value,
                                               size_t bytes) {
    Description& d = *descriptions.find(description);
    switch (which) {
        case 2: return read<int>(value, bytes) ? BLAS_NOT_SUPPORTED : BLAS_SUCCESS;  // host scalars
        case 3: d.transposes_a = read<int>(value, bytes) != 0; break;
        case 4: d.transposes_b = read<int>(value, bytes) != 0; break;
        case 7: d.epilogue = read<int>(value, bytes); break;
        case 8: d.bias = read<Pointer>(value, bytes); break;
        case 26: d.bias_type = read<int>(value, bytes); break;
        default:
            fail("attribute %d of cublasLtMatmulDescAttributes_t is not modelled", which);
    }
    if (d.epilogue != PLAIN && d.epilogue != BIAS)
        fail("epilogue %d of cublasLtEpilogue_t is not modelled", d.epilogue);
    return BLAS_SUCCESS;
}

DRIVER_FUNCTION cublasLtMatrixLayoutCreate(void** out, int type, uint64_t rows, uint64_t columns,
                                           int64_t leading) {
    if (!rows || !columns || leading < int64_t(rows)) return BLAS_INVALID_VALUE;
    auto made = std::make_shared<Layout>();
    made->type = type, made->rows = rows, made->columns = columns, made->leading = leading;
    *out = layouts.add(made);
    return BLAS_SUCCESS;
}

DRIVER_FUNCTION cublasLtMatrixLayoutDestroy(void* layout) {
    layouts.take(layout);
    return BLAS_SUCCESS;
}

DRIVER_FUNCTION cublasLtMatrixLayoutSetAttribute(void* layout, int which, const void* value,
                                                 size_t bytes) {
    Layout& x = *layouts.find(layout);
    switch (which) {
        case 0: x.type = read<int>(value, bytes); break;
        case 2: x.rows = read<uint64_t>(value, bytes); break;
        case 3: x.columns = read<uint64_t>(value, bytes); break;
        case 4: x.leading = read<int64_t>(value, bytes); break;
        default: fail("attribute %d of cublasLtMatrixLayoutAttribute_t is not modelled", which);
    }
    return BLAS_SUCCESS;
}

DRIVER_FUNCTION cublasLtMatmulPreferenceCreate(void** out) {
    *out = preferences.add(std::make_shared<KeptPreference>());
    return BLAS_SUCCESS;
}

DRIVER_FUNCTION cublasLtMatmulPreferenceDestroy(void* preference) {
    preferences.take(preference);
    return BLAS_SUCCESS;
}

DRIVER_FUNCTION cublasLtMatmulPreferenceSetAttribute(void* preference, int which, const void* value,
                                                     size_t bytes) {
    Preference& p = preferences.find(preference)->asked;
    switch (which) {
        case 1: p.workspace_max = read<uint64_t>(value, bytes); break;
        case 3: p.reductions = read<uint32_t>(value, bytes); break;
        case 5: case 6: case 7: case 8: p.alignment = read<uint32_t>(value, bytes); break;
        default:
            fail("attribute %d of cublasLtMatmulPreferenceAttributes_t is not modelled", which);
    }
    return BLAS_SUCCESS;
}
