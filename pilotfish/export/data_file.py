"""The external data of an ONNX graph: a file of tensors, which may exceed 2 GB."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from onnx import StringStringEntryProto, TensorProto

PAGE = 4096  # alignment of tensors (bytes), so that a runtime can map them


class DataFile:
    """A file to which tensors are appended; a tensor is on disk when `put` returns."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """The SHA-256 (hex) of the bytes written so far."""
        return self._digest.hexdigest()

    def put(self, tensor: TensorProto, parts: Iterable[NDArray[np.uint8]]) -> None:
        """Write the bytes of `tensor`, one part at a time, and record their place in `tensor`."""
        self._write(np.zeros(-self._file.tell() % PAGE, np.uint8))
        start = self._file.tell()
        for part in parts:
            self._write(part)
        size = self._file.tell() - start
        tensor.data_location = TensorProto.EXTERNAL
        del tensor.external_data[:]
        for key, value in (
            ("location", self._name),
            ("offset", str(start)),
            ("length", str(size)),
        ):
            tensor.external_data.append(StringStringEntryProto(key=key, value=value))

    def _write(self, payload: NDArray[np.uint8]) -> None:
        self._file.write(payload.data)
        self._digest.update(payload.data)
