"""Real rounds of the pair, summed over each answer, for figures of times and bytes.

An answer's first round reads the prompt, and its last one may be cut short, so the sums have the
rounds between them. A ratio of sums is estimated over all prompts; its interval is a bootstrap over
prompts, since the rounds of an answer depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.record import Round
from pilotfish.emulation.emulator import Emulator
from pilotfish.lab.field.papers.figure import Bench, Report
from pilotfish.lab.field.resampling import Floats, resample_weights
from pilotfish.lab.pairs import serving
from pilotfish.wire.protocols import STREAM


class RoundSums(NamedTuple):
    """Sums over rounds: floats for one answer; f64 [resamples] for each resample of the answers.

    tokens: committed tokens. verified, accepted: positions (tslt, definition 2.1). draft_s: seconds
    of the drafter. edge_s: seconds of the target's passes and of the rule. other_s: seconds of
    encoding, queueing and settling. link_s: seconds on the link, both ways. up_bytes, down_bytes:
    bytes as handed to ZeroMQ.
    """

    rounds: Any
    tokens: Any
    verified: Any
    accepted: Any
    draft_s: Any
    edge_s: Any
    other_s: Any
    link_s: Any
    up_bytes: Any
    down_bytes: Any

    @property
    def alpha(self) -> Any:
        """The accepted share of the verified positions."""
        return self.accepted / self.verified

    @property
    def compute_s(self) -> Any:
        """Seconds without the link."""
        return self.draft_s + self.edge_s + self.other_s


def sum_rounds(rounds: Sequence[Round]) -> RoundSums:
    """Sum an answer's rounds, without the first and the last one.

    Under `stream`, where a round is a token and the device does not wait for the link, the times
    are those of the target's passes alone.
    """
    steady = rounds[1:-1]
    streamed = bool(steady) and steady[0].protocol == STREAM
    timings = [round_.timings for round_ in steady]
    edge_s = [round_.pass_s for round_ in steady] if streamed else [t.verify for t in timings]
    waited = [] if streamed else timings
    return RoundSums(
        rounds=float(len(steady)),
        tokens=float(sum(len(round_.tokens) for round_ in steady)),
        verified=float(sum(round_.verified for round_ in steady)),
        accepted=float(sum(round_.accepted for round_ in steady)),
        draft_s=sum(t.draft for t in waited),
        edge_s=sum(edge_s),
        other_s=sum(t.encode + t.queue + t.settle for t in waited),
        link_s=sum(t.uplink + t.downlink for t in waited),
        up_bytes=float(sum(round_.uplink_bytes for round_ in steady)),
        down_bytes=float(sum(round_.downlink_bytes for round_ in steady)),
    )


def resampled(answers: Iterable[RoundSums]) -> RoundSums:
    """Sum over all answers (first value) and over each resample of them (the other values)."""
    table: Floats = np.array(list(answers), dtype=np.float64)
    return RoundSums(*(resample_weights(len(table)) @ table).T)


def point(values: Floats) -> float:
    """Return a statistic without its interval."""
    return float(values[0])


@contextmanager
def connected(bench: Bench) -> Iterator[tuple[Device, Emulator]]:
    """Serve the target, and connect the drafter to it over an emulated link, which is ideal yet."""
    draft, target = bench.pair.paths
    with (
        serving(target, threads=bench.threads) as endpoint,
        Emulator(endpoint) as link,
        Device(draft, link.endpoint, threads=bench.threads) as device,
    ):
        yield device, link


class AnswerProgress:
    """Reports how many of a measurement's answers are finished. total: number of all answers."""

    def __init__(self, report: Report, label: str, total: int) -> None:
        self._report, self._label, self._total, self._done = report, label, total, 0
        report(label, 0, total)

    def add(self) -> None:
        """Count one more answer."""
        self._done += 1
        self._report(self._label, self._done, self._total)


def take_turns(
    device: Device,
    prompts: Sequence[str],
    cases: Mapping[str, Mapping[str, Any]],
    *,
    tokens: int,
    seed: int,
    progress: AnswerProgress,
) -> dict[str, list[RoundSums]]:
    """Answer each prompt in every case, and sum the rounds; return the answers' sums by case.

    Each prompt begins with another case, so that other work on the machine affects all cases
    alike. cases: options of each case.
    """
    names = list(cases)
    sums: dict[str, list[RoundSums]] = {name: [] for name in names}
    for number, prompt in enumerate(prompts):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            options = {"temperature": 1.0, **cases[name], "max_tokens": tokens}
            answer = device.generate(prompt, **options, seed=seed + number)
            sums[name].append(sum_rounds(answer.rounds))
            progress.add()
    return sums
