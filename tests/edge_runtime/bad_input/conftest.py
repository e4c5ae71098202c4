"""Around every test in this folder a well-behaved device is in the middle of a generation.

It is on the same edge, and must finish with exactly the tokens that it would have got
(`neighbour`, always there).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.wire import messages as m
from tests.support.hostile import PROMPT, RawClient, RawSession


@pytest.fixture(scope="module")
def generation() -> dict[str, Any]:
    """What the neighbour asks for; a file may say otherwise."""
    return {"protocol": "dsd", "temperature": 1.0, "seed": 0, "window": 3, "max_tokens": 40}


@pytest.fixture(scope="module")
def undisturbed(device: Device, generation: dict[str, Any]) -> list[int]:
    return device.generate(PROMPT, **generation).tokens


@pytest.fixture(autouse=True)
def neighbour(device: Device, generation: dict[str, Any], undisturbed: list[int]) -> Iterator[None]:
    pieces = device.stream(PROMPT, **generation)
    got = [*next(pieces).tokens, *next(pieces).tokens]
    yield
    got += [token for piece in pieces for token in piece.tokens]
    assert got == undisturbed


@pytest.fixture
def client(edge: EdgeServer) -> Iterator[RawClient]:
    with RawClient(edge.endpoint) as opened:
        yield opened


@pytest.fixture
def protocol() -> str:
    """What `session` speaks; a file or a test may say otherwise."""
    return "greedy"


@pytest.fixture
def session(client: RawClient, protocol: str) -> Iterator[RawSession]:
    """A generation, begun; closed at the end, for the edge has only so many."""
    opened = RawSession()
    client.send(*opened.begin(PROMPT, protocol))
    yield opened
    client.say(m.Close(session=opened.id))
    client.settle()
