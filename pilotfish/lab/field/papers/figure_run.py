"""Measure a figure and store its rows; continue a measurement that was interrupted.

While a figure is measured, its rows are in ``<paper>_<figure>.unfinished``: a line with the facts,
then a line for each row, written as soon as the row is measured. At the end they replace
``<paper>_<figure>.json`` as a whole. If the process is killed, the next run measures the rows that
are missing; the facts of both runs must be the same.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from pilotfish.base.errors import RunFileError
from pilotfish.base.version import SOFTWARE
from pilotfish.lab import host
from pilotfish.lab.field.papers.figure import Bench, Figure
from pilotfish.lab.field.papers.figure_file import (
    FigureFacts,
    FigureFile,
    MeasuredModel,
    file_name,
    read_figure,
)
from pilotfish.lab.field.papers.sheet import Row, Value
from pilotfish.lab.runs import Change, LineFile, WriterLock, changes

_DIGITS = 6  # significant digits of the stored numbers
# facts that may differ between the runs of one measurement
_MAY_CHANGE = ("began", "load", "load_most", "minutes")


class _Line(msgspec.Struct, frozen=True):
    """A stored row. load: the load average. seconds: since the last row, or the run's start."""

    row: dict[str, Value]
    load: float
    seconds: float


def measure_figure(
    paper: str, figure: Figure, bench: Bench, folder: Path, command: str
) -> FigureFile:
    """Measure all rows that an earlier, interrupted run did not measure; write the figure's file.

    command: the command that repeats the measurement.

    Raises:
        RunFileError: if another process measures the figure into this folder, or the interrupted
        run had another pair, other prompts, or another version.
    """
    path = folder / file_name(paper, figure.key)
    unfinished = path.with_suffix(".unfinished")
    folder.mkdir(parents=True, exist_ok=True)
    busy = f"Another process is measuring into {unfinished}: wait until it ends."
    with closing(WriterLock(unfinished, busy)):
        lines = LineFile(unfinished, synced=True)
        facts, done = _read(lines, _facts(paper, figure, bench, command))
        last_s = time.monotonic()
        for row in figure.measure(bench, {figure.identify(line.row) for line in done}):
            now_s = time.monotonic()
            line = _Line(_rounded(row, figure.identity), os.getloadavg()[0], now_s - last_s)
            lines.append(line)
            done.append(line)
            last_s = now_s
        result = FigureFile(_completed(facts, done), [line.row for line in done])
        result.write(path)
        unfinished.unlink()
    return result


def measured_before(
    paper: str, figure: Figure, bench: Bench, folder: Path, command: str
) -> FigureFile | None:
    """Return the figure's file if a new measurement would have the same facts; else None."""
    before = read_figure(folder / file_name(paper, figure.key))
    now = _facts(paper, figure, bench, command)
    return before if before is not None and not _changes(before.facts, now) else None


def _facts(paper: str, figure: Figure, bench: Bench, command: str) -> FigureFacts:
    machine = host.facts()
    return FigureFacts(
        paper=paper,
        figure=figure.key,
        command=command,
        software=SOFTWARE,
        commit=_commit(),
        drafter=MeasuredModel.of_manifest(bench.pair.drafter),
        target=MeasuredModel.of_manifest(bench.pair.target),
        cpu=machine.get("cpu"),
        cpus=machine["cpus"],
        threads=bench.threads,
        prompts=len(bench.prompts),
        prompts_digest=hashlib.sha256("\0".join(bench.prompts).encode()).hexdigest()[:16],
        seed=bench.seed,
        began=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        load=round(os.getloadavg()[0], 2),
        head=bench.judge.digest if bench.judge is not None else None,
    )


def _read(lines: LineFile, now: FigureFacts) -> tuple[FigureFacts, list[_Line]]:
    """Return the facts and the rows of the interrupted run; without rows, begin with ``now``."""

    def damage(number: int, problem: str) -> RunFileError:
        return RunFileError(f"{lines.path}, line {number}, is damaged: {problem}. Remove the file.")

    def decode(number: int, line: bytes) -> FigureFacts | _Line:
        if number == 1:
            return msgspec.json.decode(line, type=FigureFacts)
        return msgspec.json.decode(line, type=_Line)

    stored = lines.read(decode, damage)
    if len(stored) <= 1:  # no row that belongs to the stored facts
        os.truncate(lines.path, 0)
        lines.append(now)
        return now, []
    before = stored[0]
    assert isinstance(before, FigureFacts)
    if changed := _changes(before, now):
        differences = "; ".join(f"{change.name} was {change}" for change in changed)
        raise RunFileError(
            f"{lines.path} has rows of an interrupted measurement with other facts: "
            f"{differences}. Repeat that measurement's command, or remove the file."
        )
    return before, [line for line in stored[1:] if isinstance(line, _Line)]


def _changes(before: FigureFacts, now: FigureFacts) -> list[Change]:
    """Return the facts that differ, without those of the time of a measurement."""
    expected, actual = msgspec.to_builtins(before), msgspec.to_builtins(now)
    for name in _MAY_CHANGE:
        del actual[name]
    return changes(expected, actual)


def _completed(facts: FigureFacts, lines: Sequence[_Line]) -> FigureFacts:
    return msgspec.structs.replace(
        facts,
        load_most=round(max((line.load for line in lines), default=0.0), 2),
        minutes=round(sum(line.seconds for line in lines) / 60.0, 2),
    )


def _rounded(row: Row, identity: Sequence[str]) -> dict[str, Value]:
    """Round the numbers of a row that do not identify it."""
    return {
        name: float(f"{value:.{_DIGITS}g}")
        if isinstance(value, float) and name not in identity
        else value
        for name, value in row.items()
    }


def _commit() -> str | None:
    """Return the commit of the checkout that contains this file; None without checkout or git."""
    root = Path(__file__).parents[4]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    command = ["git", "-C", str(root), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None
