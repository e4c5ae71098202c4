"""How many CPUs a process may use: control groups of both versions, on disk and of this kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pilotfish.base.cpus import cpu_quota, usable_cpus

V1 = "31 23 0:29 {top} /sys/fs/cgroup/cpu rw shared:1 - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "31 23 0:38 {top} /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
CONTROLLER = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")


def machine(root: Path, groups: str, mounts: str, files: dict[str, str]) -> Path:
    """Lay out /proc and /sys below ``root``."""
    options = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, **files}
    for name, text in options.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "quota"),
    [
        ("", "", {}, None),
        ("0::/a/b\n", V2.format(top="/"), {"a/b/cpu.max": "20000 100000\n"}, 0.2),
        ("0::/a/b\n", V2.format(top="/"), {"a/b/cpu.max": "max 100000\n"}, None),
        # the least of all levels holds
        (
            "0::/a/b\n",
            V2.format(top="/"),
            {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": "150000 100000\n"},
            1.5,
        ),
        # a container: its group is what is mounted, whether it sees the path above it or not
        ("0::/\n", V2.format(top="/"), {"cpu.max": "50000 50000\n"}, 1.0),
        ("0::/pod/c1\n", V2.format(top="/pod/c1"), {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/../other\n", V2.format(top="/"), {"cpu.max": "250000 100000\n"}, 2.5),
        ("0::/pod/c1\n", V2.format(top="/elsewhere"), {"cpu.max": "250000 100000\n"}, 2.5),
        # version 1, beside an empty unified hierarchy
        (
            "2:cpu,cpuacct:/docker/c\n1:name=systemd:/x\n0::/\n",
            V1.format(top="/") + V2.format(top="/").replace("cgroup rw", "cgroup/unified rw"),
            {"cpu/docker/c/cpu.cfs_quota_us": "-1", "cpu/docker/cpu.cfs_quota_us": "75000",
             "cpu/docker/c/cpu.cfs_period_us": "100000", "cpu/docker/cpu.cfs_period_us": "50000"},
            1.5,
        ),
        # nonsense is no quota
        ("0::/a\n", V2.format(top="/"), {"a/cpu.max": "much\n"}, None),
        ("0::/a\n", V2.format(top="/"), {"a/cpu.max": "1 0\n"}, None),
        ("nonsense\n", "more nonsense\n - cgroup2\n", {}, None),
    ],
)  # fmt: skip
def test_the_quota_of_the_control_groups(
    tmp_path: Path, groups: str, mounts: str, files: dict[str, str], quota: float | None
) -> None:
    below = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    assert cpu_quota(machine(tmp_path, groups, mounts, below)) == quota


@pytest.mark.parametrize(("quota", "least"), [("20000", 1), ("190000", 1), ("900000000", None)])
def test_threads_follow_quota_and_affinity(tmp_path: Path, quota: str, least: int | None) -> None:
    cores = len(os.sched_getaffinity(0))
    options = {"sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}
    root = machine(tmp_path, "0::/\n", V2.format(top="/"), options)
    assert usable_cpus(root) == (cores if least is None else min(cores, least))


@pytest.mark.skipif(
    not os.access(CONTROLLER.parent, os.W_OK) or not CONTROLLER.parent.is_dir(),
    reason="needs root and the cpu controller of control groups, version 1",
)
def test_a_quota_of_this_kernel() -> None:
    group = CONTROLLER.parent / f"pilotfish-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_quota_us").write_text("100000")
        (group / "cpu.cfs_period_us").write_text("100000")
        script = (
            f"open({str(group / 'cgroup.procs')!r}, 'w').write('0');"
            "from pilotfish.base.cpus import usable_cpus; print(usable_cpus())"
        )
        done = subprocess.run(
            [sys.executable, "-c", script], check=False, capture_output=True, text=True
        )
        assert done.stdout == "1\n", done.stderr
    finally:
        group.rmdir()
