"""The file of a measured figure: its rows, and the facts about their measurement.

A file is a JSON object with ``facts`` and ``rows``. The figures that were measured for this version
are in the folder ``measured``, as ``<paper>_<figure>.json``.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from pilotfish.base.errors import RunFileError
from pilotfish.base.files import write_output
from pilotfish.base.reading import read_content, reading_file
from pilotfish.engines.manifest import Manifest
from pilotfish.lab.field.papers.sheet import Value

_SHIPPED = "measured"


class MeasuredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the measurement. digest, origin: see `Manifest`."""

    name: str
    precision: str
    digest: str
    origin: str

    @classmethod
    def of_manifest(cls, manifest: Manifest) -> MeasuredModel:
        """Describe an artifact."""
        return cls(
            name=manifest.model,
            precision=manifest.precision,
            digest=manifest.digest,
            origin=manifest.origin,
        )


class FigureFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one measurement.

    commit: commit of the checkout; None for an installed package. began: date and time, UTC.
    prompts: number of prompts; prompts_digest: the first 16 hex digits of their hash. threads: CPU
    threads of a pass; None: one per core. load: the machine's load average of the last minute
    before the measurement; load_most: the largest one during it. minutes: duration, without the
    time between an interruption and the next start. head: SHA-256 of the weights of the decision
    head; None without a head.
    """

    paper: str
    figure: str
    command: str
    software: str
    commit: str | None
    drafter: MeasuredModel
    target: MeasuredModel
    cpu: str | None
    cpus: int
    threads: int | None
    prompts: int
    prompts_digest: str
    seed: int
    began: str
    load: float
    load_most: float = 0.0
    minutes: float = 0.0
    head: str | None = None

    def sentences(self) -> str:
        """Say where, when and with what the rows were measured."""
        commit = f", commit {self.commit[:8]}" if self.commit else ""
        head = f", decision head {self.head[:8]}" if self.head else ""
        return (
            f"Measured by `{self.command}` on {self.began[:10]} ({self.software}{commit}): drafter "
            f"{self.drafter.name} {self.drafter.precision} ({self.drafter.digest[:8]}), target "
            f"{self.target.name} {self.target.precision} ({self.target.digest[:8]}){head}; "
            f"{self.cpus} cores of {self.cpu or 'an unknown CPU'}; {self.prompts} prompts; "
            f"{self.minutes:.1f} minutes, load {self.load:.1f} before, at most "
            f"{self.load_most:.1f} meanwhile."
        )


class FigureFile(msgspec.Struct, frozen=True):
    """A measured figure."""

    facts: FigureFacts
    rows: list[dict[str, Value]]

    def write(self, path: Path) -> None:
        """Write the file, a row on each line."""
        facts = msgspec.json.format(msgspec.json.encode(self.facts), indent=2).decode()
        rows = ",\n".join(msgspec.json.encode(row).decode() for row in self.rows)
        write_output(path, f'{{"facts": {facts},\n"rows": [\n{rows}\n]}}\n'.encode())


def file_name(paper: str, figure: str) -> str:
    """Return the name of a figure's file."""
    return f"{paper}_{figure}.json"


def read_figure(path: Path) -> FigureFile | None:
    """Read a figure's file. Returns None if missing; raises `RunFileError` if it is damaged."""

    def damage(problem: str) -> RunFileError:
        return RunFileError(f"The measured figure {path} cannot be read: {problem}.")

    with reading_file(damage):
        try:
            return msgspec.json.decode(read_content(path), type=FigureFile)
        except FileNotFoundError:
            return None


def shipped_figure(paper: str, figure: str) -> FigureFile | None:
    """Read the figure that this version ships; None if it ships none."""
    folder: Any = resources.files(__package__) / _SHIPPED
    return read_figure(Path(str(folder / file_name(paper, figure))))
