"""Answers of a pair as lines of JSON: what was said, by which rounds, and how long it took."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from pilotfish import Device, Generation
from pilotfish.bridge import Bridge
from pilotfish.device_runtime.record import STAGES, Round
from pilotfish.engines.artifact import Artifact
from pilotfish.wire.request import Options

Line: TypeAlias = "dict[str, Any]"
"""One prompt and its answers, or one parting that was looked at."""

ALONE = {0.0: "stream, T=0", 1.0: "stream, T=1"}
DRAFTING = {0.0: "greedy", 1.0: "coupled"}
BRIDGED = ("context", "project", "own")


@dataclass(frozen=True)
class Run:
    """One way to answer. window: draft tokens a round; None under `stream`."""

    temperature: float
    window: "int | str | None" = None

    @property
    def name(self) -> str:
        """As lines and tables say it."""
        if self.window is None:
            return ALONE[self.temperature]
        return f"{DRAFTING[self.temperature]} {self.window}"

    def options(self, seed: int, tokens: int) -> Options:
        """For `Device.generate`."""
        wanted: Options = {"temperature": self.temperature, "seed": seed, "max_tokens": tokens}
        if self.window is None:
            return {**wanted, "protocol": "stream"}
        window: Any = self.window
        return {**wanted, "protocol": DRAFTING[self.temperature], "window": window}


def runs(windows: Sequence["int | str"]) -> list[Run]:
    """Target alone and drafts, at both temperatures."""
    return [Run(temperature, window) for temperature in ALONE for window in (None, *windows)]


@dataclass
class Meter:
    """What a device's bridge costs: milliseconds of each of its calls, round by round."""

    rounds: list[dict[str, float]] = field(default_factory=list)
    _spent_ns: dict[str, int] = field(default_factory=dict)
    _seen: Bridge | None = None

    def attach(self, bridge: Bridge) -> None:
        """Count this bridge's calls from now on; once for each bridge."""
        if bridge is self._seen:
            return
        self._seen = bridge
        for name in BRIDGED:
            setattr(bridge, name, self._timed(name, getattr(bridge, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*values: Any) -> Any:
            begun_ns = time.perf_counter_ns()
            try:
                return call(*values)
            finally:
                spent = time.perf_counter_ns() - begun_ns
                self._spent_ns[name] = self._spent_ns.get(name, 0) + spent

        return timed

    def begin(self) -> None:
        """An answer begins."""
        self.rounds.clear()
        self._spent_ns.clear()

    def ended(self, _: Round) -> None:
        """A round is over: for ``on_round``."""
        self.rounds.append({name: 1e-6 * self._spent_ns.get(name, 0) for name in BRIDGED})
        self._spent_ns.clear()


def answers_of(generation: Generation, meter: Meter) -> dict[str, Any]:
    """An answer as a line has it; milliseconds of each stage and of the bridge round by round.

    A token of `stream` counts as a round.
    """
    rounds = generation.rounds
    return {
        "tokens": generation.tokens,
        "finish": generation.finish_reason,
        "total_s": generation.total_s,
        "first_token_s": generation.first_token_s,
        "committed": [len(item.tokens) for item in rounds],
        "window": [item.window for item in rounds],
        "accepted": [item.accepted for item in rounds],
        "pass_ms": [_ms(item.pass_s) for item in rounds],
        "stages_ms": {
            stage: [_ms(getattr(item.timings, stage)) for item in rounds] for stage in STAGES
        },
        "bridge_ms": {
            name: [round(item[name], 4) for item in meter.rounds[: len(rounds)]] for name in BRIDGED
        },
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def answered(
    device: Device, meter: Meter, prompt: Any, every: Sequence[Run], *, seed: int, tokens: int
) -> dict[str, Any]:
    """All runs on one prompt; which is first changes with the seed.

    Both ends read the prompt before, so that all find it read; how long that took is told apart
    ("target_read_s", "drafter_read_s", each with a pass of the target).
    """
    meter.attach(device._drafter.bridge)
    read = device.generate(prompt, protocol="stream", max_tokens=1, seed=seed)
    drafted = device.generate(prompt, protocol="greedy", max_tokens=1, seed=seed)
    results = {}
    first = seed % len(every)
    for run in (*every[first:], *every[:first]):
        meter.begin()
        results[run.name] = answers_of(device.generate(prompt, **run.options(seed, tokens)), meter)
    return {
        "prompt_tokens": read.prompt_tokens,
        "target_read_s": read.total_s,
        "drafter_read_s": drafted.total_s,
        "runs": {run.name: results[run.name] for run in every},
    }


def pair_name(drafter: Path, target: Path) -> str:
    """Which pair lines are of."""
    manifests = [Artifact.open(path).manifest for path in (drafter, target)]
    return " → ".join(f"{manifest.model} {manifest.precision}" for manifest in manifests)


class Results:
    """A file of lines, to which lines are added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.lines: list[Line] = list(_read(path)) if path.exists() else []

    def add(self, line: Line) -> None:
        """It is in the file when this returns."""
        with self._path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")
        self.lines.append(line)

    def of(self, what: str) -> list[Line]:
        """The lines with answers ("prompt") or with partings ("parting")."""
        return [line for line in self.lines if what in line]


def _read(path: Path) -> Iterator[Line]:
    """All whole lines; one that was cut off is taken out of the file."""
    text = path.read_text("utf-8")
    whole = text[: text.rfind("\n") + 1]
    if len(whole) < len(text):
        path.write_text(whole, "utf-8")
    for line in whole.splitlines():
        yield json.loads(line)
