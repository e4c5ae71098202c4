"""A double of NVIDIA's libcudart, for tests on machines without a GPU.

"Device memory" is the host's. The double is stricter than the library: work on a stream is done
only when it is waited for, so a missing wait shows; new memory holds garbage; a copy beyond an
allocation fails.
"""

# ruff: noqa: N802  # the names are CUDA's

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from tests.support.runnable import hide_gpus

GARBAGE = 0xA5
DOWN = 2  # cudaMemcpyDeviceToHost
INVALID_VALUE, NO_DEVICE = 1, 100
MAJOR, MINOR = 75, 76


class Gpu:
    """One GPU with its memory and a stream; `functions` are those of libcudart."""

    def __init__(self, name: str = "Orin", compute: str = "8.7", *, devices: int = 1) -> None:
        self.name, self.compute, self.devices = name, compute, devices
        self.allocations: dict[int, NDArray[np.uint8]] = {}
        self.pinned: dict[int, NDArray[np.uint8]] = {}
        self.queue: list[Callable[[], None]] = []
        self.uploaded = self.downloaded = 0
        names = [name for name in dir(self) if name.startswith("cuda")]
        # Functions, not methods: the code under test declares their argument types.
        functions = {name: _function(getattr(self, name)) for name in names}
        self.functions = SimpleNamespace(**functions)

    def view(self, address: int, size: int) -> NDArray[np.uint8]:
        """Return device memory, which must lie within one allocation."""
        for begin, memory in self.allocations.items():
            if begin <= address and address + size <= begin + len(memory):
                return memory[address - begin : address - begin + size]
        raise AssertionError(f"{size} bytes at {address:#x} are not allocated on the device")

    def finish(self) -> None:
        while self.queue:
            self.queue.pop(0)()

    def cudaGetErrorString(self, code):
        return {NO_DEVICE: b"no CUDA-capable device is detected"}.get(code, b"invalid argument")

    def cudaGetDeviceCount(self, count):
        count._obj.value = self.devices
        return 0 if self.devices else NO_DEVICE

    def cudaRuntimeGetVersion(self, version):
        version._obj.value = 12060
        return 0

    def cudaDriverGetVersion(self, version):
        version._obj.value = 13000
        return 0

    def cudaGetDeviceProperties(self, properties, device):
        name = self.name.encode()
        ctypes.memmove(properties, name + b"\0", len(name) + 1)
        return 0

    def cudaDeviceGetAttribute(self, value, attribute, device):
        major, minor = self.compute.split(".")
        value._obj.value = int({MAJOR: major, MINOR: minor}[attribute])
        return 0

    def cudaStreamCreate(self, stream):
        stream._obj.value = 0x57EA
        return 0

    def cudaStreamDestroy(self, stream):
        self.finish()
        return 0

    def cudaStreamSynchronize(self, stream):
        assert stream == 0x57EA
        self.finish()
        return 0

    def _new(self, pointer, size):
        memory = np.full(size + 256, GARBAGE, np.uint8)
        memory = memory[-memory.ctypes.data % 256 :][:size]
        pointer._obj.value = memory.ctypes.data
        return memory

    def cudaMalloc(self, pointer, size):
        memory = self._new(pointer, size)
        self.allocations[memory.ctypes.data] = memory
        return 0

    def cudaFree(self, address):
        self.finish()
        del self.allocations[address]
        return 0

    def cudaHostAlloc(self, pointer, size, flags):
        memory = self._new(pointer, size)
        self.pinned[memory.ctypes.data] = memory
        return 0

    def cudaFreeHost(self, address):
        self.finish()
        del self.pinned[address]
        return 0

    def cudaMemsetAsync(self, address, value, size, stream):
        self.queue.append(lambda: self.view(address, size).fill(value))
        return 0

    def cudaMemcpyAsync(self, target, source, size, kind, stream):
        def copy():
            if kind != 2:
                self.view(target, size)
            if kind != 1:
                self.view(source, size)
            ctypes.memmove(target, source, size)
            self.uploaded += size * (kind == 1)
            self.downloaded += size * (kind == 2)

        self.queue.append(copy)
        return 0

    def cudaMemcpy2DAsync(
        self, target, target_pitch, source, source_pitch, width, rows, kind, stream
    ):
        assert kind == 3
        if width > min(target_pitch, source_pitch):
            return INVALID_VALUE

        def copy():
            for row in range(rows):
                to = self.view(target + row * target_pitch, width)
                to[:] = self.view(source + row * source_pitch, width)

        self.queue.append(copy)
        return 0

    def cudaMemcpy3DAsync(self, parameters, stream):
        p = parameters._obj
        assert p.kind == 3
        assert not p.srcArray
        assert not p.dstArray
        places = [
            (ptr.ptr, ptr.pitch, ptr.ysize, pos.x, pos.y, pos.z)
            for ptr, pos in ((p.dstPtr, p.dstPos), (p.srcPtr, p.srcPos))
        ]
        width, height, depth = p.extent.width, p.extent.height, p.extent.depth

        def row(place, y, z):
            base, pitch, layer, x0, y0, z0 = place
            assert x0 + width <= pitch
            assert y0 + y < layer
            return self.view(base + ((z0 + z) * layer + y0 + y) * pitch + x0, width)

        def copy():
            moved = [
                (row(places[0], y, z), row(places[1], y, z))
                for z in range(depth)
                for y in range(height)
            ]
            for to, source in moved:
                to[:] = source

        self.queue.append(copy)
        return 0


def _function(method):
    def function(*arguments):
        return method(*arguments)

    return function


def install(monkeypatch, gpu: Gpu) -> None:
    """Make `ctypes` load this GPU's libcudart, and hide real GPUs: its addresses are no GPU's."""
    hide_gpus(monkeypatch)
    real = ctypes.CDLL

    def load(name, *arguments, **options):
        if "libcudart" in str(name):
            return gpu.functions
        return real(name, *arguments, **options)

    monkeypatch.setattr(ctypes, "CDLL", load)
