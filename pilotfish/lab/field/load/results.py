"""The results of a load, and their file.

The file is written as a whole after each point, so a kill or a full disk loses the running point
only. It has no texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from pilotfish.base.errors import RunFileError
from pilotfish.base.files import PRIVATE, write_whole
from pilotfish.base.reading import naming_file, reading_file
from pilotfish.lab.field.load.fleet import Measurement
from pilotfish.lab.field.load.timed_answer import TimedAnswer
from pilotfish.lab.runs import changes


class Load(Struct, frozen=True, kw_only=True):
    """What determines a point, besides its method and its number of devices.

    target, digest: the edge's, or the services' addresses. drafter: "" without one. draft_s,
    read_s: seconds per draft token, and per token of a prompt that is read. prompts: digest of the
    prompts. link: the conditions of the emulated link that differ from an ideal one.
    """

    target: str
    digest: str
    drafter: str
    draft_s: float
    read_s: float
    prompts: str
    max_tokens: int
    think_s: float
    rate: float | None
    seed: int
    warm_up_s: float
    for_s: float
    answers: int
    link: dict[str, Any]


class Point(Struct, frozen=True, kw_only=True):
    """A measured method and number of devices.

    took_s: the measured time, s. tokens: number of tokens that arrived in it. answers: those to its
    questions; times count from its begin, and all tokens after an answer's first message are one
    entry. edge_cpu_s: CPU seconds of an edge on this machine in this time.
    """

    method: str
    devices: int
    began_unix_s: float
    took_s: float
    tokens: int
    answers: list[TimedAnswer]
    edge_cpu_s: float | None = None


class Results(Struct, frozen=True, kw_only=True):
    """All points so far. host: facts about this machine."""

    software: str
    host: dict[str, Any]
    load: Load
    points: list[Point] = []

    def write(self, path: Path) -> None:
        """Write the file as a whole."""
        content = msgspec.json.format(msgspec.json.encode(self), indent=1)
        with naming_file(path):
            write_whole(path, content + b"\n", PRIVATE)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a file; raises `RunFileError` for one that is damaged."""
        with reading_file(lambda problem: RunFileError(f"{path} has no results: {problem}.")):
            return msgspec.json.decode(path.read_bytes(), type=Results)


def expect_same(path: Path, old: Load, new: Load) -> None:
    """Raise `RunFileError` if a resumed load is another one than its file has."""
    for name, before, now in changes(structs.asdict(old), structs.asdict(new)):
        raise RunFileError(
            f"The points in {path} were measured with {name.replace('_', ' ')} {before}, but now "
            f"it is {now}: name another folder by --out."
        )


def point_of(method: str, devices: int, began_unix_s: float, measured: Measurement) -> Point:
    """Return the point of what was measured."""
    return Point(
        method=method,
        devices=devices,
        began_unix_s=began_unix_s,
        took_s=measured.end_s - measured.begin_s,
        tokens=measured.tokens,
        answers=[_shorten(answer, measured.begin_s) for answer in measured.answers],
        edge_cpu_s=measured.edge_cpu_s,
    )


def _shorten(answer: TimedAnswer, begin_s: float) -> TimedAnswer:
    """Count times from the begin of the measured time; join all tokens after the first message."""
    arrivals = [(at_s - begin_s, count) for at_s, count in answer.arrivals]
    if len(arrivals) > 2:
        first, (last_s, _) = arrivals[0], arrivals[-1]
        arrivals = [first, (last_s, sum(count for _, count in arrivals[1:]))]
    return structs.replace(answer, asked_s=answer.asked_s - begin_s, arrivals=arrivals)
