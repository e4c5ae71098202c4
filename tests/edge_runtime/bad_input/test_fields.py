"""Well-formed headers whose fields make no sense."""

from __future__ import annotations

import msgspec
import pytest

from pilotfish.wire import messages as m
from tests.conftest import VOCAB
from tests.support.hostile import PROMPT, RawClient, RawSession, packed, take_tokens

WINDOW_FIELDS = ("type", "session", "generation", "start", "hash")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("generation", -1),
        ("generation", 0.5),
        ("generation", 2**31),
        ("generation", 2**64 - 1),
        ("generation", True),
        ("generation", None),
        ("generation", "0"),
        ("start", -5),
        ("start", 5.25),
        ("start", [5]),
        ("start", float("nan")),
        ("session", b"short"),
        ("session", b"x" * 17),
        ("session", "x" * 16),
        ("hash", b""),
        ("hash", b"x" * 9),
        ("type", b"window"),
        ("type", 3),
    ],
)
def test_fields_of_the_wrong_kind(
    client: RawClient, session: RawSession, place: str, value: object
) -> None:
    header = msgspec.msgpack.decode(session.window()[0])
    header[WINDOW_FIELDS.index(place)] = value
    client.send(packed(header), b"")
    client.fails("malformed")
    session.go_on(client, 2)


def test_strings_that_are_no_utf8(client: RawClient, session: RawSession) -> None:
    begin, ids = session.begin(PROMPT)
    client.send(begin.replace(b"greedy", b"\xff\xfe\xed\xa0\x80\x80"), ids)
    client.fails("malformed")
    client.send(packed(["ping", 1]).replace(b"ping", b"\xf0\x9f\xff\xff"))
    client.fails("malformed")


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": -float("inf")},
        {"temperature": -1.0},
        {"temperature": 1e30},
        {"temperature": 1e-46},  # 0 as a float32: p would be 0/0
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"min_p": -0.1},
        {"min_p": float("nan")},
        {"shape": m.LogitsOptionsMsg(since=2**20)},
        {"shape": m.LogitsOptionsMsg(since=0, repetition_penalty=0.0)},
        {"shape": m.LogitsOptionsMsg(since=0, repetition_penalty=float("inf"))},
        {"shape": m.LogitsOptionsMsg(since=0, frequency_penalty=float("nan"))},
        {"shape": m.LogitsOptionsMsg(since=0, presence_penalty=-2.5)},
        {"shape": m.LogitsOptionsMsg(since=0, logit_bias=[(1, float("-inf"))])},
        {"shape": [0, [[token, 1.0] for token in range(513)]]},
        {"shape": [0, [[1, 1.0], [2, 0.0], [1, 1.0]]]},
        {"shape": []},
        {"shape": 7},
        {"seed": -1},
        {"seed": 2**63},
        {"seed": 1.5},
        {"keep": -1},
    ],
)
def test_sampling_that_makes_no_sense(
    client: RawClient, session: RawSession, changes: dict[str, object]
) -> None:
    begin, ids = session.begin(PROMPT, "dsd", **changes)
    client.send(begin, ids)
    client.fails("malformed")


def test_a_bias_of_a_token_that_there_is_not(client: RawClient, session: RawSession) -> None:
    shape = m.LogitsOptionsMsg(since=1, logit_bias=[(0, 1.0), (VOCAB, 1.0)])
    client.send(*session.begin(PROMPT, "stream", shape=shape))
    client.fails("token-out-of-range")


def test_smallest_and_largest_sampling_that_makes_sense(client: RawClient) -> None:
    for changes in (
        {"temperature": 1e-3, "top_p": 1e-300, "top_k": 2**31 - 1, "seed": 2**63 - 1},
        {"temperature": 100.0, "top_p": 1.0, "top_k": 1, "min_p": 1.0},
        {
            "temperature": 1.0,
            "shape": m.LogitsOptionsMsg(since=len(PROMPT), logit_bias=[(0, 100.0), (1, -100.0)]),
        },
        {"shape": m.LogitsOptionsMsg(since=0, repetition_penalty=1e3, frequency_penalty=2.0)},
    ):
        session = RawSession()
        client.send(*session.begin(PROMPT, "stream", **changes))
        client.send(*session.pull(4))
        assert all(token < VOCAB for token in take_tokens(client, 4))


@pytest.mark.parametrize("protocol", ["stream", "greedy", "dsd", "ahead"])
@pytest.mark.parametrize("name", ["nothere", "tau", "temperature", "x" * 64])
def test_an_option_that_the_protocol_lacks(client: RawClient, protocol: str, name: str) -> None:
    session = RawSession()
    client.send(*session.begin(PROMPT, protocol, options={name: 1}))
    assert name in client.fails("malformed").message
    client.send(*session.begin(PROMPT, "stream"))
    client.send(*session.pull(4))
    assert len(take_tokens(client, 4)) == 4


@pytest.mark.parametrize(
    ("protocol", "temperature", "code"),
    [
        ("telepathy", 0.0, "unsupported"),
        ("local", 0.0, "unsupported"),
        ("", 0.0, "unsupported"),
        ("greedy", 1.0, "unsupported"),
        ("x" * 65, 0.0, "malformed"),
    ],
)
def test_protocols_that_are_not_offered(
    client: RawClient, protocol: str, temperature: float, code: str
) -> None:
    client.send(*RawSession().begin(PROMPT, protocol, temperature=temperature))
    client.fails(code)
