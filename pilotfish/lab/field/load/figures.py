"""The figures of a load's points, and the number of devices that the edge carries.

In:  points. Out: percentiles over answers; the largest number of devices that holds the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from msgspec import Struct

from pilotfish.lab.field.load.results import Point

LEAST_ANSWERS = 20  # fewer answers give no percentile
TAIL = 90  # the percentile that decides


class Percentiles(Struct, frozen=True, kw_only=True):
    """The median and the 90th percentile over answers, in milliseconds."""

    p50: float
    p90: float


class PointFigures(Struct, frozen=True, kw_only=True):
    """The figures of a point.

    n: answers of the window without an error. failed, parted: answers. first_token_ms, token_ms:
    over answers; None for fewer than 20. tokens_per_s: of all devices. edge_ms: milliseconds of the
    target's passes per token, as the edge announced them to each device; None if it did not.
    edge_cpu_ms: CPU milliseconds of the edge per token; None for an edge on another machine.
    tokens_per_round: committed tokens.
    """

    way: str
    devices: int
    n: int
    failed: int
    parted: int
    first_token_ms: Percentiles | None
    token_ms: Percentiles | None
    tokens_per_s: float
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


class Carried(Struct, frozen=True, kw_only=True):
    """The number of devices that an edge carries in one way.

    devices: None: no point had enough answers. at_least: no measured number was too large, so the
    edge may carry more.
    """

    way: str
    devices: int | None
    at_least: bool

    def __str__(self) -> str:
        if self.devices is None:
            return "–"
        return f"≥ {self.devices}" if self.at_least else str(self.devices)


def figures(point: Point) -> PointFigures:
    """Compute a point's figures."""
    ended = [answer for answer in point.answers if not answer.error and answer.arrivals]
    tokens = sum(answer.tokens for answer in ended)
    rounds = sum(answer.rounds for answer in ended)
    verify_s = sum(answer.verify_s for answer in ended)
    per_token = [each for answer in ended if (each := answer.token_s) is not None]
    cpu_s = point.edge_cpu_s
    return PointFigures(
        way=point.way,
        devices=point.devices,
        n=len(ended),
        failed=sum(bool(answer.error) for answer in point.answers),
        parted=sum(answer.parted for answer in ended),
        first_token_ms=percentiles([answer.first_token_s for answer in ended]),
        token_ms=percentiles(per_token),
        tokens_per_s=point.tokens / point.took_s,
        edge_ms=1e3 * verify_s / tokens if verify_s and tokens else None,
        edge_cpu_ms=None if cpu_s is None or not point.tokens else 1e3 * cpu_s / point.tokens,
        tokens_per_round=tokens / rounds if rounds else None,
    )


def percentiles(seconds: Sequence[float]) -> Percentiles | None:
    """Compute both percentiles in milliseconds; None for fewer than 20 values.

    A percentile between two values is interpolated linearly between them.
    """
    if len(seconds) < LEAST_ANSWERS:
        return None
    p50, p90 = np.percentile(np.asarray(seconds) * 1e3, [50, TAIL])
    return Percentiles(p50=float(p50), p90=float(p90))


def next_count(counts: Sequence[int], held: Mapping[int, bool | None]) -> int | None:
    """Return the number of devices to measure next; None if the limit is found.

    counts: the numbers that are tried in ascending order. held: whether a measured number holds;
    None: unknown. After the first that does not, the gap below it is bisected.
    """
    over = _over(held)
    for count in sorted(counts):
        if count not in held and (over is None or count < over):
            return count
    if over is None:
        return None
    under = _largest(held, over)
    middle = (under + over) // 2
    return middle if middle > under and middle not in held else None


def _over(held: Mapping[int, bool | None]) -> int | None:
    """Return the smallest number that does not hold; None if there is none."""
    return min((count for count, holds in held.items() if holds is False), default=None)


def _largest(held: Mapping[int, bool | None], over: int) -> int:
    return max((count for count, holds in held.items() if holds and count < over), default=0)


def carried(way: str, measured: Iterable[PointFigures], limit_s: float) -> Carried:
    """Return how many devices the edge carries: the largest number below the first too large one.

    Only measured numbers count; nothing is interpolated.
    """
    held = {each.devices: each.holds(limit_s) for each in measured if each.way == way}
    if all(holds is None for holds in held.values()):
        return Carried(way=way, devices=None, at_least=False)
    over = _over(held)
    most = _largest(held, max(held, default=0) + 1 if over is None else over)
    return Carried(way=way, devices=most, at_least=over is None and most > 0)
