"""Apply a version to systemd: units, the service's user, folders, start at boot.

Units are copied, not linked: `systemctl enable` resolves links, so it would link to one version's
folder. Units are copied after their version has become current, so that an old version never runs
with a newer version's unit.

For another root file system, this machine's systemd tools are used (``--root``), and nothing in
that system is run. On the running system units are also reloaded and started. A unit that a Debian
package owns (`deploy.deb`) is neither replaced nor removed.

Standard library only: this runs on the board before anything is installed.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from pilotfish.deploy import files
from pilotfish.deploy.errors import InstallError
from pilotfish.deploy.rootfs import Rootfs
from pilotfish.deploy.versions import Versions

UNITS = "usr/lib/systemd/system"
_SUFFIXES = (".service", ".socket", ".timer", ".path", ".target")
_PACKAGED = "var/lib/dpkg/info/pilotfish-edge.list"
_TOOLS = ("systemctl", "systemd-sysusers", "systemd-tmpfiles")
ENGINE_BUILD = "pilotfish-engine-build.service"
# Role → units that start at boot; the user can enable the other units with systemctl.
ENABLED = {
    "device": ("pilotfish-device.service", ENGINE_BUILD),
    "edge": ("pilotfish-edge.service",),
}
_POLL_S = 0.5
# number of checks in a row that must find the unit active; a failing unit is active only for a
# moment
_STEADY = 3
_MAX_RESTARTS = 3
# time limit for units that start first, in seconds; systemd allows an engine's build 30 minutes
_OTHERS_S = 2400.0
_JOURNAL_LINES = 30


def require_tools() -> None:
    """Raise `InstallError` unless systemd's tools are on this machine."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        raise InstallError(
            f"{' and '.join(missing)} is missing here: an installation needs systemd's tools "
            "(on Debian and Ubuntu: the package systemd)."
        )


def targets(folder: Path) -> dict[Path, str]:
    """Return each file of a version's ``systemd`` folder that systemd reads → path in the root."""
    links = {}
    for path in sorted(folder.glob("*")):
        if path.suffix in _SUFFIXES:
            links[path] = f"{UNITS}/{path.name}"
        elif path.suffix in (".sysusers", ".tmpfiles"):
            links[path] = f"usr/lib/{path.suffix[1:]}.d/{path.stem}.conf"
    return links


def packaged(root: Rootfs) -> set[str]:
    """List the paths of a root that the edge's Debian package owns."""
    try:
        listed = root.path(_PACKAGED).read_text(errors="surrogateescape")
    except FileNotFoundError:
        return set()
    return {line.strip("/") for line in listed.splitlines()}


def apply_version(root: Rootfs, versions: Versions, name: str) -> Iterator[str]:
    """Apply a version to systemd; yield a sentence for each change."""
    wanted = targets(versions.folder(name) / "systemd")
    others = packaged(root)
    for path, place in wanted.items():
        if place in others:
            yield f"/{place} belongs to a Debian package and stays as it is"
        elif files.put(root.path(place), path.read_bytes()):
            yield f"/{place} written"
    for other in versions.names():
        known = {*targets(versions.folder(other) / "systemd").values()}
        for place in known - {*wanted.values()} - others:
            if place.startswith(UNITS):
                _systemctl(root, "disable", place.rpartition("/")[2])
            if files.remove(root.path(place)):
                yield f"/{place} removed"
    for tool, options in (("systemd-sysusers", ()), ("systemd-tmpfiles", ("--create",))):
        kind = f"usr/lib/{tool.removeprefix('systemd-')}.d/"
        names = [place.rpartition("/")[2] for place in wanted.values() if place.startswith(kind)]
        if names:
            _run(tool, f"--root={root.root}", *options, *names)
    if root.live:
        _run("systemctl", "daemon-reload")


def enable(root: Rootfs, versions: Versions, name: str, role: str) -> Iterator[str]:
    """Enable, at boot, the role's units that the previous version did not have.

    The role's other units stay as they are, so an upgrade does not enable a disabled unit.
    """
    before = versions.previous
    known: set[str] = set()
    if before is not None and before != name:
        known = {path.name for path in targets(versions.folder(before) / "systemd")}
    for unit in units(versions, name, role):
        if unit not in known and not is_enabled(root, unit):
            _systemctl(root, "enable", unit)
            yield f"{unit} enabled"


def units(versions: Versions, name: str, role: str) -> list[str]:
    """List the units of a role that start at boot and that a version has."""
    there = {path.name for path in targets(versions.folder(name) / "systemd")}
    return [unit for unit in ENABLED[role] if unit in there]


def is_enabled(root: Rootfs, unit: str) -> bool:
    """Return whether a unit starts at boot."""
    command = ["systemctl", f"--root={root.root}", "is-enabled", "--quiet", unit]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def may_build_engine(root: Rootfs, versions: Versions, name: str) -> bool:
    """Return whether the unit that builds engines is enabled and finds TensorRT, by its conditions.

    The installation does not start it: the device would wait for it, for minutes.
    """
    path = versions.folder(name) / "systemd" / ENGINE_BUILD
    if not path.is_file() or not is_enabled(root, ENGINE_BUILD):
        return False
    patterns = re.findall(r"^ConditionPathExistsGlob=\|/(.+)$", path.read_text(), re.MULTILINE)
    return any(any(root.root.glob(pattern)) for pattern in patterns)


def withdraw(root: Rootfs, versions: Versions) -> Iterator[str]:
    """Stop and disable all units of installed versions; remove all their files outside `HOME`."""
    places = sorted(
        {
            place
            for name in versions.names()
            for place in targets(versions.folder(name) / "systemd").values()
        }
        - packaged(root)
    )
    names = [place.rpartition("/")[2] for place in places if place.startswith(UNITS)]
    there = [name for name in names if root.path(f"{UNITS}/{name}").exists()]
    if there:
        _systemctl(root, "disable", *there)
        if root.live:
            _run("systemctl", "stop", *there)
    for place in places:
        if files.remove(root.path(place)):
            yield f"/{place} removed"
    if root.live:
        _run("systemctl", "daemon-reload")


def restart(unit: str, patience_s: float) -> str | None:
    """Restart a unit of the running system and wait until it is active.

    Returns None, or the reason of the failure: a sentence, then the last lines of the unit's
    journal. patience_s: time limit for the unit to start; the units that it waits for have
    `_OTHERS_S` in addition.
    """
    _run("systemctl", "stop", unit)
    # resets the count of failures; an error is ignored, since the unit may never have failed
    subprocess.run(["systemctl", "reset-failed", unit], check=False, capture_output=True)
    _run("systemctl", "start", "--no-block", unit)
    until_s = time.monotonic() + patience_s
    latest_s = until_s + _OTHERS_S
    active = 0
    while time.monotonic() < until_s and active < _STEADY:
        time.sleep(_POLL_S)
        state = _properties(unit)
        active = active + 1 if state["ActiveState"] == "active" else 0
        if state["ActiveState"] == "failed" or int(state["NRestarts"] or 0) >= _MAX_RESTARTS:
            return f"{unit} fails (result: {state['Result']}).\n{journal(unit)}"
        if state["Job"]:
            if (
                state["ActiveState"] == "inactive"
            ):  # the unit waits for another unit, such as an engine's build
                until_s = min(time.monotonic() + patience_s, latest_s)
            continue
        if state["ActiveState"] == "inactive" and state["ConditionResult"] == "no":
            return (
                f"{unit} does not start: a condition in its unit file is not met.\n{journal(unit)}"
            )
    if active:
        return None
    return f"{unit} is not active after {patience_s:.0f} s.\n{journal(unit)}"


def journal(unit: str) -> str:
    """Return the last lines of a unit's journal."""
    command = ["journalctl", "-u", unit, "-n", str(_JOURNAL_LINES), "--no-pager", "-o", "cat"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return done.stdout.rstrip()


def _properties(unit: str) -> dict[str, str]:
    names = ("ActiveState", "Job", "Result", "NRestarts", "ConditionResult")
    command = ["systemctl", "show", unit, *(f"--property={name}" for name in names)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    lines = (line.partition("=") for line in done.stdout.splitlines())
    return dict.fromkeys(names, "") | {name: value for name, _, value in lines}


def _systemctl(root: Rootfs, verb: str, *names: str) -> None:
    _run("systemctl", f"--root={root.root}", "--quiet", verb, *names)


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise InstallError(f"`{' '.join(command)}` failed: {lines[-1] if lines else 'no reason'}")
