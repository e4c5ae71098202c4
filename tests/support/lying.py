"""A lying worker's reports, and a target over an honest worker and a lying one.

A lie is a function that replaces a report.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.engine import Work
from pilotfish.speculation.ensemble import TopRows
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.topk import decode_topk, encode_topk
from pilotfish.wire.messages import encode
from pilotfish.wire.nodes import HEADER_BYTES, AttachReply, Greet, Ready, Refused, Scored
from tests.conftest import VOCAB
from tests.support.averaging import Averaged, tokens_of
from tests.support.federating import Cast, Frames, Opened, Said, WorkerThread, opened, write_list
from tests.support.runnable import same_up_to_a_gpus_rounding

KEPT, ROWS = 16, 5
WORK = Work(1, tokens_of(4, 20), ROWS)
Spoil = Callable[[msgspec.Struct, Frames], Iterable[Said]]
Alter = Callable[[TopRows], TopRows]


# Lies about the rows; values travel in fp32 or fp16


def scored(spoilt: Callable[[bytes], Iterable[bytes]]) -> Spoil:
    """Replace the frames of an answer."""

    def spoil(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
        if isinstance(message, Scored):
            yield message, list(spoilt(frames[0]))
        else:
            yield message, frames

    return spoil


def patched(at: int, value: bytes) -> Spoil:
    """Replace the bytes at an offset, from the end if negative."""

    def spoilt(frame: bytes) -> Iterator[bytes]:
        place = at % len(frame)
        yield frame[:place] + value + frame[place + len(value) :]

    return scored(spoilt)


def told_anew(alter: Alter, vocab: int = VOCAB) -> Spoil:
    """Replace the rows by other well-encoded ones."""

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
    """Change fields of an answer's header."""

    def spoil(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
        if isinstance(message, Scored):
            fields = {name: change(message) for name, change in changes.items()}
            yield msgspec.structs.replace(message, **fields), frames
        else:
            yield message, frames

    return spoil


def replaced(*others: Callable[[Scored, Frames], Said]) -> Spoil:
    """Replace an answer by other messages."""

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
    "of the next step": altered(number=lambda report: report.number + 1),
    "of a step that never was": altered(number=lambda report: 2**62 - 1),
    "of a step long ago": altered(number=lambda report: 0),
    "nothing like a header": replaced(lambda report, frames: (b"\xc1" * 40, frames)),
    "no header": replaced(lambda report, frames: (b"", frames)),
    "half a header": replaced(lambda report, frames: (encode(report)[:10], frames)),
    "a header without end": replaced(lambda report, frames: (bytes(HEADER_BYTES + 1), frames)),
    "a header in a header": replaced(lambda report, frames: (b"\x91" * 60_000, frames)),
    "an order": replaced(lambda report, frames: (Greet(version=1), frames)),
    "a device's message": replaced(lambda report, frames: (m.Ping(nonce=1), frames)),
    "a number that is none": replaced(
        lambda report, _: (msgspec.msgpack.encode(["scored", report.incarnation, -1, []]), [])
    ),
}
REFUSALS: dict[str, Spoil] = {
    "a refusal": replaced(
        lambda report, _: (Refused(incarnation=report.incarnation, code="x", message="no"), [])
    ),
    "a refusal of all": replaced(
        lambda report, _: (Refused(incarnation=None, code="internal", message="no\nWATCHDOG=1"), [])
    ),
}
# Answers that are ignored, so that the worker counts as late.
SILENCE: dict[str, Spoil] = {
    "nothing": replaced(),
    "another incarnation": altered(incarnation=lambda report: OTHER),
    "a refusal of somebody else": replaced(
        lambda report, _: (Refused(incarnation=OTHER, code="x", message="no"), [])
    ),
    "attached instead": replaced(lambda report, _: (AttachReply(incarnation=OTHER), [])),
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
    """Spoil the first answer only."""
    lied = False

    def spoil_once(message: msgspec.Struct, frames: Frames) -> Iterable[Said]:
        nonlocal lied
        if isinstance(message, Scored) and not lied:
            lied = True
            return spoil(message, frames)
        return [(message, frames)]

    return spoil_once


def greeting(**changes: Any) -> Spoil:
    def spoil(message: msgspec.Struct, frames: Frames) -> Iterator[Said]:
        if isinstance(message, Ready):
            message = msgspec.structs.replace(message, **changes)
        yield message, frames

    return spoil


@contextmanager
def federated(cast: Cast, folder: Path, **settings: Any) -> Iterator[tuple[Opened, WorkerThread]]:
    """Open a target over an honest worker "a" and a worker "b" that can lie."""
    with WorkerThread(cast.a) as honest, WorkerThread(cast.b) as liar:
        path = write_list(
            folder / "w.toml",
            [("a", honest.endpoint), ("b", liar.endpoint)],
            **{"kept": KEPT, "late_s": 30.0, "give_up_s": 60.0} | settings,
        )
        with opened(path, cast.a) as held:
            yield held, liar


def logits_of(held: Opened, number: int = 7) -> NDArray[np.float32]:
    return held.target.run(number, [WORK])[0].logits


def same_logits(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    """Assert that logits are equal; on a GPU, up to one step of a probability in half precision."""
    same_up_to_a_gpus_rounding(got, wanted, 1e-3)


def wanted_of(models: list[Path], form: str) -> NDArray[np.float32]:
    return Averaged(models, [1.0] * len(models), KEPT, form).run(1, [WORK])[0]
