"""Every message survives its trip, and the running hash is always that of the tokens."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import inspect

from pilotfish.base.errors import MalformedError
from pilotfish.base.prose import one_line
from pilotfish.base.tracing import TRACEPARENT
from pilotfish.wire import messages as m
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.nodes import Report, decode_report
from tests.support.examples import examples

REQUESTS = get_args(m.DeviceMessage)
REPLIES = get_args(m.Reply)
NAMED = st.characters(min_codepoint=0x20, max_codepoint=0x7E)
WORDED = st.characters(exclude_categories=("C", "Z"), include_characters=" ")  # what prints


OPTIONS = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2**31) | st.floats(allow_nan=False) | st.text(NAMED),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)  # what an option may be


def texts(kind: inspect.StrType) -> st.SearchStrategy[str]:
    """All texts of a type: a `Traceparent`, a `Name` or a `Text`."""
    if kind.pattern == TRACEPARENT:
        ids = st.integers(1, 2**64 - 1)
        return st.builds("00-{:032x}-{:016x}-{:02x}".format, ids, ids, st.integers(0, 255))
    return st.text(NAMED if kind.pattern else WORDED, max_size=kind.max_length)


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """All values that a field of this type may have."""
    results: dict[type, Callable[[Any], st.SearchStrategy[Any]]] = {
        inspect.IntType: lambda t: st.integers(t.ge, t.le if t.le is not None else t.lt - 1),
        inspect.FloatType: lambda t: st.floats(t.ge, t.le, allow_nan=False),
        inspect.BytesType: lambda t: st.binary(min_size=t.min_length or 0, max_size=t.max_length),
        inspect.StrType: texts,
        inspect.ListType: lambda t: st.lists(
            values(t.item_type), min_size=t.min_length or 0, max_size=min(t.max_length, 20)
        ),
        inspect.DictType: lambda t: st.dictionaries(
            values(t.key_type), values(t.value_type), max_size=5
        ),
        inspect.AnyType: lambda t: OPTIONS,
        inspect.TupleType: lambda t: st.tuples(*map(values, t.item_types)),
        inspect.BoolType: lambda t: st.booleans(),
        inspect.NoneType: lambda t: st.none(),
        inspect.UnionType: lambda t: st.one_of(*map(values, t.types)),
        inspect.StructType: lambda t: messages(t.cls),
    }
    return results[type(kind)](kind)


def messages(cls: type) -> st.SearchStrategy[Any]:
    info = inspect.type_info(cls)
    assert isinstance(info, inspect.StructType)
    return st.builds(cls, **{field.name: values(field.type) for field in info.fields})


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_comes_out_as_it_went_in(kind: type) -> None:
    @given(messages(kind))
    @examples(40)
    def check(message: Any) -> None:
        header = m.encode(message)
        assert m.decode_device_message(header) == message
        assert m.decode_device_message(memoryview(header)) == message
        assert len(header) <= m.HEADER_BYTES

    check()


@pytest.mark.parametrize("kind", REPLIES)
def test_a_reply_comes_out_as_it_went_in(kind: type) -> None:
    @given(messages(kind))
    @examples(40)
    def check(message: Any) -> None:
        assert m.decode_reply(m.encode(message)) == message

    check()


def test_tokens_of_one_model_have_no_byte_for_an_omitted_mass() -> None:
    times = m.Times(received_ns=1, held_ns=1, queue_ns=1, verify_ns=1)
    tokens = m.Tokens(session=b"s" * 16, generation=1, start=200, times=times)
    *fields, source, drafted, accepted = msgspec.msgpack.decode(m.encode(tokens))
    assert (len(fields), source, drafted, accepted) == (5, "", 0, 0)
    averaged = msgspec.structs.replace(tokens, omitted_mass=0.5)
    assert len(m.encode(averaged)) == len(m.encode(tokens)) + 9


@given(st.text(max_size=1024), st.sampled_from(REPLIES + get_args(Report)), st.data())
def test_words_come_in_as_one_printable_line(text: str, kind: type, data: st.DataObject) -> None:
    """Whatever the other end says: it may stand in a log, on a terminal, in a status line."""
    sent = data.draw(messages(kind))
    names = [field.name for field in msgspec.structs.fields(kind) if field.type == m.Text]
    sent = msgspec.structs.replace(sent, **dict.fromkeys(names, text))
    decode = decode_report if kind in get_args(Report) else m.decode_reply
    came = decode(m.encode(sent))
    for name in names:
        line = getattr(came, name)
        assert line.isprintable()
        assert len(line) <= 1024
        assert line == text or not text.isprintable()
    assert msgspec.structs.replace(came, **dict.fromkeys(names, text)) == sent


@pytest.mark.parametrize("forged", ["dsd\n", "\x1b[2J", "ünit", "\x7f"])
def test_names_that_do_not_print_are_malformed(forged: str) -> None:
    failure = m.Failure(code=forged, message="No.")
    with pytest.raises(MalformedError) as refused:
        m.decode_reply(m.encode(failure))
    assert str(refused.value).isprintable()


@given(st.text(st.characters(exclude_categories=()), max_size=60), st.integers(1, 50))
def test_one_line_of_any_text(text: str, most: int) -> None:
    line = one_line(text, most)
    assert line.isprintable()
    assert len(line) <= most
    assert one_line(line, most) == line
    assert line == text or not text.isprintable() or len(text) > most


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_is_no_reply_and_the_other_way_round(kind: type) -> None:
    @given(messages(kind))
    @examples(10)
    def check(message: Any) -> None:
        with pytest.raises(MalformedError):
            m.decode_reply(m.encode(message))

    check()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed(header: bytes) -> None:
    for decode in (m.decode_device_message, m.decode_reply):
        with suppress(MalformedError):
            message = decode(header)
            assert decode(m.encode(message)) == message


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=17)
)  # fmt: skip
FIELDS = st.lists(SCALARS | st.lists(SCALARS, max_size=3), max_size=11)


@given(
    st.sampled_from(
        ["hello", "begin", "window", "states", "pull", "cancel", "ping", "train", "fetch"]
    ),
    FIELDS,
)
def test_any_fields_are_a_message_or_malformed(tag: str, rest: list[Any]) -> None:
    try:
        message = m.decode_device_message(msgspec.msgpack.encode([tag, *rest]))
    except MalformedError:
        return
    assert m.decode_device_message(m.encode(message)) == message


class CommittedMachine(RuleBasedStateMachine):
    """`Committed` beside a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.committed = CommittedTokens()
        self.model: list[int] = []

    @rule(ids=st.lists(st.integers(0, 2**32 - 1), max_size=400), as_array=st.booleans())
    def extend(self, ids: list[int], as_array: bool) -> None:
        self.committed.extend(np.array(ids, dtype=np.uint32) if as_array else ids)
        self.model += ids

    @rule(share=st.floats(0, 1.2))
    def truncate(self, share: float) -> None:
        length = int(share * len(self.model))
        self.committed.truncate(length)
        del self.model[length:]

    @rule()
    def a_view_does_not_change(self) -> None:
        held = self.committed.ids.copy()
        self.committed.extend([7] * 300)
        self.committed.truncate(len(held))
        assert self.committed.ids.tolist() == held.tolist()

    @invariant()
    def same_tokens(self) -> None:
        assert len(self.committed) == len(self.model)
        assert self.committed.ids.tolist() == self.model

    @invariant()
    def hash_is_that_of_the_tokens(self) -> None:
        marks = {at + by for at in range(256, len(self.model) - 1, 256) for by in (-1, 0, 1)}
        for length in {0, len(self.model) // 2, *marks, len(self.model)}:
            packed = np.array(self.model[:length], dtype="<u4").tobytes()
            wanted = hashlib.blake2b(packed, digest_size=8).digest()
            assert self.committed.hash_at(length) == wanted
        assert self.committed.hash == self.committed.hash_at(len(self.model))


TestCommitted = CommittedMachine.TestCase
TestCommitted.settings = examples(50, stateful_step_count=12)


@pytest.mark.parametrize("cut", [0, 100, 255, 256, 257, 511, 512, 700])
def test_a_long_text_cut_back_and_continued_otherwise_has_its_own_hashes(cut: int) -> None:
    """Longer than what the state machine draws: of the text before nothing is kept."""
    before = np.arange(1000, dtype=np.uint32)
    text = np.concatenate([before[:cut], np.full(1000, 7, np.uint32)])
    committed = CommittedTokens()
    committed.extend(before)
    committed.truncate(cut)
    committed.extend(text[cut:])
    for length in (*range(0, len(text), 128), cut, len(text)):
        wanted = hashlib.blake2b(text[:length].astype("<u4").tobytes(), digest_size=8).digest()
        assert committed.hash_at(length) == wanted


def test_cutting_back_a_long_text_hashes_little_of_it() -> None:
    committed = CommittedTokens()
    committed.extend(np.arange(32768, dtype=np.uint32))

    # all of it takes a hundred times as long as what is behind a mark
    def seconds(cut: int) -> float:
        started_s = time.thread_time()
        committed.truncate(cut)
        committed.hash_at(cut - 30)
        return time.thread_time() - started_s

    long_s = min(seconds(32767 - 3 * at) for at in range(60))
    committed.truncate(600)
    short_s = min(seconds(599 - 3 * at) for at in range(60))
    assert long_s < 4 * short_s


def test_an_id_that_is_none_commits_nothing() -> None:
    committed = CommittedTokens()
    committed.extend([1, 2])
    for wrong in ([3, -1], [3, 2**32]):
        with pytest.raises(OverflowError):
            committed.extend(wrong)
    assert committed.ids.tolist() == [1, 2]
    assert committed.hash == committed.hash_at(2)


ANY_BEGIN: dict[str, Any] = {
    "session": bytes(16), "generation": 0, "keep": 0, "hash": bytes(8), "protocol": "ahead",
    "seed": 0, "temperature": 0.0, "top_k": 0, "top_p": 1.0,
}  # fmt: skip
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_begin_without_a_trace_has_the_bytes_of_earlier_releases() -> None:
    plain = m.encode(m.Begin(**ANY_BEGIN))
    assert m.encode(m.Begin(**ANY_BEGIN, traceparent=PARENT)) != plain
    assert len(msgspec.msgpack.decode(plain)) == 1 + len(m.Begin.__struct_fields__) - 2
    predicted = msgspec.msgpack.decode(m.encode(m.Begin(**ANY_BEGIN, predicted=3)))
    assert predicted[-1] == 3
    traced = msgspec.msgpack.decode(m.encode(m.Begin(**ANY_BEGIN, traceparent=PARENT)))
    assert traced[-2:] == [None, PARENT]


@pytest.mark.parametrize(
    "parent",
    [
        "", PARENT[:-1], PARENT + "0", PARENT + "\n", PARENT.upper(), "01" + PARENT[2:],
        PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        PARENT.replace("b7ad6b7169203331", "0" * 16), PARENT.replace("-", "\x1b"), 5, b"00",
    ],
)  # fmt: skip
def test_another_traceparent_is_malformed_and_is_not_quoted(parent: Any) -> None:
    array = [*msgspec.msgpack.decode(m.encode(m.Begin(**ANY_BEGIN, traceparent=PARENT)))]
    array[-1] = parent
    with pytest.raises(MalformedError) as refused:
        m.decode_device_message(msgspec.msgpack.encode(array))
    message = str(refused.value)
    assert message.isprintable()
    assert not isinstance(parent, str) or not parent or parent not in message


def test_a_welcome_of_an_earlier_release_takes_no_traceparent() -> None:
    known = dict.fromkeys(m.Welcome.__struct_fields__, 0)
    limits = m.Limits(context=1, window=1, message_bytes=1, sessions=1)
    texts = dict.fromkeys(("software", "model", "digest", "tokenizer", "vocabulary"), "x")
    lists: dict[str, Any] = {name: [] for name in ("eos_ids", "protocols", "passes", "drafts")}
    welcome = m.Welcome(**{**known, **texts, **lists, "limits": limits, "paced": False})
    earlier = msgspec.msgpack.decode(m.encode(welcome))[:-1]
    read = m.decode_reply(msgspec.msgpack.encode(earlier))
    assert isinstance(read, m.Welcome)
    assert read.traces is False
