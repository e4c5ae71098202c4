"""The figures of a load's points, and the number of devices that the edge carries.

In:  points. Out: percentiles over answers; the largest number of devices that holds the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from pilotfish.lab.field.load.results import Point
from pilotfish.lab.statistics import FEWEST_VALUES

TAIL = 90  # the percentile that decides


class Percentiles(Struct, frozen=True, kw_only=True):
    """The median and the 90th percentile over answers, in milliseconds."""

    p50: float
    p90: float


class PointFigures(Struct, frozen=True, kw_only=True):
    """The figures of a point.

    n: answers of the measured time that ended well. failed: those that ended with an error or
    without a token. different: those that are not the recorded ones. first_token_ms, token_ms: over
    answers; None for fewer than `FEWEST_VALUES`. tokens_per_s: of all devices; None for a point
    that ended early. edge_ms: milliseconds of the target's passes per token, as the edge announced
    them to each device; None if it did not. edge_cpu_ms: CPU milliseconds of the edge per token;
    None for an edge on another machine, and a point that ended early. tokens_per_round: committed
    tokens.
    """

    method: str
    devices: int
    n: int
    failed: int
    different: int
    first_token_ms: Percentiles | None
    token_ms: Percentiles | None
    tokens_per_s: float | None
    edge_ms: float | None
    edge_cpu_ms: float | None
    tokens_per_round: float | None

    def holds(self, limit_s: float) -> bool | None:
        """Whether no answer failed, and nine of ten took at most this time a token.

        None: there are too few answers to tell.
        """
        if self.failed:
            return False
        return None if self.token_ms is None else self.token_ms.p90 <= limit_s * 1e3


class Capacity(Struct, frozen=True, kw_only=True):
    """The number of devices that an edge carries by one method.

    devices: None: unknown. at_least: the edge may carry more, because no measured number was too
    large, or because a number between this one and the first too large one had too few answers.
    """

    method: str
    devices: int | None
    at_least: bool

    def __str__(self) -> str:
        if self.devices is None:
            return "–"
        return f"≥ {self.devices}" if self.at_least else str(self.devices)


def figures(point: Point, for_s: float) -> PointFigures:
    """Compute a point's figures. for_s: how long it lasts at least, if it does not end early."""
    ended = [answer for answer in point.answers if not answer.error and answer.arrivals]
    tokens = sum(answer.tokens for answer in ended)
    rounds = sum(answer.rounds for answer in ended)
    verify_s = sum(answer.verify_s for answer in ended)
    per_token = [each for answer in ended if (each := answer.token_s) is not None]
    cpu_s = point.edge_cpu_s
    is_whole = point.took_s >= for_s  # the rates of a moment say nothing
    return PointFigures(
        method=point.method,
        devices=point.devices,
        n=len(ended),
        failed=len(point.answers) - len(ended),
        different=sum(answer.differs for answer in ended),
        first_token_ms=percentiles([answer.first_token_s for answer in ended]),
        token_ms=percentiles(per_token),
        tokens_per_s=point.tokens / point.took_s if is_whole else None,
        edge_ms=1e3 * verify_s / tokens if verify_s and tokens else None,
        edge_cpu_ms=(
            1e3 * cpu_s / point.tokens if is_whole and cpu_s is not None and point.tokens else None
        ),
        tokens_per_round=tokens / rounds if rounds else None,
    )


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """Compute both percentiles in milliseconds; None for fewer than `FEWEST_VALUES`.

    A percentile between two values is interpolated linearly between them.
    """
    if len(seconds) < FEWEST_VALUES:
        return None
    p50, p90 = np.percentile(np.asarray(seconds) * 1e3, [50, TAIL])
    return Percentiles(p50=float(p50), p90=float(p90))


def next_count(counts: Sequence[int], known: Mapping[int, bool | None]) -> int | None:
    """Return the number of devices to measure next; None if the limit is found.

    counts: the numbers that are tried in ascending order. known: whether a measured number holds;
    None: unknown. After the first that does not, the gap below it is bisected.
    """
    over = _smallest_too_large(known)
    for count in sorted(counts):
        if count not in known and (over is None or count < over):
            return count
    if over is None:
        return None
    under = _largest_held(known, over)
    middle = (under + over) // 2
    return middle if middle > under and middle not in known else None


def _smallest_too_large(known: Mapping[int, bool | None]) -> int | None:
    """Return the smallest number that does not hold; None if there is none."""
    return min((count for count, holds in known.items() if holds is False), default=None)


def _largest_held(known: Mapping[int, bool | None], over: int) -> int:
    return max((count for count, holds in known.items() if holds and count < over), default=0)


def capacity(method: str, measured: Iterable[PointFigures], limit_s: float) -> Capacity:
    """Return how many devices the edge carries: the largest number below the first too large one.

    Only measured numbers count; nothing is interpolated.
    """
    known = {each.devices: each.holds(limit_s) for each in measured if each.method == method}
    over = _smallest_too_large(known)
    most = _largest_held(known, max(known, default=0) + 1 if over is None else over)
    at_least = over is None or any(
        holds is None and most < count < over for count, holds in known.items()
    )
    if at_least and most == 0:
        return Capacity(method=method, devices=None, at_least=False)
    return Capacity(method=method, devices=most, at_least=at_least)
