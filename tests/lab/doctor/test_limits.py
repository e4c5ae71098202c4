"""Limits from which on something is wrong, each with a machine on either side."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish.lab.doctor.facts import Disk
from tests.support.machines import ORIN_NANO, examined, machine_of, subjects

GIB = 1 << 30
QUERY = "nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader"


@pytest.mark.parametrize(
    ("free_bytes", "severity"),
    [(3 * GIB, None), (GIB, "warning"), (GIB // 8, "fault")],
)
def test_the_space_on_a_disk(tmp_path: Path, free_bytes: int, severity: str | None) -> None:
    disk = Disk(path="/x", purpose="models", free_bytes=free_bytes, total_bytes=8 * GIB)
    examination = examined(machine_of(tmp_path, ORIN_NANO, disks=(disk,)))
    for each in ("note", "warning", "fault"):
        assert ("disk" in subjects(examination, each)) == (each == severity), each


@pytest.mark.parametrize(("compute", "is_old"), [("7.0", True), ("7.5", False), ("12.0", False)])
def test_the_compute_capability_of_a_card(tmp_path: Path, compute: str, is_old: bool) -> None:
    outputs = {QUERY: f"a card, 580.65.06, {compute}\n"}
    files = {"proc/meminfo": "MemTotal: 64000000 kB\n", "dev/nvidia0": ""}
    examination = examined(machine_of(tmp_path, files, outputs))
    assert examination.machine.compute == compute
    assert ("GPU" in subjects(examination, "warning")) == is_old
