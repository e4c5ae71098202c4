"""Every header is the msgpack array of docs/wire.md to a reader that is not ours, and back.

The other tests of messages write and read with one library (msgspec), which would agree with
itself about anything. Here stock `msgpack` reads what we write, and writes what we read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given

from pilotfish.wire import messages as m
from pilotfish.wire import nodes
from tests.support.examples import examples
from tests.wire.test_messages import messages

READERS: list[tuple[Any, Callable[[m.Buffer], Any]]] = [
    (m.DeviceMessage, m.decode_device_message),
    (m.Reply, m.decode_reply),
    (nodes.Order, nodes.decode_order),
    (nodes.Report, nodes.decode_report),
]
EVERY = [(kind, decode) for union, decode in READERS for kind in get_args(union)]


def plain(value: Any) -> Any:
    """A message as docs/wire.md puts it: the type's name, then the fields in their order.

    The last fields of some messages are left out if they have no value.
    """
    if isinstance(value, msgspec.Struct):
        tag = type(value).__struct_config__.tag
        fields = [plain(getattr(value, name)) for name in value.__struct_fields__]
        for _ in range(value.omittable if isinstance(value, m.HeaderWithOption) else 0):
            if fields[-1] is None:
                del fields[-1]
        return fields if tag is None else [tag, *fields]
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize(("kind", "decode"), EVERY, ids=[kind.__name__ for kind, _ in EVERY])
def test_stock_msgpack_reads_and_writes_every_header(
    kind: type[msgspec.Struct], decode: Callable[[m.Buffer], Any]
) -> None:
    @given(messages(kind))
    @examples(20)
    def check(message: Any) -> None:
        header = m.encode(message)
        assert msgpack.unpackb(header) == plain(message)
        assert decode(msgpack.packb(plain(message))) == message

    check()


def test_a_header_is_these_bytes() -> None:
    """By hand, from the specification of msgpack: an array of 3, a string, a bin, an integer."""
    header = b"\x93\xa6cancel\xc4\x10" + b"s" * 16 + b"\xcd\x01\x00"
    assert m.encode(m.Cancel(session=b"s" * 16, generation=256)) == header
    assert m.decode_device_message(header) == m.Cancel(session=b"s" * 16, generation=256)
