"""Choose how many drafts a pass of a drafter with a mask token makes.

In:  the acceptance of drafts by their place in a pass, the drafter's pass times, and the time that
     the drafts have. Out: numbers of drafts.

A pass reads u tokens that are not read yet, and k − 1 mask tokens. It takes d(u + k − 1) seconds
and makes k drafts. If all drafts before it are right, the draft at place i (from 0) of a pass is
right with probability αᵢ. α falls with the place, since the tokens between are unknown. So wide
passes make more drafts per second, and narrow ones better drafts: the best width depends on the
number of passes that fit into the time.

**A stream (`ahead`)**, in which every pass makes k drafts. S(c) = Π_{i<c} α_{i mod k} is the
probability that the c drafts after a correction are all right. The device learns of the correction,
finishes the pass under way (ρ of it is left), and drafts. Its first k drafts reach the edge
R + ρ·d(2k − 1) + d(k) seconds after the correction (R: the link's RTT), and k more every d(2k − 1)
seconds, since each pass also reads the drafts of the one before. The target's passes of t seconds
follow each other. A pass that begins after c tokens happens with probability S(c). If A drafts have
arrived by then, it takes the m = max(0, A − c) that are not too late, and commits m + 1 tokens. A
token costs

    t · Σ_passes S(c) / Σ_c S(c)

seconds. If R and t leave time for many passes of one draft, k = 1 costs least; if a pass of one
draft takes longer than t, only wide passes get ahead of the target at all. Where no k costs less
than t, passes make the most right drafts per second, in case a target's pass comes late.

**A window** of n drafts, in a round in which each end waits for the other. The first s drafts have
a pass each, and the others share the fewest passes. Early drafts matter most: all later drafts
depend on them. A round yields N = 1 + Σ_{c=1…n} S(c) tokens, where S follows the places of these
passes, and takes D + W seconds: D for the drafter's passes, W for everything else (the link, the
target's pass). The best s has the highest N / (D + W). The larger W, the less a pass matters.

All drafts of a target's pass are taken to cost nothing (see `draft_cost`).
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

# Share ρ of the drafter's pass that is left at a correction; costs are averaged.
_PHASES = (0.1, 0.5, 0.9)
_MOST_TAKEN = 15  # upper limit of the drafts of a target's pass
_LEAST = 1e-3  # a stream is computed until S(c) falls below this value
_MOST_TOKENS = 96  # upper limit of the computed tokens after a correction
_GAIN = 0.01  # least gain for which a pass makes more drafts than one
_DIGITS = 2  # significant digits of the inputs, so that few different ones are computed


def stream_drafts(
    means: Sequence[float], pass_times: Mapping[int, float], *, target_s: float, rtt_s: float
) -> int:
    """Return the number of drafts k that each pass makes in a stream.

    means: acceptance αᵢ by place in a pass, at least one; their number is the upper limit of k.
    pass_times: seconds d of a pass by number of tokens, ascending. target_s: seconds t of a
    target's pass. rtt_s: R; 0 for a drafter beside the target.
    """
    if len(means) == 1:
        return 1
    return _stream_drafts(*_rounded(means, pass_times), _round(target_s), _round(rtt_s))


def single_passes(
    means: Sequence[float], pass_times: Mapping[int, float], *, waiting_s: float, drafts: int
) -> int:
    """Return the number s of a window's first drafts that have a pass each.

    means, pass_times: as in `stream_drafts`. waiting_s: seconds W of a round without the drafter.
    drafts: number of drafts n of the window.
    """
    if len(means) == 1:
        return drafts
    return _single_passes(*_rounded(means, pass_times), _round(waiting_s), drafts)


def stream_token_s(
    means: Sequence[float],
    pass_times: Mapping[int, float],
    drafts: int,
    *,
    target_s: float,
    rtt_s: float,
) -> float:
    """Return the seconds of a token in a stream whose passes make this number of drafts."""
    first_s, later_s = _seconds(pass_times, [drafts, 2 * drafts - 1])
    places = np.resize(means[:drafts], _MOST_TOKENS)
    survival = [1.0, *np.cumprod(places).tolist()]
    cost = tokens = 0.0
    for phase in _PHASES:
        arrives_s, now_s = rtt_s + phase * later_s + first_s, 0.0
        arrived = committed = 0
        while committed < _MOST_TOKENS - _MOST_TAKEN and survival[committed] > _LEAST:
            if arrives_s <= now_s:
                count = 1 + int((now_s - arrives_s) / later_s)
                arrived += count * drafts
                arrives_s += count * later_s
            taken = max(0, min(arrived - committed, _MOST_TAKEN))
            cost += target_s * survival[committed]
            tokens += sum(survival[committed : committed + taken + 1])
            now_s += target_s
            committed += taken + 1
    return cost / tokens


def window_tokens_per_s(
    means: Sequence[float],
    pass_times: Mapping[int, float],
    passes: Sequence[int],
    *,
    waiting_s: float,
) -> float:
    """Return N / (D + W) of a window whose passes make these numbers of drafts."""
    places = [alpha for drafts in passes for alpha in means[:drafts]]
    widths = [before + drafts - 1 for before, drafts in zip((1, *passes), passes, strict=False)]
    tokens = 1.0 + float(np.cumprod(places).sum())
    return tokens / (sum(_seconds(pass_times, widths)) + waiting_s)


def window_passes(single: int, drafts: int, most: int) -> list[int]:
    """Return the number of drafts of each pass of a window.

    single: number of the first drafts that have a pass each. most: upper limit of a pass's drafts.
    """
    passes = [1] * min(single, drafts)
    while (left := drafts - sum(passes)) > 0:
        passes.append(min(left, most))
    return passes


@lru_cache(maxsize=256)
def _stream_drafts(
    means: tuple[float, ...], times: tuple[tuple[int, float], ...], target_s: float, rtt_s: float
) -> int:
    if target_s <= 0.0:  # unknown
        return 1
    costs = [
        stream_token_s(means, dict(times), drafts, target_s=target_s, rtt_s=rtt_s)
        for drafts in range(1, 1 + len(means))
    ]
    best = int(np.argmin(costs))
    if costs[best] > (1.0 - _GAIN) * target_s:  # forecast: no draft is in time
        right = np.cumsum(np.cumprod(means))
        widths = range(1, 1 + len(means))
        return 1 + int(np.argmax(right / np.array(_seconds(dict(times), widths))))
    return 1 + best if costs[best] < (1.0 - _GAIN) * costs[0] else 1


@lru_cache(maxsize=256)
def _single_passes(
    means: tuple[float, ...], times: tuple[tuple[int, float], ...], waiting_s: float, drafts: int
) -> int:
    speeds = [
        window_tokens_per_s(
            means, dict(times), window_passes(single, drafts, len(means)), waiting_s=waiting_s
        )
        for single in range(1 + drafts)
    ]
    return int(np.argmax(speeds))


def _rounded(
    means: Sequence[float], pass_times: Mapping[int, float]
) -> tuple[tuple[float, ...], tuple[tuple[int, float], ...]]:
    return tuple(round(mean, _DIGITS) for mean in means), tuple(pass_times.items())


def _round(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS - 1}e}")


def _seconds(pass_times: Mapping[int, float], widths: Sequence[int]) -> list[float]:
    """Interpolate the seconds of passes over these numbers of tokens."""
    seconds: list[float] = np.interp(widths, list(pass_times), list(pass_times.values())).tolist()
    return seconds
