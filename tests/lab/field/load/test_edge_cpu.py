"""The CPU time of an edge: of all its processes, or unknown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pilotfish.lab.field.load.edge_cpu import cpu_s

TICKS_S = 1.0 / os.sysconf("SC_CLK_TCK")


def process(root: Path, number: int, ticks: int | None, children: str | None = "") -> None:
    """A process of one thread. None: the kernel does not tell it."""
    task = root / str(number) / "task" / str(number)
    task.mkdir(parents=True)
    if ticks is not None:
        fields = ["S", *["0"] * 10, str(ticks), "0"]
        (root / str(number) / "stat").write_text(f"{number} (an edge) {' '.join(fields)}")
    if children is not None:
        (task / "children").write_text(children)


def test_the_time_is_that_of_all_processes(tmp_path: Path) -> None:
    process(tmp_path, 1, 300, "2 3")
    process(tmp_path, 2, 50, "4")
    process(tmp_path, 3, 20)
    process(tmp_path, 4, 7)
    assert cpu_s(1, tmp_path) == pytest.approx(377 * TICKS_S)


@pytest.mark.parametrize(("ticks", "children"), [(None, ""), (50, None)])
def test_a_sum_without_a_worker_is_unknown(
    tmp_path: Path, ticks: int | None, children: str | None
) -> None:
    process(tmp_path, 1, 300, "2")
    process(tmp_path, 2, ticks, children)
    assert cpu_s(1, tmp_path) is None


def test_a_process_that_has_ended_has_no_time(tmp_path: Path) -> None:
    assert cpu_s(1, tmp_path) is None
