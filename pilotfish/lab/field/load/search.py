"""The search for the number of devices that an edge carries, by each method.

In:  the devices, the methods and the limit. Out: the points, which are in a file after each.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec import structs

from pilotfish.base.version import SOFTWARE
from pilotfish.lab import host
from pilotfish.lab.field.load.edge_cpu import cpu_s, edge_process
from pilotfish.lab.field.load.figures import PointFigures, figures, next_count
from pilotfish.lab.field.load.fleet import Fleet, Period, split_devices
from pilotfish.lab.field.load.methods import Method
from pilotfish.lab.field.load.results import Load, Point, Results, expect_same, point_of
from pilotfish.lab.field.load.worker import Devices

Progress = Callable[[str, float], None]  # gets a point's name and its measured seconds so far


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched, and how.

    counts: numbers of devices to try. limit_s: most seconds per token. processes: of devices. edge:
    the edge's own address, for its CPU time; "" without one. devices: without their numbers and
    options; their ``edge`` may be an emulated link's.
    """

    methods: Sequence[Method]
    counts: Sequence[int]
    limit_s: float
    period: Period
    processes: int
    edge: str
    devices: Devices

    def measure(
        self, results: Results, path: Path, progress: Progress, warn: Callable[[str], None]
    ) -> Results:
        """Measure the points that the results lack; write them to a file after each.

        warn: gets a sentence about answers that failed in a warm-up. Raises the errors of `Fleet`.
        """
        for method in self.methods:
            known = {
                point.devices: self._holds(point)
                for point in results.points
                if point.method == method.name
            }
            while (count := next_count(self.counts, known)) is not None:
                point = self._point(method, count, progress, warn)
                results = structs.replace(results, points=[*results.points, point])
                results.write(path)
                known[count] = self._holds(point)
        return results

    def _holds(self, point: Point) -> bool | None:
        return figures(point, self.period.for_s).holds(self.limit_s)

    def _point(
        self, method: Method, count: int, progress: Progress, warn: Callable[[str], None]
    ) -> Point:
        devices = structs.replace(self.devices, options=method.options)
        name = f"{method.name}, devices {count}"
        progress(name, 0.0)
        process = edge_process(self.edge) if self.edge else None

        def edge_cpu_s() -> float | None:
            # the edge may have restarted, as another process
            is_same = process is not None and edge_process(self.edge) == process
            return cpu_s(process) if is_same else None

        with Fleet(split_devices(devices, count, self.processes)) as fleet:
            began_unix_s = time.time()
            measured = fleet.measure(self.period, partial(progress, name), edge_cpu_s)
        if measured.warm_up_errors:
            warn(
                f"{name}: {measured.warm_up_errors} answers failed in the warm-up; the first: "
                f"{measured.first_error}"
            )
        return point_of(method.name, count, began_unix_s, measured)


def open_results(path: Path, load: Load) -> Results:
    """Return the results so far; raises `RunFileError` if they are of another load."""
    points: list[Point] = []
    if path.exists():
        old = Results.read(path)
        expect_same(path, old.load, load)
        points = old.points
    return Results(software=SOFTWARE, host=host.facts(), load=load, points=points)


def figures_of(results: Results, methods: Sequence[Method]) -> list[PointFigures]:
    """Return the figures of these methods' points, ordered by method and number of devices."""
    names = [method.name for method in methods]
    return sorted(
        (figures(point, results.load.for_s) for point in results.points if point.method in names),
        key=lambda each: (names.index(each.method), each.devices),
    )
