"""Replace a symbolic size in an ONNX graph's inputs and outputs by a number, or read a size.

TensorRT turns opset 24's TensorScatter into KVCacheUpdate, which needs a cache of static length; in
our graphs the capacity is symbolic. This module edits the file's bytes, because devices have no
onnx package. It rewrites only the protobuf messages on the path to a dimension.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

# Field numbers of onnx.proto on the path from a model to the dimensions of inputs and outputs:
# graph; input or output; type; tensor_type; shape; dim.
DIMENSION_PATH: tuple[Collection[int], ...] = ({7}, {11, 12}, {2}, {1}, {2}, {1})
DIM_VALUE, DIM_PARAM = 1, 2
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def fix_size(model: bytes, name: str, value: int) -> bytes:
    """Return the model with every size called `name` in its inputs and outputs set to `value`.

    Raises:
        ValueError: if these bytes are not a protobuf message.
    """
    return _rewrite(memoryview(model), DIMENSION_PATH, name.encode(), value)


def input_width(model: bytes) -> int:
    """Return the last size of a graph's first input.

    Raises:
        ValueError: if these bytes are not a model with such an input, or the size is symbolic.
    """
    message = memoryview(model)
    try:
        for numbers in DIMENSION_PATH[:-1]:
            message = _messages(message, min(numbers))[0]  # inputs have the smaller number
        last = _messages(message, 1)[-1]
    except IndexError:
        raise ValueError("this ONNX file has no input") from None
    for number, _, _, content in _fields(last):
        if number == DIM_VALUE:
            return _read_varint(content, 0)[0]
    raise ValueError("the width of this ONNX file's input is not fixed")


def _messages(message: memoryview, number: int) -> list[memoryview]:
    """List the messages in a field."""
    fields = _fields(message)
    return [content for field, kind, _, content in fields if (field, kind) == (number, BYTES)]


def _rewrite(
    message: memoryview, path: tuple[Collection[int], ...], name: bytes, value: int
) -> bytes:
    parts = []
    for number, kind, raw, content in _fields(message):
        if path and kind == BYTES and number in path[0]:
            inner = _rewrite(content, path[1:], name, value)
            parts += [_varint(number << 3 | BYTES), _varint(len(inner)), inner]
        elif not path and kind == BYTES and number == DIM_PARAM and content == name:
            parts += [_varint(DIM_VALUE << 3 | VARINT), _varint(value)]
        else:
            parts.append(bytes(raw))
    return b"".join(parts)


def _fields(message: memoryview) -> Iterator[tuple[int, int, memoryview, memoryview]]:
    """Yield number, wire type, all bytes and the content of each field."""
    index = 0
    while index < len(message):
        start = index
        tag, index = _read_varint(message, index)
        kind, begin = tag & 7, index
        if kind == VARINT:
            _, index = _read_varint(message, index)
        elif kind == BYTES:
            size, begin = _read_varint(message, index)
            index = begin + size
        elif kind in {FIXED64, FIXED32}:
            index += 8 if kind == FIXED64 else 4
        else:
            raise ValueError("this is not an ONNX file")
        if index > len(message):
            raise ValueError("this ONNX file is truncated")
        yield tag >> 3, kind, message[start:index], message[begin:index]


def _read_varint(message: memoryview, index: int) -> tuple[int, int]:
    """Read the varint at `index`; return its value and the index after it."""
    value = shift = 0
    while True:
        if index >= len(message):
            raise ValueError("this ONNX file is truncated")
        byte = message[index]
        index += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, index
        shift += 7


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
