"""The CUDA functions that a cache in GPU memory needs, called through libcudart.

In: host arrays and addresses. Out: GPU memory, pinned host arrays, copies on one stream. The
structures are those of driver_types.h, which are equal in CUDA 11 to 13. Memory is freed when its
Python object is collected.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import weakref
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.engine_errors import CudaError

# File names of the library: first without a version, then for CUDA 13, 12 and 11.
NAMES = ("libcudart.so", "libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0")
FOLDERS = ("/usr/local/cuda/lib64",)
# Folders of pip's CUDA wheels, relative to site-packages.
WHEELS = ("nvidia/cu13/lib", "nvidia/cuda_runtime/lib")

HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
COMPUTE_MAJOR, COMPUTE_MINOR = 75, 76  # values of cudaDeviceAttr
NAME_BYTES = 256  # length of the name, the first field of cudaDeviceProp
PROPERTIES_BYTES = 8192  # buffer size: more than any version's cudaDeviceProp


class Pitched(ctypes.Structure):
    """cudaPitchedPtr: memory in layers of `ysize` rows, each of `pitch` bytes."""

    _fields_ = (("ptr", c_void_p), ("pitch", c_size_t), ("xsize", c_size_t), ("ysize", c_size_t))


class Offset(ctypes.Structure):
    """cudaPos: x in bytes, y in rows, z in layers."""

    _fields_ = (("x", c_size_t), ("y", c_size_t), ("z", c_size_t))


class Extent(ctypes.Structure):
    """cudaExtent: width in bytes, height in rows, depth in layers."""

    _fields_ = (("width", c_size_t), ("height", c_size_t), ("depth", c_size_t))


class Copy3D(ctypes.Structure):
    """cudaMemcpy3DParms: a copy from one pitched memory to another."""

    _fields_ = (
        ("srcArray", c_void_p),
        ("srcPos", Offset),
        ("srcPtr", Pitched),
        ("dstArray", c_void_p),
        ("dstPos", Offset),
        ("dstPtr", Pitched),
        ("extent", Extent),
        ("kind", c_int),
    )


@dataclass(frozen=True)
class Gpu:
    """Facts about a GPU on which built engines depend: name and compute capability ("8.7").

    driver: the CUDA version that its driver supports; "" if it is not known.
    """

    name: str
    compute: str
    driver: str = ""


class Memory:
    """Zeroed GPU memory."""

    def __init__(self, cuda: Cuda, size: int) -> None:
        pointer = c_void_p()
        cuda.call("cudaMalloc", byref(pointer), size)
        self.address = pointer.value or 0
        self.size = size
        self._free = weakref.finalize(self, cuda.free, "cudaFree", self.address)
        cuda.call("cudaMemsetAsync", self.address, 0, size, cuda.stream)


class Cuda:
    """The first GPU, and one stream that runs everything in order.

    Raises:
        CudaError: if a CUDA call fails, in the constructor or in a method; it has CUDA's message.
    """

    def __init__(self) -> None:
        self._library = _declare_types(_load_library())
        count = c_int()
        self.call("cudaGetDeviceCount", byref(count))
        self._process = os.getpid()
        stream = c_void_p()
        self.call("cudaStreamCreate", byref(stream))
        self.stream = stream.value or 0
        # Each Memory refers to `free`, and so to this object: the stream outlives all memory.
        destroy = self._library.cudaStreamDestroy
        weakref.finalize(self, _free, destroy, self.stream, self._process)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the library by its name; raise `CudaError` if it fails."""
        code = getattr(self._library, name)(*arguments)
        if code:
            words = self._library.cudaGetErrorString(code) or b"?"
            raise CudaError(f"{name}: {words.decode(errors='replace')} (CUDA error {code})")

    def free(self, name: str, address: int) -> None:
        """Free memory with function `name`; ignore errors, since the driver may be gone at exit."""
        _free(getattr(self._library, name), address, self._process)

    def describe(self) -> Gpu:
        """Return name and compute capability of the GPU."""
        properties = ctypes.create_string_buffer(PROPERTIES_BYTES)
        current = hasattr(self._library, "cudaGetDeviceProperties_v2")  # CUDA 12
        self.call("cudaGetDeviceProperties" + "_v2" * current, properties, 0)
        name = properties.raw[:NAME_BYTES].split(b"\0")[0].decode(errors="replace")
        parts = []
        for attribute in (COMPUTE_MAJOR, COMPUTE_MINOR):
            value = c_int()
            self.call("cudaDeviceGetAttribute", byref(value), attribute, 0)
            parts.append(value.value)
        driver = self.versions()["cuda of the driver"]
        return Gpu(name=name, compute=f"{parts[0]}.{parts[1]}", driver=driver)

    def versions(self) -> dict[str, str]:
        """Return two versions: of the CUDA runtime, and of the CUDA that the driver supports."""
        versions = {}
        for name, component in (("cuda", "Runtime"), ("cuda of the driver", "Driver")):
            value = c_int()
            self.call(f"cuda{component}GetVersion", byref(value))
            versions[name] = f"{value.value // 1000}.{value.value % 1000 // 10}"
        return versions

    def allocate(self, size: int) -> Memory:
        """Allocate zeroed GPU memory."""
        return Memory(self, max(size, 1))

    def host_array(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Allocate a zeroed host array in pinned memory, which the GPU can copy directly."""
        pointer = c_void_p()
        size = max(math.prod(shape) * np.dtype(dtype).itemsize, 1)
        self.call("cudaHostAlloc", byref(pointer), size, 0)
        address = pointer.value or 0
        buffer = (ctypes.c_char * size).from_address(address)
        weakref.finalize(buffer, self.free, "cudaFreeHost", address)
        array: NDArray[Any] = np.ndarray(shape, dtype, buffer)
        array.fill(0)
        return array

    def upload(self, address: int, array: NDArray[Any]) -> None:
        """Start a copy of a contiguous array to the GPU; do not change it before `synchronize`."""
        self.call(
            "cudaMemcpyAsync",
            address,
            array.ctypes.data,
            array.nbytes,
            HOST_TO_DEVICE,
            self.stream,
        )

    def download(self, array: NDArray[Any], address: int) -> None:
        """Start a copy from the GPU into a contiguous array; it is complete after `synchronize`."""
        self.call(
            "cudaMemcpyAsync",
            array.ctypes.data,
            address,
            array.nbytes,
            DEVICE_TO_HOST,
            self.stream,
        )

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, rows: int
    ) -> None:
        """Copy `rows` rows of `width` bytes within the GPU; a pitch is bytes from row to row."""
        self.call(
            "cudaMemcpy2DAsync",
            target,
            target_pitch,
            source,
            source_pitch,
            width,
            rows,
            DEVICE_TO_DEVICE,
            self.stream,
        )

    def copy_block(
        self,
        target: int,
        target_x: int,
        source: int,
        source_x: int,
        *,
        y: int,
        pitch: int,
        rows: int,
        extent: tuple[int, int, int],
    ) -> None:
        """Copy a block within the GPU, between two memories of equal layout.

        A layer has `rows` rows of `pitch` bytes. The block has `extent` (bytes, rows, layers); it
        begins at layer 0, row `y`, and byte `source_x` or `target_x` of the row.
        """
        parameters = Copy3D(
            srcPos=Offset(source_x, y, 0),
            srcPtr=Pitched(source, pitch, pitch, rows),
            dstPos=Offset(target_x, y, 0),
            dstPtr=Pitched(target, pitch, pitch, rows),
            extent=Extent(*extent),
            kind=DEVICE_TO_DEVICE,
        )
        self.call("cudaMemcpy3DAsync", byref(parameters), self.stream)

    def synchronize(self) -> None:
        """Wait until all work on the stream is done."""
        self.call("cudaStreamSynchronize", self.stream)


def _free(function: Any, address: int, process: int) -> None:
    """Free something of the GPU, unless this is a fork of the process that allocated it."""
    if os.getpid() == process:
        function(address)


def _candidates() -> Iterator[str]:
    yield from NAMES
    places = [Path(folder) for folder in FOLDERS]
    places += [Path(entry) / wheel for entry in sys.path for wheel in WHEELS]
    for place in places:
        yield from (str(path) for path in sorted(place.glob("libcudart.so*"), reverse=True))


def _load_library() -> Any:
    """Load the first libcudart on this machine that the linker accepts."""
    for name in _candidates():
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError("the CUDA runtime (libcudart) is not installed")


def _declare_types(library: Any) -> Any:
    """Declare the types of the library's functions."""
    size, pointer = c_size_t, c_void_p
    signatures: dict[str, tuple[Any, ...]] = {
        "cudaGetDeviceCount": (POINTER(c_int),),
        "cudaRuntimeGetVersion": (POINTER(c_int),),
        "cudaDriverGetVersion": (POINTER(c_int),),
        "cudaDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
        "cudaMalloc": (POINTER(c_void_p), size),
        "cudaFree": (pointer,),
        "cudaHostAlloc": (POINTER(c_void_p), size, ctypes.c_uint),
        "cudaFreeHost": (pointer,),
        "cudaMemsetAsync": (pointer, c_int, size, pointer),
        "cudaMemcpyAsync": (pointer, pointer, size, c_int, pointer),
        "cudaMemcpy2DAsync": (pointer, size, pointer, size, size, size, c_int, pointer),
        "cudaMemcpy3DAsync": (POINTER(Copy3D), pointer),
        "cudaStreamCreate": (POINTER(c_void_p),),
        "cudaStreamDestroy": (pointer,),
        "cudaStreamSynchronize": (pointer,),
    }
    for name, types in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, c_int
    library.cudaGetErrorString.argtypes = (c_int,)
    library.cudaGetErrorString.restype = c_char_p
    return library
