"""The CPUs that this process may use, by its CPU affinity and its cgroups' quota.

A quota (`docker --cpus`, a Kubernetes limit, ``CPUQuota=`` of a unit) does not change the affinity.
When the threads have used it up, the kernel stops all of them for the rest of the period. The
threads of a model's pass wait for each other, so they lose more time than the quota takes.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_ROOT = Path("/")


def usable_cpus(root: Path = _ROOT) -> int:
    """Return the number of threads that can run at full speed, at least 1.

    A fraction of a CPU does not count, as in Rust's `available_parallelism`: a thread on a fraction
    would be slow, and the other threads would wait for it. root: the folder that holds /proc and
    /sys.
    """
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Return the smallest quota (CPUs) of the process's cgroups and their parents; None: none."""
    quotas = [
        quota
        for group in _find_groups(root)
        for folder in _list_levels(root, group)
        if (quota := _read_quota(folder)) is not None
    ]
    return min(quotas, default=None)


def split_cpus() -> tuple[set[int], set[int]]:
    """Divide this process's CPUs between an edge (first set) and a device on the same machine.

    So neither waits for the other's threads. Both get the only CPU if there is one.
    """
    cpus = sorted(os.sched_getaffinity(0))
    middle = len(cpus) // 2
    return set(cpus[:middle] or cpus), set(cpus[middle:])


@contextmanager
def pinned(cpus: Collection[int]) -> Iterator[None]:
    """Run this thread, and the threads and processes that it starts meanwhile, on these CPUs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class _Group(NamedTuple):
    """The cgroup of this process in one hierarchy.

    mount: the folder where the hierarchy is mounted. top: the cgroup at the mount's root; a
    container sees only the cgroups below it. path: the process's cgroup.
    """

    mount: PurePosixPath
    top: PurePosixPath
    path: PurePosixPath


def _find_groups(root: Path) -> Iterator[_Group]:
    """Yield this process's cgroups, in the unified (v2) and the cpu controller's hierarchy (v1)."""
    paths = {}
    for line in _read_lines(root / "proc/self/cgroup"):  # the format: number:controllers:path
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (number, controllers) == ("0", ""):
            paths["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            paths["cgroup"] = path
    for line in _read_lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, described = before.split(" "), after.split(" ")
        kind = described[0]
        if kind not in paths or len(fields) < 5 or len(described) < 3:
            continue
        if kind == "cgroup2" or "cpu" in described[2].split(","):
            top, mount = map(PurePosixPath, fields[3:5])
            yield _Group(mount, top, PurePosixPath(paths[kind]))


def _list_levels(root: Path, group: _Group) -> Iterator[Path]:
    """Yield the folders of the process's cgroup and its parents, up to the hierarchy's mount.

    A cgroup outside the mount (in a container without a cgroup namespace) has no folder below the
    mount. The mount itself then has the container's quota.
    """
    mount = root / group.mount.relative_to("/")
    below = group.path
    if below.is_relative_to(group.top):
        below = below.relative_to(group.top)
    elif below.is_absolute():
        below = below.relative_to("/")
    for level in (below, *below.parents):
        if ".." not in level.parts:
            yield mount / level


def _read_quota(folder: Path) -> float | None:
    """Return the quota of one cgroup, in CPUs; None: no quota."""
    with suppress(ValueError, ZeroDivisionError):
        if lines := _read_lines(folder / "cpu.max"):  # quota and period (µs): "max 100000"
            quota, period = lines[0].split()
            return None if quota == "max" else int(quota) / int(period)
        if lines := _read_lines(folder / "cpu.cfs_quota_us"):
            allowed_us = int(lines[0])
            period_us = int(_read_lines(folder / "cpu.cfs_period_us")[0])
            return allowed_us / period_us if allowed_us > 0 else None
    return None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
