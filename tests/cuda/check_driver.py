"""The stand-in driver itself: sound programs get right numbers, and each mistake a program can
make on its own side is stopped with a word on what it is, or answered as a driver answers it."""

from ctypes import c_longlong, c_uint64, c_void_p

import numpy as np

import host
from cases import case, main, mistake, refused
from device import struct, to_bf16

COUNT = 1024  # numbers in the buffers of most cases
LinearShape = struct("LinearShape", "m:int n:int k:int adds:int")


class Copier:
    """A program that copies numbers on the device by a kernel."""

    def __init__(self, folder, architecture=90):
        self.host = host.Host(folder)
        module = self.host.load(host.image("elementwise.cu", architecture))
        self.copy = self.host.function(module, "copy_f32_f32")
        self.gather = self.host.function(module, "gather_f32")
        self.x, self.y = [self.host.allocate(4 * COUNT) for _ in range(2)]
        self.numbers = self.host.pinned(COUNT)
        self.numbers[:] = np.arange(COUNT)

    def launch(self, stream, out=None, source=None, block=256):
        out, source = out or self.y, source or self.x
        arguments = out, source, c_longlong(COUNT)
        self.host.launch(self.copy, (1,), (block,), stream, *arguments)


@case()
def copies_and_launches(folder):
    p = Copier(folder)
    stream = p.host.stream()
    p.host.upload(p.x, p.numbers, stream)
    p.launch(stream)
    assert (p.host.read(p.y, COUNT, stream=stream) == p.numbers).all()


class Joined(Copier):
    """An upload on one stream, and a kernel on another that waits for it."""

    def __init__(self, folder):
        super().__init__(folder)
        h = self.host
        self.copies, self.computes, event = h.stream(), h.stream(), h.event()
        h.upload(self.x, self.numbers, self.copies)
        h.call("cuEventRecord", event, self.copies)
        h.call("cuStreamWaitEvent", self.computes, event, 0)
        self.launch(self.computes)

    def result(self):
        return self.host.read(self.y, COUNT, stream=self.computes)


@case(streams="lazy", order="reverse")
def streams_joined_by_an_event(folder):
    p = Joined(folder)
    assert (p.result() == p.numbers).all()


def unjoined(folder):
    p = Copier(folder)
    copies, computes = p.host.stream(), p.host.stream()
    p.host.upload(p.x, p.numbers, copies)
    p.launch(computes)
    return (p.host.read(p.y, COUNT, stream=computes) == p.numbers).all()


@case(streams="eager")
def missing_dependency_goes_unseen_by_eager_streams(folder):
    assert unjoined(folder)


@case(streams="lazy")
def missing_dependency_is_seen_by_lazy_streams(folder):
    assert not unjoined(folder)


@case(streams="lazy", forgets_waits=1)
def forgotten_wait(folder):
    assert np.isnan(Joined(folder).result()).all()


def overtaken(folder):
    """What a copy reads if the next upload goes to the same memory, on another stream."""
    p = Joined(folder)
    later = p.host.pinned(COUNT)
    later[:] = -1
    p.host.upload(p.x, later, p.copies)
    return p.result(), p.numbers


@case(streams="hasty")
def memory_reused_too_early_is_seen_by_hasty_streams(folder):
    found, _ = overtaken(folder)
    assert (found == -1).all()


@case(streams="lazy")
def memory_reused_too_early_goes_unseen_by_lazy_streams(folder):
    found, meant = overtaken(folder)
    assert (found == meant).all()


@case(streams="lazy")
def pinned_buffer_reused_too_early(folder):
    p = Copier(folder)
    stream = p.host.stream()
    p.host.upload(p.x, p.numbers, stream)
    p.numbers[:] = -1
    assert (p.host.read(p.x, COUNT, stream=stream) == -1).all()


@case(streams="lazy")
def pinned_result_read_too_early(folder):
    p = Copier(folder)
    stream, result = p.host.stream(), p.host.pinned(COUNT)
    p.host.upload(p.x, p.numbers, stream)
    p.host.download(result, p.x, stream)
    assert np.isnan(result).all()
    p.host.synchronise(stream)
    assert (result == p.numbers).all()


@case()
def fresh_memory_is_poison(folder):
    h = host.Host(folder)
    assert np.isnan(h.read(h.allocate(40 << 20), 10 << 20)).all()


@mistake("argument 1 of copy_f32_f32")
def swapped_arguments(folder):
    p = Copier(folder)
    arguments = p.y, c_longlong(COUNT), c_uint64(p.x)
    p.host.launch(p.copy, (1,), (256,), p.host.stream(), *arguments)


@mistake("of the freed allocation of 4096 bytes")
def argument_freed_before(folder):
    p = Copier(folder)
    p.host.free(p.x)
    p.launch(p.host.stream())


@mistake("argument 1 of copy_f32_f32")
def argument_of_the_host(folder):
    p = Copier(folder)
    p.launch(p.host.stream(), source=p.numbers.ctypes.data)


@mistake("touches byte 4096 of the allocation of 4096 bytes")
def kernel_reads_past_the_end(folder):
    p = Copier(folder)
    p.launch(p.host.stream(), source=p.x + 4)


@mistake("is used on device 1", devices=2)
def argument_of_another_device(folder):
    p = Copier(folder)
    other = Copier.__new__(Copier)
    other.host = host.Host(folder, 1)
    module = other.host.load(host.image("elementwise.cu", 90))
    other.copy = other.host.function(module, "copy_f32_f32")
    other.x, other.y = p.x, other.host.allocate(4 * COUNT)
    other.launch(other.host.stream())


@mistake("a stream of device 0", devices=2)
def stream_of_another_device(folder):
    first = host.Host(folder)
    stream = first.stream()
    host.Host(folder, 1).synchronise(stream)


@mistake("4100 bytes from byte 0 of the allocation of 4096 bytes")
def copy_past_the_end(folder):
    p = Copier(folder)
    p.host.upload(p.x, np.zeros(COUNT + 1, np.float32), p.host.stream())


@mistake("begins in a pinned buffer of 4096")
def copy_past_the_end_of_pinned_memory(folder):
    p = Copier(folder)
    big = p.host.allocate(8 * COUNT)
    p.host.upload(big, p.numbers, p.host.stream(), 8 * COUNT)


@mistake("a device's address where a host's belongs")
def copy_with_addresses_confused(folder):
    p = Copier(folder)
    arguments = c_uint64(p.y), c_void_p(p.x), 4
    p.host.call("cuMemcpyHtoDAsync_v2", *arguments, p.host.stream())


@mistake("4096 bytes are freed twice")
def double_free(folder):
    p = Copier(folder)
    p.host.free(p.x)
    p.host.free(p.x)


@mistake("is released with 1 allocations", leaks=1)
def leaked_memory(folder):
    h = host.Host(folder)
    h.allocate(64)
    h.close()


@mistake("device 1 is released with 0 allocations", leaks=1, devices=2)
def leaked_pinned_memory_of_one_device(folder):
    first, second = host.Host(folder), host.Host(folder, 1)
    second.pinned(16)
    first.enter()
    first.close()
    second.close()


@mistake("is never released", leaks=1)
def leaked_context(folder):
    host.Host(folder)


@case(leaks=1)
def nothing_leaked(folder):
    h = host.Host(folder)
    h.free(h.allocate(64))
    h.close()


@mistake("the default stream")
def default_stream(folder):
    Copier(folder).launch(None)


@mistake("is no stream, or no longer")
def destroyed_stream(folder):
    h = host.Host(folder)
    stream = h.stream()
    h.call("cuStreamDestroy_v2", stream)
    h.synchronise(stream)


@mistake("has no cuEventElapsedTime_v2", driver=12040)
def function_of_a_newer_driver(folder):
    h = host.Host(folder)
    h.call("cuEventElapsedTime_v2", None, h.event(), h.event())


@mistake("device attribute 87")
def unknown_attribute(folder):
    h = host.Host(folder)
    h.call("cuDeviceGetAttribute", c_void_p(), 87, h.device)


@mistake("there is no knob STANDIN_LAZY", lazy=1)
def misspelt_knob(folder):
    host.Host(folder)


@case(memory=1 << 20, memory_taken=4096)
def out_of_memory(folder):
    h = host.Host(folder)
    refused(2, h.allocate, 1 << 20)
    at = h.allocate((1 << 20) - 4096)
    refused(2, h.allocate, 1)
    h.free(at)
    h.allocate(1)


@case(break_at=2)
def lost_device(folder):
    p = Copier(folder)
    stream = p.host.stream()
    p.launch(stream)
    refused(719, p.launch, stream)
    refused(719, p.host.synchronise, stream)
    refused(719, p.host.allocate, 4)


@case(devices=0)
def no_device(folder):
    refused(100, host.Host, folder)


@case(devices=2)
def no_third_device(folder):
    refused(101, host.Host, folder, 2)


@case(capability=89)
def cubins_of_the_major_architecture(folder):
    h = host.Host(folder)
    h.load(host.image("elementwise.cu", 80))
    h.load(host.image("elementwise.cu", 89))
    refused(209, h.load, host.image("elementwise.cu", 90))


@case(capability=100)
def cubin_of_an_older_architecture(folder):
    h = host.Host(folder)
    refused(209, h.load, host.image("elementwise.cu", 90))
    h.function(h.load(host.image("elementwise.cu", 90, as_ptx=True)), "copy_f32_f32")


@case(driver=12040, capability=89)
def ptx_too_new(folder):
    h = host.Host(folder)
    ptx = host.image("elementwise.cu", 89, as_ptx=True)
    h.load(ptx)
    refused(222, h.load, ptx.replace(b".version 8.4", b".version 9.0"))
    refused(218, h.load, host.image("elementwise.cu", 90, as_ptx=True))
    refused(200, h.load, b"neither")


@case(driver=12040)
def cubin_of_a_newer_toolkit(folder):
    cubin = bytearray(host.image("elementwise.cu", 90))
    cubin[8] = 8
    cubin[48:52] = (90 << 8).to_bytes(4, "little")
    refused(200, host.Host(folder).load, bytes(cubin))


@case()
def kernel_that_is_not_there(folder):
    h = host.Host(folder)
    refused(500, h.function, h.load(host.image("norm.cu", 90)), "copy_f32_f32")


@case()
def launches_a_device_refuses(folder):
    p = Copier(folder)
    stream = p.host.stream()
    too_many = {"grid": (1, 65536), "block": (256,)}, {"grid": (1,), "block": (512,)}
    for sizes in ({"grid": (0,), "block": (256,)}, *too_many):
        arguments = p.y, p.x, c_longlong(COUNT)
        refused(1, p.host.launch, p.copy, sizes["grid"], sizes["block"], stream, *arguments)


@case()
def shared_memory_needs_opting_in(folder):
    h = host.Host(folder)
    stream = h.stream()
    multiply = h.function(h.load(host.image("matmul.cu", 90)), "matmul_bf16_f32")
    out, x, w = [h.allocate(128 * 128 * 4) for _ in range(3)]
    identity = np.eye(128)
    h.upload(x, to_bf16(np.arange(128 * 128).reshape(128, 128) % 251), stream)
    h.upload(w, to_bf16(identity), stream)
    launch = lambda: h.launch(
        multiply, (1, 1), (256,), stream, out, x, w, 0, LinearShape(128, 128, 128, 0),
        shared=61440,
    )  # fmt: skip
    refused(1, launch)
    refused(1, h.call, "cuFuncSetAttribute", multiply, 8, 1 << 20)
    h.call("cuFuncSetAttribute", multiply, 8, 61440)
    launch()
    got = h.read(out, (128, 128), stream=stream)
    assert (got == np.arange(128 * 128).reshape(128, 128) % 251).all()


if __name__ == "__main__":
    main()
