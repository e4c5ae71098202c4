"""Model the bytes and seconds that a sweep's rounds cost over a link (WISV, equations 5–10, 18).

In:  counts of real rounds, pass times of drafter and target, a link. Out: modelled bytes and
     seconds, by `speculation.latency`.

A round of γ drafts takes γ·T_draft + T_verify(γ + 1) + T_comm. T_comm includes the transfer of all
headers and frames that are handed to ZeroMQ. `wisv-full` also needs the drafter's state at the last
draft, which costs one more drafter's pass. `wisv-selective` makes this pass while the edge
verifies, so it costs no time. The model omits the prompt's passes and the head; the head costs
about a hundredth of a pass.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pilotfish.engines.engine import open_engine
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.engines.pass_times import pass_times
from pilotfish.lab.judge.sweep_file import QuestionCounts
from pilotfish.lab.pairs import OpenPair
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.latency import Link, communication_s
from pilotfish.wire.codecs.hidden import hidden_bytes
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, WisvFull
from pilotfish.wire.protocols.adaptive import Adaptive
from pilotfish.wire.protocols.protocol import (
    STATES_REQUEST_BYTES,
    WINDOW_BYTES,
    PairSizes,
    SpeculationProtocol,
)

GREEDY, DSD, FULL, SELECTIVE = PROTOCOLS = ("greedy", "dsd", "wisv-full", "wisv-selective")
RELAXED = Adaptive.name
JUDGED = (FULL, SELECTIVE)

_SWEEPS = 3


@dataclass(frozen=True)
class ModelPace:
    """The pass times of a pair.

    draft_s: drafter's pass over one token, s. verify_s: target's pass, s, by number of tokens.
    """

    draft_s: float
    verify_s: dict[int, float]

    def verify_pass_s(self, width: int) -> float:
        """Compute the time (s) of the target's pass over ``width`` tokens, by interpolation."""
        widths = sorted(self.verify_s)
        return float(
            np.interp(width, widths, [self.verify_s[measured_width] for measured_width in widths])
        )


def measure_pace(
    opened: OpenPair,
    windows: Iterable[int],
    engine: EngineSettings,
    clock: Callable[[], float] = time.perf_counter,
) -> ModelPace:
    """Measure the pass times of both models on this machine, with an empty context.

    windows: numbers of draft tokens for which `ModelPace.verify_pass_s` must be accurate. clock:
    see `pass_times`.
    """
    widths = sorted({1, *(width for window in windows for width in (window // 2 + 1, window + 1))})
    draft, target = opened.paths
    drafted = _pass_times(draft, [1], engine, clock, drafts=True)[1]
    return ModelPace(drafted, _pass_times(target, widths, engine, clock))


def _pass_times(
    path: Path,
    widths: Sequence[int],
    settings: EngineSettings,
    clock: Callable[[], float],
    *,
    drafts: bool = False,
) -> dict[int, float]:
    engine = open_engine(
        path,
        context=max(widths),
        threads=settings.threads,
        provider=settings.provider,
        drafts=drafts,
    )
    sweeps = [pass_times(engine, widths, clock) for _ in range(_SWEEPS)]
    return {width: min(times[width] for times in sweeps) for width in widths}


class Cost(NamedTuple):
    """The total cost of several answers. up, down: bytes. exchanges: number of round trips."""

    seconds: float
    up: float
    down: float
    exchanges: float


def mismatch_share(questions: Iterable[QuestionCounts]) -> float:
    """Compute the share of mismatches among the drafted tokens after a rejection.

    Only windows that were read to their ends show these mismatches. Without any, the result is the
    share of mismatches among the tokens before and at the rejections.
    """
    read_positions = missed = decided = verified = 0
    for counts in questions:
        read_positions += counts.checked_after_rejection
        missed += counts.mismatched_after_rejection
        decided += counts.decided
        verified += counts.accepted + counts.decided - counts.forgiven
    return missed / read_positions if read_positions else decided / max(verified, 1)


def cost(
    questions: Sequence[QuestionCounts],
    protocol: str,
    link: Link,
    pace: ModelPace,
    sizes: PairSizes,
    *,
    form: str,
    mismatch_share: float,
) -> Cost:
    """Compute the total cost of these questions' answers.

    form: format of hidden states. mismatch_share: share of mismatches among the drafted tokens
    after a rejection; it determines how many states `wisv-selective` requests.
    """
    # `wisv-selective` begins each round with the same exchange as `greedy`.
    exchange: SpeculationProtocol[Any] = PROTOCOL_REGISTRY[DSD if protocol == DSD else GREEDY]
    if protocol == FULL:
        exchange = WisvFull(WisvFull.Options.from_mapping({"hidden": form}))
    seconds = up = down = exchanges = 0.0
    for drafted, count in _windows(questions).items():
        sent = exchange.estimate_bytes((1,) * drafted, Sampling(), 0.0, sizes)
        passes = drafted + (exchange.reads_last_token and drafted > 0)
        computing_s = passes * pace.draft_s + pace.verify_pass_s(drafted + 1)
        seconds += count * (computing_s + communication_s(sent.up, sent.down, link))
        up, down, exchanges = up + count * sent.up, down + count * sent.down, exchanges + count
    if protocol == SELECTIVE:
        requests = sum(counts.state_requests for counts in questions)
        states = sum(
            counts.decided + mismatch_share * counts.after_rejection for counts in questions
        )
        again_up = requests * WINDOW_BYTES + states * hidden_bytes(sizes.hidden, form)
        again_down = requests * STATES_REQUEST_BYTES + states
        seconds += communication_s(again_up, again_down, link, requests)
        up, down, exchanges = up + again_up, down + again_down, exchanges + requests
    return Cost(seconds, up, down, exchanges)


def relaxed_cost(questions: Sequence[QuestionCounts], link: Link, pace: ModelPace) -> Cost:
    """Compute the total cost of these answers of `adaptive`, from their messages' bytes."""
    counted = [(counts.rounds, counts.relaxed) for counts in questions if counts.relaxed]
    up, down = (sum(getattr(relaxed, name) for _, relaxed in counted) for name in ("up", "down"))
    rounds = sum(count for count, _ in counted)
    computing_s = sum(
        count * (drafted * pace.draft_s + pace.verify_pass_s(drafted + 1))
        for drafted, count in _windows(questions).items()
    )
    return Cost(computing_s + communication_s(up, down, link, rounds), up, down, rounds)


def _windows(questions: Iterable[QuestionCounts]) -> Mapping[int, int]:
    counts = Counter[int]()
    for question_counts in questions:
        counts.update(question_counts.drafted)
    return counts
