"""adaptive: an edge's own relaxation, and what is refused at either end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import (
    MalformedError,
    PairMismatchError,
    RelaxationError,
    UnsupportedError,
)
from pilotfish.edge_runtime.relaxation_file import (
    Outcome,
    RelaxationCard,
    expect_writable,
    read_relaxation,
    write_relaxation,
)
from pilotfish.engines.artifact import Artifact
from pilotfish.wire import messages as m
from tests.conftest import VOCAB, Pair
from tests.device_runtime.test_bad_edge import Answer as Parts
from tests.device_runtime.test_bad_edge import LyingEdge, verdict
from tests.support.hostile import PROMPT, RawClient, RawSession
from tests.support.judging import end_of
from tests.support.tiny import tiny_artifact
from tests.system.test_adaptive import NONE_KEY, SAMPLED, SOME_KEY, decisions

# The edge's own relaxation


def card(pair: Pair, **changes: Any) -> RelaxationCard:
    ends = [end_of(Artifact.open(path).manifest) for path in pair]
    outcome = Outcome(
        prompts=1, positions=1, strict=0.5, relaxed=0.5, deviation=0.0, key=1.0, strict_tokens=1.0,
        relaxed_tokens=1.0,
    )  # fmt: skip
    values: dict[str, Any] = {
        "tau": 0.7, "lambda1": 1e6, "lambda2": 1.0, "lambda3": 0.0, "budget": 0.1,
        "temperature": 1.0, "draft_top_k": 64, "window": 4, "max_tokens": 1, "seed": 0,
        "drafter": ends[0], "target": ends[1], "prompts_sha256": "0" * 64,
        "chosen": outcome, "kept_out": outcome,
    }  # fmt: skip
    return RelaxationCard(**{**values, **changes})


def test_an_edges_file_holds_where_a_request_says_nothing(
    pair: Pair, device: Device, tmp_path: Path
) -> None:
    path = tmp_path / "own.json"
    write_relaxation(path, card(pair))
    options = {**SAMPLED, "protocol": "adaptive", "seed": 5}
    with (
        EdgeServer(pair.target, threads=1, relaxation=path) as edge_server,
        Device(pair.draft, edge_server.endpoint, threads=1) as other,
    ):
        for named in ({}, {"tau": 0.2}, {"lambdas": SOME_KEY}, {"tau": 0.2, "lambdas": SOME_KEY}):
            wanted = {"tau": 0.7, "lambdas": NONE_KEY, **named}
            got = other.generate(PROMPT, **options, **named)
            assert decisions(got) == decisions(device.generate(PROMPT, **options, **wanted))
            assert got.notes == device.generate(PROMPT, **options, **wanted).notes


def test_a_file_for_another_target_ends_the_start(pair: Pair, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    stranger = end_of(tiny_artifact(tmp_path / "stranger", vocab=VOCAB, seed=77).manifest)
    write_relaxation(path, card(pair, target=stranger))
    with pytest.raises(PairMismatchError, match="calibrate"):
        EdgeServer(pair.target, threads=1, relaxation=path).start()


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda message: None,
    "a list": lambda message: [message],
    "a newer format": lambda message: {**message, "format": 2},
    "a τ beyond 1": lambda message: {**message, "tau": 1.5},
    "a negative λ₁": lambda message: {**message, "lambda1": -1},
    "a λ₂ that is text": lambda message: {**message, "lambda2": "0.3"},
    "no λ₃": lambda message: {name: value for name, value in message.items() if name != "lambda3"},
    "something else": lambda message: {**message, "colour": "blue"},
    "no origin": lambda message: {**message, "target": {**message["target"], "origin": "x"}},
}


@pytest.mark.parametrize("spoil", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_is_none_ends_the_start(
    pair: Pair, tmp_path: Path, spoil: Callable[[dict[str, Any]], Any]
) -> None:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(spoil(msgspec.to_builtins(card(pair)))))
    with pytest.raises(RelaxationError, match="calibrate"):
        read_relaxation(path)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"format": 1}', "\0" * 100_000])
def test_garbage_is_no_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "garbage.json"
    path.write_text(text)
    with pytest.raises(RelaxationError):
        read_relaxation(path)
    with pytest.raises(RelaxationError, match="no file"):
        read_relaxation(tmp_path / "absent.json")


def test_an_edge_whose_file_is_missing_says_so(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(RelaxationError, match="absent"):
        EdgeServer(pair.target, threads=1, relaxation=tmp_path / "absent.json").start()


# What is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"tau": -0.01}, "tau"),
        ({"tau": 1.01}, "tau"),
        ({"tau": float("nan")}, "tau"),
        ({"lambdas": (1.0, 0.5)}, "length 3"),
        ({"lambdas": (-1.0, 0.5, 0.5)}, "lambdas\\[0\\]"),
        ({"lambdas": (1.0, 1.5, 0.5)}, "lambdas\\[1\\]"),
        ({"lambdas": (1.0, 0.5, float("nan"))}, "lambdas\\[2\\]"),
        ({"expansion": (2, 1)}, "chain"),
    ],
)
def test_senseless_options(device: Device, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        device.generate(PROMPT, protocol="adaptive", **{"temperature": 1.0, **options})
    assert device.generate(PROMPT, protocol="adaptive", temperature=1.0, max_tokens=3).tokens


@pytest.mark.parametrize(
    "wanted",
    [
        *({"tau": tau} for tau in (-0.01, 1.01, float("nan"), float("inf"), "0.5", True, [0.5])),
        *(
            {"lambdas": odd}
            for odd in ([], [1.0, 0.5], [1.0, 0.5, 0.5, 0.5], [-1.0, 0.5, 0.5], 0.5)
        ),
        *(
            {"tau": 0.2, "lambdas": odd}
            for odd in ([1e7, 0.5, 0.5], [float("nan")] * 3, [1.0, 1.5, 0.5], "abc")
        ),
        *({"tau": 0.2, "colour": 1}, {"threshold": 0.5}, [], "x", 0.2, True, None, {1: 2}),
    ],
)
def test_beginnings_that_relax_senselessly(edge: EdgeServer, wanted: object) -> None:
    with RawClient(edge.endpoint) as client:
        client.send(*RawSession().begin(PROMPT, "adaptive", options=wanted))
        client.fails("malformed")


def test_the_edge_refuses_temperature_0(edge: EdgeServer) -> None:
    with RawClient(edge.endpoint) as client:
        client.send(*RawSession().begin(PROMPT, "adaptive", temperature=0.0))
        client.fails("unsupported")


@pytest.fixture
def liar(pair: Pair) -> Iterator[Callable[..., Device]]:
    opened: list[LyingEdge | Device] = []

    def make(script: Callable[[m.DeviceMessage], list[Parts]]) -> Device:
        edge = LyingEdge(pair, script)
        edge.start()
        opened.append(edge)
        device = Device(pair.draft, edge.endpoint, threads=1)
        opened.append(device)
        return device

    yield make
    for each in reversed(opened):
        each.close() if isinstance(each, Device) else each.stop()


@pytest.mark.parametrize(
    ("protocol", "accepted", "notes"),
    [
        ("adaptive", 0, [1.0001]),
        ("adaptive", 2, [3.0001]),
        ("adaptive", 4, [4.0001]),
        ("adaptive", 1, [float("inf")]),
        ("adaptive", 1, [float("nan")]),
        ("adaptive", 1, [-0.5]),
        ("adaptive", 1, [0.5, 3]),
        ("adaptive", 1, [0.5, 1.0]),
        # after the counters a federation's omitted mass may follow, and nothing else
        ("adaptive", 1, [0.5, 1, 2.0001]),
        ("adaptive", 1, [0.5, 1, 0.001, 0.001]),
        ("tslt", 1, [2.0001]),
        ("tslt", 1, [-0.001]),
        ("tslt", 1, [float("nan")]),
        ("tslt", 1, [0.001, 0.001]),
        ("dssd", 1, [0.001, 0.001]),
    ],
)
def test_notes_that_cannot_be(
    liar: Callable[..., Device], protocol: str, accepted: int, notes: list[float]
) -> None:
    def script(request: m.DeviceMessage) -> list[Parts]:
        changes: Any = {"accepted": accepted, "notes": notes}
        key = bytes([2 ** int(sum(notes[1:2])) - 1]) if protocol == "adaptive" else None
        frames = [] if key is None else [key]
        return [[verdict(request, **changes), *frames]] if isinstance(request, m.Window) else []

    device = liar(script)
    # what is wrong is a note, not the frame of key tokens alone
    with pytest.raises(MalformedError, match=r"cannot have|more notes|header|not fit"):
        device.generate(PROMPT, protocol=protocol, temperature=1.0, window=4, max_tokens=20)


@pytest.mark.parametrize(
    ("accepted", "key", "frames"),
    [
        (1, 1, []),
        (1, 1, [b""]),
        (1, 1, [b"\1\0"]),
        (1, 1, [b"\1", b"\1"]),
        (1, 1, [b"\4"]),  # the third token was not verified
        (1, 1, [b"\3"]),
        (1, 0, [b"\1"]),
        (4, 1, [b"\x10"]),  # the window has four tokens
    ],
)
def test_key_tokens_that_cannot_be(
    liar: Callable[..., Device], accepted: int, key: int, frames: list[bytes]
) -> None:
    def script(request: m.DeviceMessage) -> list[Parts]:
        changes: Any = {"accepted": accepted, "notes": [0.5, key]}
        return [[verdict(request, **changes), *frames]] if isinstance(request, m.Window) else []

    device = liar(script)
    with pytest.raises(MalformedError, match="key"):
        device.generate(PROMPT, protocol="adaptive", temperature=1.0, window=4, max_tokens=20)


def test_whether_a_card_can_be_written_is_known_before(tmp_path: Path) -> None:
    expect_writable(tmp_path / "new" / "folders" / "card.json")
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "card.json"):
        with pytest.raises(RelaxationError, match="cannot be written"):
            expect_writable(path)
