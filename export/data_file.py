"""External data of ONNX graphs: one file of tensors, which may exceed 2 GB."""

from __future__ import annotations

import hashlib
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from onnx import StringStringEntryProto, TensorProto

PAGE = 4096  # tensors start on a page, so that a runtime can map them


class DataFile:
    """Tensors written one after another; each is on disk when `put` returns."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Digest of all that was written so far."""
        return self._digest.hexdigest()

    def put(self, tensor: TensorProto, payload: NDArray[np.uint8]) -> None:
        """Write the bytes of `tensor` and record in it where they are."""
        offset = self._file.tell()
        padding = -offset % PAGE
        self._write(np.zeros(padding, np.uint8))
        self._write(payload)
        tensor.data_location = TensorProto.EXTERNAL
        del tensor.external_data[:]
        for key, value in (
            ("location", self._name),
            ("offset", str(offset + padding)),
            ("length", str(payload.nbytes)),
        ):
            tensor.external_data.append(StringStringEntryProto(key=key, value=value))

    def _write(self, payload: NDArray[np.uint8]) -> None:
        self._file.write(payload.data)
        self._digest.update(payload.data)
