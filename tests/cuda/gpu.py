"""A device behind a driver, with the interface of the emulated one: the kernel checks run on either
unchanged. The driver may be NVIDIA's or its stand-in."""

import ctypes
from pathlib import Path

import numpy as np

import host
from build import KERNELS, WRAPPERS
from device import Buffer, as_argument, pointer

WITHOUT_OPT_IN = 48 << 10  # most bytes of dynamic shared memory that need no asking
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76


class GpuBuffer(Buffer):
    """Device memory; holds `poison` until something is written."""

    def __init__(self, gpu, shape, dtype):
        self.gpu, self.shape, self.dtype = gpu, tuple(shape), np.dtype(dtype)
        self.bytes = int(np.prod(shape)) * self.dtype.itemsize
        self.address = gpu.host.allocate(max(self.bytes, 1))
        gpu.host.fill(self.address, gpu.poison, max(self.bytes, 1), gpu.stream)

    def __del__(self):
        self.gpu.host.free(self.address)

    def read(self):
        out = np.empty(self.shape, self.dtype)
        if self.bytes:
            self.gpu.host.download(out, self.address, self.gpu.stream)
            self.gpu.host.synchronise(self.gpu.stream)
        return out

    def write(self, array):
        if self.bytes:
            self.gpu.host.upload(self.address, array, self.gpu.stream)
            self.gpu.host.synchronise(self.gpu.stream)
        return self


class Gpu:
    def __init__(self, library, poison=0xFF):
        folder = Path(library).parent if "/" in str(library) else None
        self.host, self.poison = host.Host(folder), poison
        self.stream, self.functions = self.host.stream(), {}
        major, minor = [self.host.attribute(a) for a in (CAPABILITY_MAJOR, CAPABILITY_MINOR)]
        sources = [*sorted(KERNELS.glob("*.cu")), WRAPPERS]
        images = [host.image(source, 10 * major + minor) for source in sources]
        self.modules = [self.host.load(image) for image in images]

    def empty(self, shape, dtype=np.float32):
        return GpuBuffer(self, shape, dtype)

    def put(self, array):
        array = np.ascontiguousarray(array)
        return self.empty(array.shape, array.dtype).write(array)

    def function(self, name):
        """The kernel, of whichever module has it, and the sizes of its arguments."""
        if name not in self.functions:
            found = self.host.find_function(self.modules, name)
            self.functions[name] = found, self.host.argument_sizes(found)
        return self.functions[name]

    def launch(self, name, grid, block, *arguments, shared=0):
        self.submit(name, grid, block, *arguments, shared=shared)
        self.host.synchronise(self.stream)

    def submit(self, name, grid, block, *arguments, shared=0):
        """The same without waiting."""
        function, sizes = self.function(name)
        assert len(sizes) == len(arguments), f"{name}: {len(sizes)} arguments"
        values = []
        for value, size in zip(arguments, sizes):
            if value is None or isinstance(value, Buffer):
                value = ctypes.c_void_p(pointer(value))
            values.append(as_argument(name, value, size))
        if shared > WITHOUT_OPT_IN:
            self.host.call("cuFuncSetAttribute", function, MAX_DYNAMIC_SHARED, shared)
        self.host.launch(function, grid, block, self.stream, *values, shared=shared)
