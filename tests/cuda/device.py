"""The emulated device as the kernel checks use it: buffers, launches, bf16, and comparisons whose
tolerance is the plain path's own error."""

import ctypes
import sys

import numpy as np

ORDERS = {"forward": 0, "reverse": 1, "random": 2}


def to_bf16(x):
    """Numbers rounded to bf16, to the nearest and ties to even, as uint16."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(x):
    return (x.astype(np.uint32) << 16).view(np.float32)


def rounded(x):
    """Through bf16 and back."""
    return from_bf16(to_bf16(x))


class Dtype:
    """A number type of the kernels, by the suffix of their names."""

    def __init__(self, name):
        self.name = name
        self.numpy = np.uint16 if name == "bf16" else np.float32

    def encode(self, x):
        return to_bf16(x) if self.name == "bf16" else np.ascontiguousarray(x, np.float32)

    def decode(self, x):
        return from_bf16(x) if self.name == "bf16" else x

    def round(self, x):
        return self.decode(self.encode(x))


BF16, F32 = Dtype("bf16"), Dtype("f32")


class Buffer:
    """Device memory, poisoned until something is written."""

    def __init__(self, library, shape, dtype):
        self.library, self.shape, self.dtype = library, tuple(shape), np.dtype(dtype)
        self.bytes = int(np.prod(shape)) * self.dtype.itemsize
        self.address = library.emulator_allocate(ctypes.c_size_t(self.bytes))

    def __del__(self):
        self.library.emulator_free(ctypes.c_void_p(self.address))

    def read(self):
        out = np.empty(self.shape, self.dtype)
        self.copy(out.ctypes.data, self.address)
        return out

    def write(self, array):
        self.copy(self.address, array.ctypes.data)
        return self

    def copy(self, to, source):
        size = ctypes.c_size_t(self.bytes)
        self.library.emulator_copy(ctypes.c_void_p(to), ctypes.c_void_p(source), size)


def struct(name, fields):
    """A C struct of `fields`: "name:type ..." with int, float and pointer as types."""
    types = {"int": ctypes.c_int, "float": ctypes.c_float, "pointer": ctypes.c_void_p}
    pairs = [field.split(":") for field in fields.split()]
    body = {"_fields_": [(field, types[kind]) for field, kind in pairs]}
    return type(name, (ctypes.Structure,), body)


def pointer(buffer):
    return None if buffer is None else buffer.address


def as_argument(name, value, size):
    """A number or a struct as the `size` bytes a kernel takes."""
    if isinstance(value, float):
        value = ctypes.c_float(value)
    elif isinstance(value, (int, np.integer)):
        value = ctypes.c_longlong(value) if size == 8 else ctypes.c_int(value)
    assert ctypes.sizeof(value) == size, f"{name}: {ctypes.sizeof(value)} bytes for {size}"
    return value


class Device:
    def __init__(self, path, order="forward", poison=0xFF, seed=1):
        self.library = ctypes.CDLL(path)
        self.library.emulator_allocate.restype = ctypes.c_void_p
        settings = ORDERS[order], ctypes.c_uint64(seed), poison
        self.library.emulator_configure(*settings)

    def empty(self, shape, dtype=np.float32):
        return Buffer(self.library, shape, dtype)

    def put(self, array):
        array = np.ascontiguousarray(array)
        return self.empty(array.shape, array.dtype).write(array)

    def launch(self, name, grid, block, *arguments, shared=0):
        sizes, kinds = ctypes.POINTER(ctypes.c_uint16)(), ctypes.POINTER(ctypes.c_uint8)()
        signature = self.library.emulator_signature
        count = signature(name.encode(), ctypes.byref(sizes), ctypes.byref(kinds))
        assert count == len(arguments), f"{name}: {count} arguments, {len(arguments)} given"
        values = [
            self.argument(name, a, sizes[i], bool(kinds[i])) for i, a in enumerate(arguments)
        ]
        addresses = (ctypes.c_void_p * count)(*[ctypes.addressof(v) for v in values])
        grid, block = [
            (ctypes.c_uint * 3)(*(tuple(size) + (1, 1))[:3]) for size in (grid, block)
        ]
        call = self.library.emulator_launch
        status = call(name.encode(), grid, block, ctypes.c_size_t(shared), addresses)
        assert status == 0, f"{name}: the launch is refused ({status})"

    @staticmethod
    def argument(name, value, size, is_pointer):
        if value is None or isinstance(value, Buffer):
            assert is_pointer, f"{name}: a pointer for a number"
            return ctypes.c_void_p(pointer(value))
        assert not is_pointer, f"{name}: a number for a pointer"
        return as_argument(name, value, size)


def expect_close(what, got, exact, plain):
    """`got` is about as near the exact (fp64) result as the plain path in the kernel's own number
    types is: 1.5 times its error in the mean, twice in the worst, and two units in fp32's last
    place of the largest number, which is the least a sum in another order may differ."""
    got, exact, plain = [np.asarray(x, np.float64) for x in (got, exact, plain)]
    assert got.shape == exact.shape, f"{what}: shape {got.shape}, not {exact.shape}"
    assert np.isfinite(got).all(), f"{what}: {np.sum(~np.isfinite(got))} numbers are not finite"
    least = 2.0**-22 * max(np.abs(exact).max(), 1e-30)
    error, allowed = np.abs(got - exact), np.abs(plain - exact)
    for name, value, bound in (
        ("mean", error.mean(), 1.5 * allowed.mean() + least),
        ("worst", error.max(), 2.0 * allowed.max() + 2 * least),
    ):
        told = f"{what}: {name} error {value:.3g}"
        assert value <= bound, f"{told}, the plain path allows {bound:.3g}"


def expect_same(what, got, expected):
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, not {expected.shape}"
    if got.tobytes() != expected.tobytes():
        at = np.argwhere(got != expected)
        where = tuple(at[0]) if len(at) else "a NaN"
        raise AssertionError(f"{what}: {len(at)} of {got.size} differ, first at {where}")


def open_device(library, order, poison):
    if not library.endswith("libcuda.so.1"):
        return Device(library, order, poison)
    from gpu import Gpu  # needs a compiler for devices, which the emulator doesn't

    return Gpu(library, poison)


CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def main():
    """python MODULE LIBRARY ORDER POISON SIZE: runs the module's checks; SIZE is small or all.
    LIBRARY is of kernels on the emulator, or libcuda.so.1, where ORDER has no meaning."""
    library, order, poison, size = sys.argv[1:5]
    failed = 0
    for function in CHECKS:
        device = open_device(library, order, int(poison, 0))
        device.is_small = size == "small"
        try:
            function(device, np.random.default_rng(7))
        except AssertionError as error:
            failed += 1
            print(f"{function.__name__}: {error}", flush=True)
    sys.exit(1 if failed else 0)
