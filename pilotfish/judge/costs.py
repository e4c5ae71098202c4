"""What walked rounds would take over a link: `speculation.latency`'s model (wisv (5)–(10), (18)).

In:  tallies, how fast drafter and target are, a link. Out: bytes and seconds; modelled, where
     tokens and rounds are the real models'.

A round takes T = γ·T_draft + T_verify(γ+1) + T_comm, with the bytes of headers and frames as they
are handed to ZeroMQ. `wisv-full` needs the drafter's state at the last draft too, which costs a
pass; `wisv-selective` makes that one while the window is with the edge. Neither the reading of the
prompt is in it nor the head, which costs a hundredth of a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.engines.language_model import open_model
from pilotfish.engines.pass_times import pass_times
from pilotfish.judge.sweep_file import QuestionTally
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.latency import Link, communication_s
from pilotfish.wire.codecs.hidden import hidden_bytes
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, WisvFull
from pilotfish.wire.protocols.protocol import (
    STATES_REQUEST_BYTES,
    WINDOW_BYTES,
    PairSizes,
    SpeculationProtocol,
)

GREEDY, DSD, FULL, SELECTIVE = PROTOCOLS = ("greedy", "dsd", "wisv-full", "wisv-selective")
JUDGED = (FULL, SELECTIVE)

_SWEEPS = 3


@dataclass(frozen=True)
class ModelPace:
    """Seconds of a drafter's pass over one token, and of a target's by the tokens in it."""

    draft_s: float
    verify_s: dict[int, float]

    def verified_s(self, width: int) -> float:
        """Interpolate a pass over so many tokens between the widths that were measured."""
        widths = sorted(self.verify_s)
        return float(
            np.interp(width, widths, [self.verify_s[measured_width] for measured_width in widths])
        )


def measure_pace(
    draft: Path, target: Path, windows: Iterable[int], engine: EngineSettings
) -> ModelPace:
    """Measure how fast the two are on this machine, with an empty context."""
    widths = sorted({1, *(width for window in windows for width in (window // 2 + 1, window + 1))})
    drafted = _pass_times(draft, [1], engine, drafts=True)[1]
    return ModelPace(drafted, _pass_times(target, widths, engine))


def _pass_times(
    path: Path, widths: Sequence[int], engine: EngineSettings, *, drafts: bool = False
) -> dict[int, float]:
    decoder = open_model(
        path,
        context=max(widths),
        threads=engine.threads,
        provider=engine.provider,
        drafts=drafts,
    )
    sweeps = [pass_times(decoder, widths) for _ in range(_SWEEPS)]
    return {width: min(times[width] for times in sweeps) for width in widths}


class Cost(NamedTuple):
    """Of some answers together: seconds, bytes up and down, round trips."""

    seconds: float
    up: float
    down: float
    exchanges: float


def missed_share(tallies: Iterable[QuestionTally]) -> float:
    """Compute the share of drafted tokens behind a rejection that mismatch too.

    As far as windows were read to their ends; where none was, as often as before the rejections.
    """
    read_positions = missed = decided = verified = 0
    for counts in tallies:
        read_positions += counts.looked
        missed += counts.missed
        decided += counts.decided
        verified += counts.accepted + counts.decided - counts.forgiven
    return missed / read_positions if read_positions else decided / max(verified, 1)


def cost(
    tallies: Sequence[QuestionTally],
    protocol: str,
    link: Link,
    pace: ModelPace,
    sizes: PairSizes,
    *,
    form: str,
    missed: float,
) -> Cost:
    """Compute what these answers take in all.

    form: of hidden states. missed: `missed_share`, which tells how many states are asked for.
    """
    # the first exchange of `wisv-selective` is that of `greedy`
    exchange: SpeculationProtocol[Any] = PROTOCOL_REGISTRY[DSD if protocol == DSD else GREEDY]
    if protocol == FULL:
        exchange = WisvFull(WisvFull.Options.from_mapping({"hidden": form}))
    seconds = up = down = exchanges = 0.0
    for drafted, count in _windows(tallies).items():
        sent = exchange.estimate_bytes((1,) * drafted, Sampling(), 0.0, sizes)
        passes = drafted + (exchange.reads_last_token and drafted > 0)
        computing_s = passes * pace.draft_s + pace.verified_s(drafted + 1)
        seconds += count * (computing_s + communication_s(sent.up, sent.down, link))
        up, down, exchanges = up + count * sent.up, down + count * sent.down, exchanges + count
    if protocol == SELECTIVE:
        requests = sum(counts.asked for counts in tallies)
        states = sum(counts.decided + missed * counts.behind for counts in tallies)
        again_up = requests * WINDOW_BYTES + states * hidden_bytes(sizes.hidden, form)
        again_down = requests * STATES_REQUEST_BYTES + states
        seconds += communication_s(again_up, again_down, link, requests)
        up, down, exchanges = up + again_up, down + again_down, exchanges + requests
    return Cost(seconds, up, down, exchanges)


def _windows(tallies: Iterable[QuestionTally]) -> Mapping[int, int]:
    counts = Counter[int]()
    for question_counts in tallies:
        counts.update(question_counts.drafted)
    return counts
