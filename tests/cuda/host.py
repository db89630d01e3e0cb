"""A program's side of a driver, in ctypes: just enough to use the stand-in as a program would."""

import ctypes
import os
import sysconfig
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p
from pathlib import Path

import numpy as np

import compile
from build import KERNELS, OUT, digest

FLOAT32, BFLOAT16 = 0, 14
COMPUTE_32F, COMPUTE_TF32 = 68, 77
INVALID_VALUE, NOT_FOUND = 1, 500
DRIVER = "libcuda.so.1"


class Refused(Exception):
    """A call that was answered with an error."""

    def __init__(self, name, status):
        super().__init__(f"{name}: {status}")
        self.status = status


def library(path):
    found = ctypes.CDLL(str(path))

    def call(name, *arguments):
        status = getattr(found, name)(*arguments)
        if status:
            raise Refused(name, status)

    return call


def image(source, architecture, as_ptx=False):
    """What NVRTC makes of a kernel's file: a cubin, or PTX. Made once and kept."""
    source = KERNELS / source
    nvrtc = compile.Nvrtc(sysconfig.get_path("purelib"))
    name = digest([source, *sorted(KERNELS.glob("*.cuh"))], [nvrtc.version()])
    kept = OUT / "images" / f"{source.stem}-{name}-{architecture}-{as_ptx:d}"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        made, _ = nvrtc.compile(source, architecture, "PTX" if as_ptx else "CUBIN")
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_bytes(made)
        partial.rename(kept)
    return kept.read_bytes()


class Host:
    """One device's context, and calls on it. Addresses are plain numbers. Without a folder the
    loader finds the driver."""

    def __init__(self, folder=None, ordinal=0):
        self.call = library(Path(folder) / DRIVER if folder else DRIVER)
        self.call("cuInit", 0)
        self.device, self.context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(self.device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", byref(self.context), self.device)
        self.enter()

    def enter(self):
        self.call("cuCtxSetCurrent", self.context)

    def close(self):
        self.call("cuDevicePrimaryCtxRelease_v2", self.device)

    def made(self, name, *arguments):
        out = c_void_p()
        self.call(name, byref(out), *arguments)
        return out

    def allocate(self, bytes):
        out = c_uint64()
        self.call("cuMemAlloc_v2", byref(out), c_size_t(bytes))
        return out.value

    def free(self, at):
        self.call("cuMemFree_v2", c_uint64(at))

    def pinned(self, shape, dtype=np.float32):
        """An array in pinned memory."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        at = self.made("cuMemHostAlloc", c_size_t(count), 0)
        return np.frombuffer((ctypes.c_char * count).from_address(at.value), dtype).reshape(shape)

    def stream(self):
        return self.made("cuStreamCreate", 1)

    def event(self):
        return self.made("cuEventCreate", 2)

    def upload(self, at, array, stream, bytes=None):
        bytes = array.nbytes if bytes is None else bytes
        source = c_void_p(array.ctypes.data)
        self.call("cuMemcpyHtoDAsync_v2", c_uint64(at), source, c_size_t(bytes), stream)

    def download(self, array, at, stream, bytes=None):
        bytes = array.nbytes if bytes is None else bytes
        to = c_void_p(array.ctypes.data)
        self.call("cuMemcpyDtoHAsync_v2", to, c_uint64(at), c_size_t(bytes), stream)

    def synchronise(self, stream):
        self.call("cuStreamSynchronize", stream)

    def read(self, at, shape, dtype=np.float32, stream=None):
        """What lies on the device once the stream's work is done."""
        stream = stream or self.stream()
        out = np.empty(shape, dtype)
        self.download(out, at, stream)
        self.synchronise(stream)
        return out

    def load(self, image):
        return self.made("cuModuleLoadData", c_char_p(image))

    def function(self, module, name):
        return self.made("cuModuleGetFunction", module, c_char_p(name.encode()))

    def find_function(self, modules, name):
        """The kernel, of the module that has it."""
        for module in modules:
            try:
                return self.function(module, name)
            except Refused as error:
                if error.status != NOT_FOUND:
                    raise
        raise KeyError(name)

    def argument_sizes(self, function):
        """Bytes of each argument of a kernel."""
        sizes, place, size = [], c_size_t(), c_size_t()
        try:
            while True:
                at = c_size_t(len(sizes))
                self.call("cuFuncGetParamInfo", function, at, byref(place), byref(size))
                sizes.append(size.value)
        except Refused as error:
            if error.status != INVALID_VALUE:  # past the last
                raise
        return sizes

    def name(self):
        text = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", text, 256, self.device)
        return text.value.decode()

    def milliseconds(self, stream, work):
        """Between two events around `work`, as the device counts them."""
        start, end = [self.made("cuEventCreate", 0) for _ in range(2)]
        self.call("cuEventRecord", start, stream)
        work()
        self.call("cuEventRecord", end, stream)
        self.call("cuEventSynchronize", end)
        passed = c_float()
        self.call("cuEventElapsedTime", byref(passed), start, end)
        for event in (start, end):
            self.call("cuEventDestroy_v2", event)
        return passed.value

    def attribute(self, which):
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), which, self.device)
        return value.value

    def copy(self, to, source, bytes, stream):
        arguments = c_uint64(to), c_uint64(source), c_size_t(bytes)
        self.call("cuMemcpyDtoDAsync_v2", *arguments, stream)

    def fill(self, at, value, bytes, stream):
        self.call("cuMemsetD8Async", c_uint64(at), value, c_size_t(bytes), stream)

    def launch(self, function, grid, block, stream, *arguments, shared=0):
        """Numbers come as ctypes, addresses as plain numbers."""
        values = [c_uint64(a) if isinstance(a, int) else a for a in arguments]
        addresses = (c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
        sizes = [*(tuple(grid) + (1, 1))[:3], *(tuple(block) + (1, 1))[:3], shared]
        self.call("cuLaunchKernel", function, *sizes, stream, addresses, None)


class Blas:
    """cuBLASLt for out (M, N) = x (M, K) · wᵀ (N, K), which is by columns what it calls
    A (K, N) transposed · B (K, M)."""

    def __init__(self, folder, major=13):
        self.call = library(Path(folder) / f"libcublasLt.so.{major}")
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))

    def made(self, name, *arguments):
        out = c_void_p()
        self.call(name, byref(out), *arguments)
        return out

    def set(self, name, what, attribute, value):
        self.call(name, what, attribute, byref(value), c_size_t(ctypes.sizeof(value)))

    def product(self, m, n, k, types, compute=COMPUTE_32F, bias=None):
        """Description and layouts of A, B, C and D."""
        described = self.made("cublasLtMatmulDescCreate", compute, FLOAT32)
        self.set("cublasLtMatmulDescSetAttribute", described, 3, c_int(1))
        if bias is not None:
            self.set("cublasLtMatmulDescSetAttribute", described, 7, c_int(4))
            self.set("cublasLtMatmulDescSetAttribute", described, 8, c_uint64(bias))
        layout = lambda kind, rows, columns: self.made(
            "cublasLtMatrixLayoutCreate", kind, c_uint64(rows), c_uint64(columns), c_uint64(rows)
        )
        inputs = [layout(types[0], k, n), layout(types[0], k, m)]
        return described, *inputs, layout(types[1], n, m), layout(types[1], n, m)

    def algorithms(self, product, alignment=16, reductions=0, workspace=8 << 20):
        preference = self.made("cublasLtMatmulPreferenceCreate")
        values = {1: c_uint64(workspace), 3: ctypes.c_uint32(reductions)}
        if alignment:
            values |= {which: ctypes.c_uint32(alignment) for which in (5, 6, 7, 8)}
        for which, value in values.items():
            self.set("cublasLtMatmulPreferenceSetAttribute", preference, which, value)
        found, count = (ctypes.c_char * (96 * 8))(), c_int()
        call = "cublasLtMatmulAlgoGetHeuristic"
        self.call(call, self.handle, *product, preference, 8, found, byref(count))
        return [bytes(found[96 * i : 96 * i + 64]) for i in range(count.value)]

    def id_of(self, algorithm):
        value, written = c_int(), c_size_t()
        call = "cublasLtMatmulAlgoConfigGetAttribute"
        self.call(call, c_char_p(algorithm), 0, byref(value), c_size_t(4), byref(written))
        return value.value

    def check(self, product, algorithm):
        result = (ctypes.c_char * 96)()
        self.call("cublasLtMatmulAlgoCheck", self.handle, *product, c_char_p(algorithm), result)

    def multiply(self, product, algorithm, w, x, out, stream, beta=0.0, workspace=(0, 0)):
        described, a, b, c, d = product
        at = lambda address: c_uint64(address)
        self.call(
            "cublasLtMatmul", self.handle, described, byref(c_float(1.0)), at(w), a, at(x), b,
            byref(c_float(beta)), at(out), c, at(out), d, c_char_p(algorithm), at(workspace[0]),
            c_size_t(workspace[1]), stream,
        )  # fmt: skip
