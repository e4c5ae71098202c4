"""Predictions that are none: each is refused with its `begin`, and the session can begin again."""

from __future__ import annotations

from typing import Any

import pytest

from pilotfish.wire import messages as m
from tests.conftest import CONTEXT, VOCAB
from tests.support.hostile import PROMPT, RawClient, RawSession, ids_bytes, take_tokens

WRONG: dict[str, tuple[str, str, int | None, list[bytes]]] = {
    "no frame": ("malformed", "ahead", 3, []),
    "a frame without a count": ("malformed", "ahead", None, [ids_bytes([1, 2, 3])]),
    "no ids": ("malformed", "ahead", 0, [b""]),
    "two frames": ("malformed", "ahead", 3, [ids_bytes([1, 2, 3]), b""]),
    "too few ids": ("malformed", "ahead", 3, [ids_bytes([1, 2])]),
    "too many ids": ("malformed", "ahead", 3, [ids_bytes([1] * 300)]),
    "half an id": ("malformed", "ahead", 3, [ids_bytes([1, 2, 3])[:-1]]),
    "an id beyond the vocabulary": ("token-out-of-range", "ahead", 1, [ids_bytes([VOCAB])]),
    "longer than the context": ("too-large", "ahead", CONTEXT + 1, [ids_bytes([1] * CONTEXT)]),
    "far longer": ("too-large", "ahead", 2**31 - 1, [b""]),
    "under stream": ("malformed", "stream", 3, [ids_bytes([1, 2, 3])]),
    "in rounds": ("malformed", "greedy", 3, [ids_bytes([1, 2, 3])]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_prediction_is_refused(client: RawClient, name: str) -> None:
    code, protocol, predicted, frames = WRONG[name]
    session = RawSession()
    client.send(*session.begin(PROMPT, protocol, predicted=predicted), *frames)
    client.fails(code)
    client.send(*session.begin(PROMPT, "ahead", predicted=2, temperature=0.0), ids_bytes([1, 2]))
    client.send(*session.pull(6))
    assert len(take_tokens(client, 6)) == 6
    client.say(m.Close(session=session.id))


@pytest.mark.parametrize("ids", [[1], [VOCAB - 1] * 9, [7] * (CONTEXT - 8)])
def test_any_ids_may_be_predicted(client: RawClient, ids: list[int]) -> None:
    texts: list[Any] = []
    for predicted in ([], ids):
        session = RawSession()
        begin = session.begin(PROMPT, "ahead", predicted=len(predicted) or None)
        client.send(*begin, *[ids_bytes(predicted)][: len(predicted)])
        client.send(*session.pull(12))
        texts.append(take_tokens(client, 12))
        client.say(m.Close(session=session.id))
    assert texts[0] == texts[1]
