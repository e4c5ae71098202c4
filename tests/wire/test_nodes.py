"""Headers between an edge and its nodes survive their trip, and are what docs/wire.md says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from pilotfish.base.errors import MalformedError
from pilotfish.wire import messages as m
from pilotfish.wire import nodes
from tests.support.examples import examples
from tests.wire.test_messages import messages

ORDERS = get_args(nodes.Order)
REPORTS = get_args(nodes.Report)
DOCUMENT = Path(__file__).parents[2] / "docs" / "wire.md"


@pytest.mark.parametrize("kind", [*ORDERS, *REPORTS])
def test_a_header_comes_out_as_it_went_in(kind: type) -> None:
    decode = nodes.decode_order if kind in ORDERS else nodes.decode_report

    @given(messages(kind))
    @examples(40)
    def check(message: Any) -> None:
        header = m.encode(message)
        assert decode(header) == message
        assert decode(memoryview(header)) == message

    check()


def test_the_largest_step_has_room() -> None:
    """Every slot, each with a tree of which all nodes are kept."""
    item = nodes.Item(
        slot=1023, start=10**5, size=129, rows=129, nodes=128, path=60,
        temperature=1.0,
    )  # fmt: skip
    step = nodes.Step(incarnation=b"i" * 16, number=2**62, items=[item] * nodes.MAX_ITEMS)
    assert len(m.encode(step)) <= nodes.HEADER_BYTES


def test_an_option_that_is_not_used_takes_no_byte() -> None:
    """Without its last field a header ends before it."""
    item = nodes.Item(slot=1, start=200, size=5, rows=5, temperature=1.0)
    attach = nodes.Attach(incarnation=b"i" * 16, top_k=64, values="fp16")
    step = nodes.Step(incarnation=b"i" * 16, number=300, items=[item])
    for message, used in ((attach, {"mass": 0.9}), (step, {"options": [None]})):
        fields = msgspec.msgpack.decode(m.encode(message))
        assert len(fields) == len(message.__struct_fields__)  # the tag, and all but the last
        with_option = m.encode(msgspec.structs.replace(message, **used))
        option = msgspec.msgpack.encode([*used.values()])
        assert len(with_option) == len(m.encode(message)) + len(option) - 1


@given(st.binary(max_size=200))
def test_noise_is_malformed(noise: bytes) -> None:
    for decode in (nodes.decode_order, nodes.decode_report):
        try:
            decode(noise)
        except MalformedError:
            continue
        assert noise[1:].startswith((b"\xa5greet", b"\xa5ready", b"\xa6attach"))


@pytest.mark.parametrize("kind", [*ORDERS, *REPORTS])
def test_only_greetings_may_have_more_fields(kind: type) -> None:
    """So that other releases can say that they are such."""
    decode = nodes.decode_order if kind in ORDERS else nodes.decode_report

    @given(messages(kind))
    @examples(5)
    def check(message: Any) -> None:
        longer = msgspec.msgpack.encode([*msgspec.msgpack.decode(m.encode(message)), "more"])
        if kind in (nodes.Greet, nodes.Ready):
            assert decode(longer) == message
        else:
            with pytest.raises(MalformedError):
                decode(longer)

    check()


def documented() -> dict[str, list[str]]:
    """The fields of each header by docs/wire.md, in their order."""
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Nodes of a target")[2]
    text = text.partition("\n## ")[0]
    results = {}
    for line in text.splitlines():
        row = re.match(r"\| `(\w+)` \| ([^|]+) \|", line)
        if row is not None:
            results[row[1]] = fields_of(row[2])
    item = re.search(r"An item is \[([^;]+)\];", text)
    assert item is not None
    results["item"] = fields_of(item[1].replace("\n", " "))
    return results


def fields_of(text: str) -> list[str]:
    """The first word of each field."""
    return [part.strip(" [").split()[0].rstrip("]") for part in text.split(",")]


def test_the_tables_are_those_of_the_code() -> None:
    wanted = {}
    for kind in (*ORDERS, *REPORTS, nodes.Item):
        info = inspect.type_info(kind)
        assert isinstance(info, inspect.StructType)
        wanted[str(info.tag or "item")] = [field.name for field in info.fields]
    assert documented() == wanted
