"""Compare drafters for one target, and recommend one for each RTT.

In:  each drafter's agreement by prompt and its seconds per draft; the seconds of the target's
     passes. Out: each drafter's measured values (`field.drafter_figures`); a recommendation for
         each RTT.

Intervals come from a percentile bootstrap over prompts (Efron 1979): the tokens of one answer
depend on each other, but answers to different prompts do not. A resample uses the same prompts for
all drafters, so that differences between drafters are paired. With fewer than 3 prompts there are
no intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from pilotfish.device_runtime.choice.pass_pace import PassTimes
from pilotfish.lab.field.drafter_figures import (
    SPEEDS,
    DrafterCounts,
    DrafterEntry,
    DrafterFigures,
    Rates,
)
from pilotfish.lab.field.resampling import estimate, resample_weights
from pilotfish.lab.field.target_answers import TargetAnswer
from pilotfish.speculation.speeds import ALIKE, GAIN, pick_drafter
from pilotfish.wire.messages import Welcome
from pilotfish.wire.protocols import STREAM

WINDOWS = 16  # maximum window (tokens) that the comparison considers
Progress = Callable[[str, int, "int | None"], None]


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The recommended drafter at an RTT.

    drafter: name of the drafter; None recommends `stream`, without a drafter. window: tokens; 0
    under `ahead` and `stream`. gain: ratio to the tokens/s of `stream`. alike: names of drafters
    for which the data show no difference from the recommended drafter.
    """

    rtt_s: float
    drafter: str | None
    protocol: str
    window: int
    tokens_per_s: float
    gain: float
    alike: list[str]


@dataclass(frozen=True, kw_only=True)
class DrafterComparison:
    """All results of a comparison.

    pass_s: seconds of a target's pass over 0, 1, … drafts. streamed_per_s: tokens/s of `stream`.
    ship: recommendation for each RTT. Every tokens/s is that of answers after their first round
    (`field.token_speed`), for a lone session. warning: what the comparison cannot know, because
    drafter and target ran on one machine; "" if they did not.
    """

    prompts: int
    pass_s: list[float]
    streamed_per_s: float
    drafters: list[DrafterFigures]
    ship: list[Recommendation]
    warning: str = ""


def target_passes(
    welcome: Welcome, answers: Sequence[TargetAnswer], pass_ms: float | None = None
) -> list[float]:
    """Compute the seconds of the target's passes over 0 to `WINDOWS` drafts.

    The edge announces pass times. They are scaled so that a pass over one token takes the median
    that was observed while the target answered. If the edge announced no times, every pass takes
    this median. If ``pass_ms`` is not None, every pass takes that many milliseconds.
    """
    if pass_ms is not None:
        return [pass_ms * 1e-3] * (WINDOWS + 1)
    observed_s = [answer.pass_s for answer in answers if answer.pass_s > 0.0]
    pass_s_by_tokens = {
        timed.tokens: timed.ns * 1e-9
        for timed in sorted(welcome.passes, key=lambda timed: timed.tokens)
    }
    if not pass_s_by_tokens:
        pass_s_by_tokens = {1: median(observed_s) if observed_s else 0.05}
        return [pass_s_by_tokens[1]] * (WINDOWS + 1)
    pass_times = PassTimes(pass_s_by_tokens)
    factor = median(observed_s) / pass_times[1] if observed_s else 1.0
    return [factor * pass_times[1 + drafts] for drafts in range(WINDOWS + 1)]


def compare(
    entries: Sequence[DrafterEntry],
    *,
    prompts: int,
    target_s: Sequence[float],
    rtts_s: Sequence[float],
    longest: int = WINDOWS,
    in_rounds: str = "greedy",
    progress: Progress = lambda label, done, total: None,
) -> DrafterComparison:
    """Compare drafters over ``prompts`` prompts, which have the numbers 0 to ``prompts`` − 1.

    target_s: seconds of the target's passes over 0, 1, … drafts. rtts_s: RTTs, s. longest: longest
    window, tokens. in_rounds: name of the protocol, other than `ahead`, that is compared.
    """
    weights = resample_weights(prompts)
    ordered = sorted(entries, key=lambda entry: entry.size_bytes)
    drafter_counts = [
        DrafterCounts(entry, prompts, min(longest, len(target_s) - 1), in_rounds)
        for entry in ordered
    ]
    rates: list[dict[str, Rates]] = []  # one dictionary for each RTT: rates by drafter's name
    for rtt_s in rtts_s:
        progress("computing speeds", len(rates), len(rtts_s))
        rates.append(
            {
                counts.entry.name: counts.rates(weights[: 1 + SPEEDS], rtt_s, target_s)
                for counts in drafter_counts
            }
        )
    return DrafterComparison(
        prompts=prompts,
        pass_s=list(target_s),
        streamed_per_s=1.0 / target_s[0],
        drafters=[
            counts.figures(
                weights, [rates_at_rtt[counts.entry.name] for rates_at_rtt in rates], target_s
            )
            for counts in drafter_counts
        ],
        ship=[_recommend(rates_at_rtt, target_s) for rates_at_rtt in rates],
    )


def _recommend(rates: Mapping[str, Rates], target_s: Sequence[float]) -> Recommendation:
    """Recommend a drafter for an RTT, or none if no drafter gains enough.

    rates: rates by drafter's name, in ascending order of the drafters' sizes.
    """
    tokens_per_s = {name: float(rate.best[0]) for name, rate in rates.items()}
    worth = {name: rate for name, rate in tokens_per_s.items() if rate * target_s[0] >= GAIN}
    if not worth:
        return Recommendation(
            rtt_s=next(iter(rates.values())).rtt_s,
            drafter=None,
            protocol=STREAM,
            window=0,
            tokens_per_s=1.0 / target_s[0],
            gain=1.0,
            alike=[],
        )
    name = pick_drafter(worth)
    best = rates[name]
    return Recommendation(
        rtt_s=best.rtt_s,
        drafter=name,
        protocol=best.protocol,
        window=best.window,
        tokens_per_s=worth[name],
        gain=worth[name] * target_s[0],
        alike=[
            other
            for other, rate in rates.items()
            if other != name and _indistinguishable(rate, best)
        ],
    )


def _indistinguishable(rates: Rates, best: Rates) -> bool:
    """Return whether the data show no difference between a drafter and the best one.

    This holds if the ratio of their rates is at least `ALIKE`, or if its interval reaches 1.
    """
    ratio = estimate(rates.best / best.best)
    assert ratio.value is not None
    if ratio.value >= ALIKE:
        return True
    return ratio.high is not None and ratio.high >= 1.0
