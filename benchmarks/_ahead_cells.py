"""Cells of `ahead.py`: ways to answer that take turns, prompt by prompt, against `stream`.

Each end is kept to a core of its own, one thread each: the edge to the first one, device and
emulator to the last. Both ends have read a prompt before its answers, so that the order of the
ways does not matter, and rates count from the first token on; `ahead.py first` measures it.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from _common import Steps, throwaway_keys
from _pair_partings import parted
from _parting import TIE, scores_at

from pilotfish import Auto, Device, EdgeServer, Generation
from pilotfish.base.cpus import pinned
from pilotfish.device_runtime.record import Round
from pilotfish.device_runtime.texts.text_memory import OFF
from pilotfish.drafting.text_drafter import TEXT
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.wire.protocols import STREAM

WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16)
SCOUTS, KEPT = 2, 2  # prompts that try all windows, and windows that go on after them
DRAFTING = {0.0: "greedy", 1.0: "coupled"}
AND_TEXT = "+text"  # behind a drafter's name: `--draft-text`


def cores() -> tuple[set[int], set[int]]:
    """One core for the edge and one for the device; an only one is both's."""
    mine = sorted(os.sched_getaffinity(0))
    return {mine[0]}, {mine[-1]}


@dataclass(frozen=True)
class Ends:
    """An edge process, devices by name, and the link between them."""

    edge: EdgeServer
    link: Emulator
    devices: dict[str, Device]

    def change(self, conditions: Conditions) -> None:
        """Another link, of which the devices know nothing any more."""
        self.link.set(conditions)
        for device in self.devices.values():
            for _ in range(4):
                device.probe(rates=True)


@contextmanager
def ends(
    drafters: Mapping[str, Path],
    target: Path,
    edge: Callable[..., EdgeServer] = EdgeServer,
    *,
    shared: bool = False,
    **options: object,
) -> Iterator[Ends]:
    """Both ends apart; edge: what starts the daemon, with these further options.

    shared: the edge may use the device's core, too.
    """
    theirs, ours = cores()
    theirs |= ours if shared else set()
    info: dict[str, object] = {"threads": 1, "sessions": 4, **options}
    with ExitStack() as stack:
        folder = stack.enter_context(throwaway_keys())
        stack.enter_context(pinned(ours))  # the emulator inherits it, the edge is moved
        server = stack.enter_context(edge(target, keys=folder, cores=theirs, **info))
        link = stack.enter_context(Emulator(server.endpoint))
        devices = {
            name: stack.enter_context(_device(name, path, link.endpoint, folder))
            for name, path in drafters.items()
        }
        yield Ends(server, link, devices)


def _device(name: str, path: Path, endpoint: str, folder: Path) -> Device:
    """A device; earlier answers are not searched, for the ways repeat each other's."""
    text = name.endswith(AND_TEXT)
    texts = OFF if text or str(path) == TEXT else None
    return Device(path, endpoint, folder, threads=1, draft_text=text, texts=texts)


class Way(NamedTuple):
    """One way to answer, on one device. window: of stop-and-wait, else 0."""

    name: str
    device: Device
    options: dict[str, Any]
    window: int = 0


def ways(
    device: Device, temperature: float, protocol: str, windows: Sequence[int] = WINDOWS
) -> list[Way]:
    """`stream`, the protocol that is measured, "auto", and stop-and-wait with each window."""
    waiting = DRAFTING[temperature]
    if temperature and protocol == "greedy":  # what stands in for `ahead` does not sample
        protocol = waiting
    return [
        Way(STREAM, device, {"protocol": STREAM}),
        Way("ahead", device, {"protocol": protocol}),
        Way("auto", device, {"protocol": Auto()}),
        *(Way(f"γ {w}", device, {"protocol": waiting, "window": w}, w) for w in windows),
    ]


@dataclass
class Answers:
    """What one way said, prompt by prompt; a prompt that it did not get has none."""

    way: Way
    answers: dict[int, Generation] = field(default_factory=dict)

    def rate(self, turn: int) -> float:
        """Tokens a second after the first round."""
        answer = self.answers[turn]
        tokens = sum(len(item.tokens) for item in answer.rounds[1:])
        return tokens / max(1e-9, answer.total_s - answer.first_token_s)

    @property
    def rounds(self) -> list[Round]:
        """All but each answer's first."""
        return [item for answer in self.answers.values() for item in answer.rounds[1:]]

    def a_token(self) -> dict[str, float]:
        """Passes, positions, drafts, edge time (ms) and bytes up, each over the tokens."""
        rounds = self.rounds
        tokens = max(1, sum(len(item.tokens) for item in rounds))
        flown = sum(1 + _flown(item) for item in rounds)
        return {
            "passes": len(rounds) / tokens,
            "positions": flown / tokens,
            "accepted": sum(item.accepted for item in rounds) / tokens,
            "drafts": sum(item.nodes for item in rounds) / tokens,
            "edge_ms": 1e3 * sum(item.pass_s for item in rounds) / tokens,
            "up_bytes": sum(item.uplink_bytes for item in rounds) / tokens,
        }

    def sources(self) -> dict[str, float]:
        """Accepted drafts a token, by whose they were; windows name no source."""
        rounds, result = self.rounds, dict[str, float]()
        tokens = max(1, sum(len(item.tokens) for item in rounds))
        for item in rounds:
            if item.accepted:
                name = item.source or "device"
                result[name] = result.get(name, 0.0) + item.accepted / tokens
        return result


def _flown(round_record: Round) -> int:
    """Drafts in the target's pass; `nodes` of `ahead` were made meanwhile."""
    return round_record.window if round_record.protocol == "ahead" else round_record.nodes


class Spread(NamedTuple):
    """A median and the quartiles around it."""

    mid: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        low, high = np.percentile(values, [25, 75])
        return cls(median(values), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.mid:.2f} ({self.low:.2f}–{self.high:.2f})"


class Cell:
    """All ways on all prompts, of one link and temperature."""

    def __init__(self, every: Sequence[Way]) -> None:
        self.all = {way.name: Answers(way) for way in every}

    def times(self, name: str, over: str = STREAM) -> Spread:
        """A way's rate over another's, paired by prompt."""
        ours, theirs = self.all[name], self.all[over]
        return Spread.of(
            [ours.rate(at) / theirs.rate(at) for at in ours.answers if at in theirs.answers]
        )

    def waiting(self) -> list[str]:
        """The ways of stop-and-wait that had the most prompts, the quickest first."""
        tried = [name for name, item in self.all.items() if item.way.window]
        most = max((len(self.all[name].answers) for name in tried), default=0)
        tried = [name for name in tried if len(self.all[name].answers) == most]
        return sorted(tried, key=lambda name: -self.times(name).mid)

    def chosen(self) -> str:
        """What "auto" chose, the most frequent first."""
        picked = [item.choice for item in self.all["auto"].answers.values() if item.choice]
        names = [
            f"{item.protocol} {item.window}" if item.window else item.protocol for item in picked
        ]
        return ", ".join(sorted(set(names), key=lambda name: -names.count(name)))

    def forecast(self) -> dict[str, float]:
        """Of the last answer of "auto": each protocol's best predicted speed over `stream`."""
        choices = [item.choice for item in self.all["auto"].answers.values() if item.choice]
        best: dict[str, float] = {}
        for item in choices[-1].forecasts if choices else ():
            best.setdefault(item.protocol, item.token_s)
        alone_s = best.get(STREAM)
        return {name: alone_s / token_s for name, token_s in best.items()} if alone_s else {}


def measured(
    every: Sequence[Way],
    questions: Sequence[Any],
    *,
    temperature: float,
    tokens: int,
    steps: Steps,
    label: str,
    before: Callable[[], None] = lambda: None,
) -> Cell:
    """A cell; before: is called ahead of each answer. The prompt's number is its answers' seed."""
    cell = Cell(every)
    devices = {id(way.device): way.device for way in every}
    for way in every:
        if way.name == "auto":  # it may try before it is measured
            for at in range(2):
                _answer(way, questions[at % len(questions)], temperature, 900 + at, tokens)
    for turn, prompt in enumerate(questions):
        steps.next(f"{label}, prompt {turn + 1}")
        for device in devices.values():
            for protocol in (STREAM, "greedy"):
                device.generate(prompt, protocol=protocol, max_tokens=1)
        selection = cell.waiting()[:KEPT] if turn >= SCOUTS else None
        now = [way for way in every if not way.window or selection is None or way.name in selection]
        first = turn % len(now)
        for way in (*now[first:], *now[:first]):
            before()
            answer = _answer(way, prompt, temperature, turn, tokens)
            cell.all[way.name].answers[turn] = answer
    return cell


def _answer(way: Way, prompt: Any, temperature: float, seed: int, tokens: int) -> Generation:
    options = {"temperature": temperature, "seed": seed, "max_tokens": tokens, **way.options}
    return way.device.generate(prompt, **options)


class Texts:
    """Compares every answer with that of `stream`; where they part, was it a tie?"""

    def __init__(self, target: Path) -> None:
        self._target = target

    @cached_property
    def _reference(self) -> Decoder:
        return Decoder(self._target)

    def compared(self, cell: Cell, questions: Sequence[Any], temperature: float) -> dict[str, int]:
        """How many answers are equal, how many parted at a tie, and how many differ."""
        results = {"equal": 0, "ties": 0, "differ": 0}
        alone = cell.all[STREAM]
        for item in cell.all.values():
            for turn, answer in item.answers.items():
                wanted = alone.answers[turn].tokens
                at = parted(answer.tokens, wanted)
                if at is None:
                    results["equal"] += item is not alone
                    continue
                prompt = alone.way.device.prompt(questions[turn]).ids
                seed = turn if temperature else None
                results[self._verdict(prompt, answer.tokens, wanted, at, seed)] += 1
        return results

    def _verdict(
        self, prompt: Any, got: Sequence[int], wanted: Sequence[int], at: int, seed: int | None
    ) -> str:
        if at >= min(len(got), len(wanted)):  # one ends where the other goes on
            return "differ"
        scores = scores_at(self._reference, np.array([*prompt, *wanted[:at]], np.int64), seed)
        return "ties" if abs(scores[wanted[at]] - scores[got[at]]) < TIE else "differ"


def options_of(texts: Mapping[str, int]) -> str:
    """As tables say it."""
    parts = [f"{texts['equal']} equal"]
    parts += [f"{texts[name]} {name}" for name in ("ties", "differ") if texts[name]]
    return ", ".join(parts)
