"""A worker that lies: what it says is not believed, its list's policy is applied, all is counted.

The liar is a real worker whose reports are spoilt on their way to the socket.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.targets import peer
from edge_runtime.targets.target import Ask
from pilotfish import Device, EdgeServer
from speculation.ensemble import TopRows
from tests.conftest import VOCAB
from tests.daemons import await_sample, free_port, scrape
from tests.federating import (
    SESSIONS,
    Cast,
    Ensemble,
    Frames,
    Opened,
    Said,
    WorkerThread,
    await_,
    cast_in,
    endless,
    opened,
    write_list,
)
from tests.test_federation import Averaged, tokens_of
from wire import messages as m
from wire.codecs.topk import decode_topk, encode_topk
from wire.errors import TargetLostError
from wire.messages import encode
from wire.nodes import HEADER_BYTES, Attached, Greet, Ready, Refused, Scored
from wire.protocols import Law

KEPT, ROWS = 16, 5
ASK = Ask(1, tokens_of(4, 20), 0, ROWS)
Spoil = Callable[[msgspec.Struct, Frames], Iterable[Said]]
Alter = Callable[[TopRows], TopRows]


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory) -> Cast:
    return endless(cast_in(tmp_path_factory.mktemp("cast")))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was left alone is asked again soon."""
    monkeypatch.setattr(peer, "_RETRY_S", (0.02, 0.5))


# Lies about the rows; values travel in fp32 or fp16


def scored(spoilt: Callable[[bytes], Iterable[bytes]]) -> Spoil:
    """Of an answer, other frames in place of its own."""

    def spoil(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
        if isinstance(message, Scored):
            yield message, list(spoilt(frames[0]))
        else:
            yield message, frames

    return spoil


def patched(at: int, value: bytes) -> Spoil:
    """Other bytes at some place, counted from the end if that is negative."""

    def spoilt(frame: bytes) -> Iterator[bytes]:
        place = at % len(frame)
        yield frame[:place] + value + frame[place + len(value) :]

    return scored(spoilt)


def told_anew(alter: Alter, vocab: int = VOCAB) -> Spoil:
    """Other rows, well encoded."""

    def spoilt(frame: bytes) -> Iterator[bytes]:
        form = ("fp16", "fp32", "levels")[frame[0] & 3]
        yield encode_topk(alter(decode_topk(frame, ROWS, KEPT, VOCAB)), vocab, form)

    return scored(spoilt)


def f32(value: float) -> bytes:
    return struct.pack("<f", value)


def f16(value: float) -> bytes:
    return struct.pack("<e", value)


HALVES = 4 + 4 * ROWS  # where a frame's halves begin
NONSENSE: dict[str, tuple[str, Spoil]] = {
    "NaN": ("fp32", patched(4, f32(float("nan")))),
    "infinity": ("fp32", patched(4 + 4 * KEPT, f32(float("inf")))),
    "negative": ("fp32", patched(8, f32(-0.01))),
    "above 1": ("fp32", patched(4, f32(1.5))),
    "all of it tiny": ("fp32", scored(lambda frame: [frame[:4] + bytes(4 * ROWS * KEPT)])),
    "NaN of a half": ("fp16", patched(HALVES, f16(float("nan")))),
    "infinity of a half": ("fp16", patched(HALVES + 2, f16(float("inf")))),
    "negative half": ("fp16", patched(HALVES, f16(-3.0))),
    "NaN of a mass": ("fp16", patched(4, f32(float("nan")))),
    "mass above 1": ("fp16", patched(8, f32(1.1))),
    "negative mass": ("fp16", patched(4, f32(-0.5))),
    "no mass": ("fp16", patched(4, f32(0.0))),
    "less mass than can be": ("fp16", patched(4, f32(0.1))),
    "denormal mass": ("fp16", patched(4, f32(1e-42))),
    "K less 1": ("fp16", told_anew(lambda rows: TopRows(rows.ids[:, 1:], rows.values[:, 1:]))),
    "another K in the head": ("fp16", patched(1, b"\x11")),
    "a K of all bits": ("fp16", patched(1, b"\xff\xff\xff")),
    "ids beyond": ("fp32", told_anew(lambda rows: TopRows(rows.ids + 40, rows.values), 2 * VOCAB)),
    "a row less": ("fp16", told_anew(lambda rows: TopRows(rows.ids[1:], rows.values[1:]))),
    "a row more": (
        "fp32",
        told_anew(lambda rows: TopRows(np.tile(rows.ids, (2, 1)), np.tile(rows.values, (2, 1)))),
    ),
    "another format's code": ("fp16", patched(0, b"\x03")),
    "no frame": ("fp16", scored(lambda frame: [])),
    "an empty frame": ("fp16", scored(lambda frame: [b""])),
    "two frames": ("fp16", scored(lambda frame: [frame, frame])),
    "a hundred frames": ("fp16", scored(lambda frame: [frame] * 100)),
    "half a frame": ("fp16", scored(lambda frame: [frame[: len(frame) // 2]])),
    "a byte more": ("fp16", scored(lambda frame: [frame + b"\0"])),
    "a million bytes": ("fp16", scored(lambda frame: [bytes(10**6)])),
    "random bytes": ("fp32", scored(lambda frame: [secrets.token_bytes(len(frame))])),
}  # fmt: skip


# Lies about the message


def altered(**changes: Any) -> Spoil:
    """Another header of an answer; what changes is told by the honest one."""

    def spoil(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
        if isinstance(message, Scored):
            fields = {name: change(message) for name, change in changes.items()}
            yield msgspec.structs.replace(message, **fields), frames
        else:
            yield message, frames

    return spoil


def replaced(*others: Callable[[Scored, Frames], Said]) -> Spoil:
    """Other messages in place of an answer."""

    def spoil(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
        if isinstance(message, Scored):
            for other in others:
                yield other(message, frames)
        else:
            yield message, frames

    return spoil


def as_it_is(message: Scored, frames: Frames) -> Said:
    return message, frames


OTHER = b"\x17" * 16
MISPLACED: dict[str, Spoil] = {
    "of the next step": altered(number=lambda said: said.number + 1),
    "of a step that never was": altered(number=lambda said: 2**62 - 1),
    "of a step long ago": altered(number=lambda said: 0),
    "nothing like a header": replaced(lambda said, frames: (b"\xc1" * 40, frames)),
    "no header": replaced(lambda said, frames: (b"", frames)),
    "half a header": replaced(lambda said, frames: (encode(said)[:10], frames)),
    "a header without end": replaced(lambda said, frames: (bytes(HEADER_BYTES + 1), frames)),
    "a header in a header": replaced(lambda said, frames: (b"\x91" * 60_000, frames)),
    "an order": replaced(lambda said, frames: (Greet(version=1), frames)),
    "a device's message": replaced(lambda said, frames: (m.Ping(nonce=1), frames)),
    "a number that is none": replaced(
        lambda said, _: (msgspec.msgpack.encode(["scored", said.incarnation, -1, []]), [])
    ),
}
REFUSALS: dict[str, Spoil] = {
    "a refusal": replaced(
        lambda said, _: (Refused(incarnation=said.incarnation, code="x", message="no"), [])
    ),
    "a refusal of all": replaced(
        lambda said, _: (Refused(incarnation=None, code="internal", message="no\nWATCHDOG=1"), [])
    ),
}
# Answers that nobody can tell from none at all: the worker is late.
SILENCE: dict[str, Spoil] = {
    "nothing": replaced(),
    "another incarnation": altered(incarnation=lambda said: OTHER),
    "a refusal of somebody else": replaced(
        lambda said, _: (Refused(incarnation=OTHER, code="x", message="no"), [])
    ),
    "attached instead": replaced(lambda said, _: (Attached(incarnation=OTHER), [])),
}
BROKEN: dict[str, Spoil] = {
    "more than an answer may have": scored(lambda frame: [bytes(20 * 2**20)]),
}  # fmt: skip
EVERY = (
    {name: ("lied", form, spoil) for name, (form, spoil) in NONSENSE.items()}
    | {name: ("lied", "fp16", spoil) for name, spoil in MISPLACED.items()}
    | {name: ("refused", "fp16", spoil) for name, spoil in REFUSALS.items()}
    | {name: ("late", "fp16", spoil) for name, spoil in SILENCE.items()}
    | {name: ("gone", "fp16", spoil) for name, spoil in BROKEN.items()}
)


def once(spoil: Spoil) -> Spoil:
    """The first answer is spoilt, the others are as they are."""
    lied = False

    def spoil_once(message: msgspec.Struct, frames: Frames) -> Iterable[Said]:
        nonlocal lied
        if isinstance(message, Scored) and not lied:
            lied = True
            return spoil(message, frames)
        return [(message, frames)]

    return spoil_once


@contextmanager
def federated(cast: Cast, folder: Path, **settings: Any) -> Iterator[tuple[Opened, WorkerThread]]:
    """A target over an honest worker "a" and a worker "b" that will lie."""
    with WorkerThread(cast.a) as honest, WorkerThread(cast.b) as liar:
        path = write_list(
            folder / "w.toml",
            [("a", honest.endpoint), ("b", liar.endpoint)],
            **{"kept": KEPT, "late_s": 30.0, "give_up_s": 60.0} | settings,
        )
        with opened(path, cast.a) as held:
            yield held, liar


def logits_of(held: Opened, number: int = 7) -> NDArray[np.float32]:
    return held.target.fly(number, [ASK])[0].logits


def wanted_of(models: list[Path], form: str) -> NDArray[np.float32]:
    return Averaged(models, [1.0] * len(models), KEPT, form).fly(1, [ASK])[0]


@pytest.mark.parametrize("lie", EVERY)
def test_under_wait_a_liar_is_asked_again_until_it_is_honest(
    cast: Cast, tmp_path: Path, lie: str
) -> None:
    event, form, spoil = EVERY[lie]
    if event == "late":
        pytest.skip("who owes an answer is waited for")
    with federated(cast, tmp_path, late="wait", values=form) as (held, liar):
        liar.lies(once(spoil))
        np.testing.assert_array_equal(logits_of(held), wanted_of([cast.a, cast.b], form))
        events = held.events("b")
        assert events[event] == 1
        assert ("lied" in events) == (event == "lied")
        assert "dropped" not in events
        assert held.events("a") == {}
        np.testing.assert_array_equal(logits_of(held, 8), wanted_of([cast.a, cast.b], form))


@pytest.mark.parametrize("lie", EVERY)
def test_under_drop_the_others_answer(cast: Cast, tmp_path: Path, lie: str) -> None:
    event, form, spoil = EVERY[lie]
    late_s = 0.3 if event == "late" else 30.0  # nobody waits for a liar
    settings = {"late": "drop", "values": form, "late_s": late_s}
    with federated(cast, tmp_path, **settings) as (held, liar):
        liar.lies(spoil)
        np.testing.assert_array_equal(logits_of(held), wanted_of([cast.a], form))
        events = held.events("b")
        assert events[event] >= 1
        assert events["dropped"] >= 1
        if event == "late":
            assert held.target.trouble == "b: late"


@pytest.mark.parametrize("lie", EVERY)
def test_under_fail_a_typed_error_names_the_liar(cast: Cast, tmp_path: Path, lie: str) -> None:
    event, form, spoil = EVERY[lie]
    with federated(cast, tmp_path, late="fail", values=form, late_s=0.4) as (held, liar):
        liar.lies(spoil)
        with pytest.raises(TargetLostError, match="b did not answer"):
            logits_of(held)
        assert held.events("b")[event] >= 1
        if event != "late":
            liar.is_honest()
            await_(lambda: held.target.trouble == "", turn=held.target.landed)
            np.testing.assert_array_equal(logits_of(held, 8), wanted_of([cast.a, cast.b], form))


def test_an_answer_that_comes_twice_is_a_lie(cast: Cast, tmp_path: Path) -> None:
    """The flight has landed with the first one, which was right; the next one lands as well."""
    with federated(cast, tmp_path) as (held, liar):
        liar.lies(once(replaced(as_it_is, as_it_is)))
        wanted = wanted_of([cast.a, cast.b], "fp16")
        np.testing.assert_array_equal(logits_of(held), wanted)
        await_(lambda: "lied" in held.events("b"), turn=held.target.landed)
        np.testing.assert_array_equal(logits_of(held, 8), wanted)
        assert held.events("b")["lied"] == 1


def test_what_comes_behind_nonsense_is_not_believed(cast: Cast, tmp_path: Path) -> None:
    """Two flights are under way; the first answer is nonsense, and the second comes at once."""
    with federated(cast, tmp_path, late="drop") as (held, liar):
        said: list[tuple[Scored, Frames]] = []

        def spoil(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
            if not isinstance(message, Scored):
                yield message, frames
                return
            said.append((message, frames))
            if len(said) == 2:
                yield said[0][0], [b"nonsense"]
                yield said[1]

        liar.lies(spoil)
        target = held.target
        target.start(1, [ASK])
        target.start(2, [ASK._replace(slot=2)])
        landed: dict[int, NDArray[np.float32]] = {}

        def hear() -> None:
            landed.update({each.number: each.answers[0].logits for each in target.landed()})

        await_(lambda: len(landed) == 2, turn=hear)
        for logits in landed.values():
            np.testing.assert_array_equal(logits, wanted_of([cast.a], "fp16"))
        assert held.events("b")["lied"] == 1


# Lies about what it is


def greeting(**changes: Any) -> Spoil:
    def spoil(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
        if isinstance(message, Ready):
            message = msgspec.structs.replace(message, **changes)
        yield message, frames

    return spoil


UNFIT = {
    "another vocabulary": ({"tokenizer": "ab" * 32}, "needs one vocabulary"),
    "a longer vocabulary": ({"vocab_size": VOCAB + 1}, "needs one vocabulary"),
    "another version": ({"version": 99}, "same Pilotfish release"),
    "a stage": ({"stage": 1, "stages": 2}, "wants whole models"),
    "too few slots": ({"slots": SESSIONS - 1}, f"--sessions {SESSIONS}"),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_worker_that_does_not_suit_takes_no_part(cast: Cast, tmp_path: Path, what: str) -> None:
    """And the edge says why, and what to do."""
    changes, advice = UNFIT[what]
    with WorkerThread(cast.a) as honest, WorkerThread(cast.b) as liar:
        listed = [("a", honest.endpoint), ("b", liar.endpoint)]
        liar.lies(greeting(**changes))
        settings = {"late": "drop", "late_s": 0.2, "give_up_s": 0.6, "kept": KEPT}
        with opened(write_list(tmp_path / "w.toml", listed, **settings), cast.a) as held:
            assert held.target.trouble.startswith("b: ")
            assert advice in held.target.trouble
            assert held.events("b") == {"refused": 1}  # it says the same whenever it is asked
            np.testing.assert_array_equal(logits_of(held), wanted_of([cast.a], "fp16"))
            liar.is_honest()
            await_(lambda: held.target.trouble == "", turn=held.target.landed)
            wanted = wanted_of([cast.a, cast.b], "fp16")
            np.testing.assert_array_equal(logits_of(held, 8), wanted)


def test_another_model_after_a_restart_takes_no_part(cast: Cast, tmp_path: Path) -> None:
    with ExitStack() as stack:
        honest = stack.enter_context(WorkerThread(cast.a))
        with WorkerThread(cast.b) as first:
            endpoint = first.endpoint
            listed = [("a", honest.endpoint), ("b", endpoint)]
            path = write_list(tmp_path / "w.toml", listed, kept=KEPT, late="drop")
            held = stack.enter_context(opened(path, cast.a))
            digest = held.target.digest
        with WorkerThread(cast.c, endpoint):
            await_(lambda: "with digest" in held.target.trouble, turn=held.target.landed)
            assert "start this edge again" in held.target.trouble
            np.testing.assert_array_equal(logits_of(held), wanted_of([cast.a], "fp16"))
        with WorkerThread(cast.b, endpoint):
            await_(lambda: held.target.trouble == "", turn=held.target.landed)
            wanted = wanted_of([cast.a, cast.b], "fp16")
            np.testing.assert_array_equal(logits_of(held, 8), wanted)
        assert held.target.digest == digest


def test_a_model_that_the_list_does_not_name_takes_no_part(cast: Cast, tmp_path: Path) -> None:
    with WorkerThread(cast.a) as one:
        path = write_list(tmp_path / "w.toml", [("a", one.endpoint)], kept=KEPT)
        path.write_text(f'late = "drop"\nlate_s = 0.1\ngive_up_s = 0.5\n{path.read_text()}')
        path.write_text(path.read_text() + 'digest = "0123456789abcdef"\n')
        with pytest.raises(TargetLostError, match=r"digest .*, not 0123456789abcdef"):
            opened(path, cast.a).__enter__()


# No hot loop


def flood(spoil: Spoil) -> Spoil:
    """The lie, and behind it everything that could have the liar asked again at once."""

    def spoil_more(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
        yield from spoil(message, frames)
        if isinstance(message, Scored):
            for index in range(20):
                yield ready, []
                yield Refused(incarnation=None, code="x", message=f"no {index}"), []
                yield bytes(index + 1), []

    ready = Ready(
        version=1, software="x", model="tiny", digest="x", tokenizer="x", vocab_size=VOCAB,
        hidden_size=64, slots=SESSIONS, context=256,
    )  # fmt: skip
    return spoil_more


@pytest.mark.parametrize(
    "spoil",
    [
        NONSENSE["NaN of a half"][1],
        MISPLACED["nothing like a header"],
        REFUSALS["a refusal of all"],
        BROKEN["more than an answer may have"],
        flood(NONSENSE["no frame"][1]),
        greeting(tokenizer="ab" * 32),
    ],
    ids=["nonsense", "no-header", "refusal", "too-long", "flood", "unfit"],
)
def test_who_lies_for_ever_is_asked_ever_more_rarely(
    cast: Cast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(peer, "_RETRY_S", (0.1, 30.0))
    greeted: list[float] = []

    def noting(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
        if isinstance(message, Ready):
            greeted.append(time.monotonic())
        yield from spoil(message, frames)

    with federated(cast, tmp_path, late="wait") as (held, liar):
        liar.lies(noting)
        liar.service._incarnation = None  # what is asked of it from now on it refuses
        held.target.start(1, [ASK])
        end_s = time.monotonic() + 4.0
        turns = 0
        while time.monotonic() < end_s:
            assert not held.target.landed()
            held.target.pause()
            turns += 1
        pauses = np.diff(greeted)
        assert 3 <= len(greeted) <= 7  # 0.1, 0.2, 0.4, 0.8, 1.6 s between them
        assert (pauses[1:] > 1.4 * pauses[:-1]).all()
        assert turns < 400
        assert len(caplog.records) < 4 * len(greeted)
        liar.is_honest()
        await_(lambda: bool(held.target.landed()), turn=held.target.pause)
        liar.lies(noting)  # a good answer has made up for it all


# A whole edge


@pytest.mark.parametrize("policy", ["wait", "drop", "fail"])
def test_an_edge_over_a_liar(cast: Cast, tmp_path: Path, policy: str) -> None:
    """Sessions live on, and everything is counted."""
    options = {"protocol": "coupled", "temperature": 1.0, "seed": 2, "window": 3, "max_tokens": 30}
    law = Law(sampling=m.Sampling(temperature=1.0), seed=2)
    both = Ensemble([cast.a, cast.b], kept=KEPT).decode([3, 1, 4], 30, law)
    first = Ensemble([cast.a], kept=KEPT).decode([3, 1, 4], 30, law)
    port = free_port()
    with WorkerThread(cast.a) as honest, WorkerThread(cast.b) as liar:
        listed = [("a", honest.endpoint), ("b", liar.endpoint)]
        settings = {"late": policy, "late_s": 1.5, "give_up_s": 60.0, "kept": KEPT}
        path = write_list(tmp_path / "w.toml", listed, **settings)
        flags = {"threads": 1, "sessions": SESSIONS, "federate": path, "metrics": port}
        with (
            EdgeServer(cast.a, **flags) as edge,
            Device(cast.draft, edge.endpoint, threads=1) as device,
        ):
            assert device.generate([3, 1, 4], **options).tokens == both
            for lie in ("NaN of a half", "nothing like a header", "more than an answer may have"):
                spoil = EVERY[lie][2]
                liar.lies(once(spoil) if policy == "wait" else spoil)
                if policy == "fail":
                    with pytest.raises(TargetLostError, match="b did not answer"):
                        device.generate([3, 1, 4], **options)
                else:
                    wanted = both if policy == "wait" else first
                    assert device.generate([3, 1, 4], **options).tokens == wanted
                liar.is_honest()
                await_sample(port, 'node_up{node="b"}', 1)
                assert device.generate([3, 1, 4], **options).tokens == both
            figures = scrape(port)
            event = 'node_events_total{{event="{}",node="b"}}'
            for kind in ("lied", "refused", "gone"):
                assert figures[event.format(kind)] >= 1
            assert (event.format("dropped") in figures) == (policy == "drop")
            assert (event.format("late") in figures) == (policy == "fail")
            assert figures['node_up{node="a"}'] == 1
            for node in "ab":
                for direction in ("to", "from"):
                    name = f'node_bytes_total{{direction="{direction}",node="{node}"}}'
                    assert figures[name] > 1000
            assert figures['node_compute_seconds_total{node="a"}'] > 0
