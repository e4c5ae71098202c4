"""Generations that take turns: real rounds of several protocols, over one edge process.

Cases take turns prompt by prompt, and begin with another one at each prompt, so that what else the
machine does falls on all alike. Times leave out a generation's first round, in which the edge reads
the prompt.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from _common import PROMPTS, Steps, throwaway_keys

from pilotfish import Device, EdgeServer, Generation
from pilotfish.base.cpus import pinned, split_cpus
from pilotfish.device_runtime.record import Round, acceptance
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.wire.request import Options


@dataclass
class Case:
    """One way to generate, and what was generated so."""

    name: str
    options: Options
    generations: list[Generation] = field(default_factory=list)

    def run(self, device: Device, prompt: str, seed: int, tokens: int) -> None:
        """One more generation; the options' own temperature goes before 1."""
        options: Options = {"temperature": 1.0, **self.options, "seed": seed, "max_tokens": tokens}
        self.generations.append(device.generate(prompt, **options))

    @property
    def rounds(self) -> list[Round]:
        """All rounds but each generation's last, which may have been cut short."""
        return [round_ for g in self.generations for round_ in g.rounds[:-1]]

    @property
    def steady(self) -> list[Round]:
        """Those of `rounds` that are no generation's first."""
        return [round_ for g in self.generations for round_ in g.rounds[1:-1]]

    @property
    def acceptance(self) -> float:
        """α over all generations, each position weighing the same (tslt Definition 2.1)."""
        return acceptance(self.rounds)

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first round over the time that they took."""
        tokens = sum(len(r.tokens) for g in self.generations for r in g.rounds[1:])
        return tokens / sum(g.total_s - g.first_token_s for g in self.generations)

    def mean(self, name: str) -> float:
        """The mean of a number that every round has."""
        return float(np.mean([getattr(r, name) for r in self.rounds]))

    def stage_ms(self, stage: str) -> float:
        """The median of a stage, in milliseconds."""
        return float(np.median([getattr(r.timings, stage) for r in self.steady])) * 1e3


def take_turns(
    cases: Sequence[tuple[Case, Device]], *, prompts: int, tokens: int, steps: Steps
) -> None:
    """Run all cases on so many prompts, each on its device; each prompt is one of the steps."""
    for device in {id(device): device for _, device in cases}.values():
        device.generate(
            PROMPTS[0], protocol="greedy", max_tokens=8
        )  # the first passes of fresh engines are slow ones
    for seed in range(prompts):
        steps.next("one prompt, all cases")
        first = seed % len(cases)
        for case, device in (*cases[first:], *cases[:first]):
            case.run(device, PROMPTS[seed % len(PROMPTS)], seed, tokens)


@contextmanager
def connected(drafter: Path, target: Path) -> Iterator[Device]:
    """A device with an edge process of its own; between them the encrypted loopback."""
    with connected_all([drafter], target) as [device]:
        yield device


@contextmanager
def connected_all(
    drafters: Sequence[Path], target: Path, *, rtt_s: float = 0.0, apart: bool = False
) -> Iterator[list[Device]]:
    """A device for each drafter, and one edge process.

    rtt_s: of the emulated link between them; 0: plain loopback. apart: the edge has one half of the
    cores, the devices have the other.
    """
    theirs, ours = split_cpus() if apart else (None, None)
    with ExitStack() as stack:
        folder = stack.enter_context(throwaway_keys())
        edge = stack.enter_context(EdgeServer(target, keys=folder, cores=theirs))
        endpoint = edge.endpoint
        if rtt_s > 0.0:
            link = stack.enter_context(Emulator(endpoint, Conditions(rtt_s=rtt_s)))
            endpoint = link.endpoint
        if ours is not None:
            stack.enter_context(pinned(ours))
        yield [stack.enter_context(Device(path, endpoint, folder)) for path in drafters]
