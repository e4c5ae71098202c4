"""A minimal Debian or Ubuntu of this machine's own release, made once and unpacked for each run.

It is of this machine's architecture, or of another one whose programs this machine runs.

What debootstrap mounts there, and runs, is in namespaces of its own: nothing of it outlives it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INCLUDED = ("systemd", "systemd-sysv", "dbus", "python3", "procps", "openssh-client")
TOOLS = {"debootstrap": "debootstrap", "systemd-nspawn": "systemd-container"}
_LEFT_OUT = ("usr/share/doc/*", "usr/share/man/*", "usr/share/locale/*", "var/cache/apt/*",
             "var/lib/apt/lists/*")  # fmt: skip
# What is mounted, and who runs, in there goes with it, however it ends.
_ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
LIMIT_S = 900.0  # for debootstrap: seconds with a mirror nearby, minutes on a busy machine
_LINE = re.compile(r"^deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)", re.MULTILINE)


class Impossible(Exception):  # noqa: N818  # it is a reason to skip tests, not an error
    """Why no system can be made or run here, in a sentence."""


@dataclass(frozen=True)
class Foreign:
    """Another architecture.

    name: Debian's name of it. words: the words by which this machine runs a command in a root.
    """

    name: str
    words: Callable[..., Sequence[str]]


def tools(packages: Mapping[str, str] = TOOLS) -> None:
    """Raise `Impossible` where systems cannot be made or run; packages: tool → its package."""
    if os.geteuid() != 0:
        raise Impossible("a system of its own needs root")
    for tool, package in packages.items():
        if shutil.which(tool) is None:
            raise Impossible(f"{tool} is missing: install the package {package}")
    probe = [
        "unshare",
        "--mount",
        "--pid",
        "--net",
        "--fork",
        "mount",
        "-t",
        "tmpfs",
        "none",
        "/mnt",
    ]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Impossible(f"no namespaces here: {done.stderr.strip()}")


def archive(
    cache: Path, packages: Sequence[str] = INCLUDED, foreign: Foreign | None = None
) -> Path:
    """The tar file of a fresh rootfs in ``cache``; made there when it is missing."""
    mirror, suite = release()
    wanted = hashlib.sha256(" ".join((suite, *packages, *_LEFT_OUT)).encode()).hexdigest()[:8]
    kind = f"{suite}-{foreign.name}" if foreign else suite
    result = cache / f"rootfs-{kind}-{wanted}.tar"
    if not result.exists():
        cache.mkdir(parents=True, exist_ok=True)
        building = cache / f"{result.name}.{os.getpid()}"
        shutil.rmtree(building, ignore_errors=True)  # a killed run's, whose number comes again
        try:
            _debootstrap(suite, building, mirror, packages, foreign)
            partial = building.with_suffix(".tar")
            leave_out = [f"--exclude=./{pattern}" for pattern in _LEFT_OUT]
            _check("tar", "-C", building, "-cf", partial, *leave_out, "--numeric-owner", ".")
            partial.rename(result)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return result


def unpack(source: Path, root: Path) -> None:
    """A rootfs from `archive` at ``root``, which is made."""
    root.mkdir(parents=True)
    _check("tar", "-C", root, "-xf", source, "--numeric-owner")


def python(source: Path) -> str:
    """The version of Python in a rootfs from `archive`: "3.11"."""
    with tarfile.open(source) as tar:
        names = [re.fullmatch(r"\./usr/bin/python(3\.\d+)", name) for name in tar.getnames()]
    return next(name[1] for name in names if name)


def release() -> tuple[str, str]:
    """Mirror and suite of this machine, from its own apt configuration."""
    facts = dict(re.findall(r'^(\w+)="?([^"\n]*)', Path("/etc/os-release").read_text(), re.M))
    suite = facts.get("VERSION_CODENAME", "")
    for uri, suites in _sources():
        if suite in suites:
            return uri, suite
    raise Impossible(f"apt knows no mirror of {suite or 'this system'}")


def _sources() -> list[tuple[str, list[str]]]:
    """(URI, suites) of every binary source of apt, in both of its formats."""
    results = []
    apt = Path("/etc/apt")
    for path in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.list"))]:
        if path.exists():
            results += [(uri, [suite]) for uri, suite in _LINE.findall(path.read_text())]
    for path in sorted((apt / "sources.list.d").glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text()):
            fields = dict(re.findall(r"^(\w[\w-]*):[ \t]*(.*)$", stanza, re.M))
            if "deb" in fields.get("Types", "").split():
                suites = fields.get("Suites", "").split()
                results += [(uri, suites) for uri in fields.get("URIs", "").split()]
    return results


def _debootstrap(
    suite: str, root: Path, mirror: str, packages: Sequence[str], foreign: Foreign | None
) -> None:
    include = f"--include={','.join(packages)}"
    options = ["--foreign", f"--arch={foreign.name}"] if foreign else []
    command = ["debootstrap", *options, "--variant=minbase", include, suite, root, mirror]
    try:
        _check(*command, within=_ALONE, limit_s=LIMIT_S)
        if foreign:
            (root / "etc/dpkg/dpkg.cfg.d/unsafe-io").write_text("force-unsafe-io\n")
            # it has its devices already; in a user namespace it could make none, as in lxc
            second = ("env", "container=lxc", "/debootstrap/debootstrap", "--second-stage")
            _check(*second, within=foreign.words(root), limit_s=LIMIT_S)
    except Impossible as reason:
        log = root / "debootstrap/debootstrap.log"
        info = f"; its log: {_end(log.read_text(errors='replace'))}" if log.exists() else ""
        raise Impossible(f"{reason}{info}") from None


def _check(*command: object, within: Sequence[str] = (), limit_s: float | None = None) -> None:
    """Run this, ``within`` other words; raise `Impossible` with the cause that it tells."""
    with tempfile.TemporaryFile("w+", errors="replace") as temporary_file:
        running = subprocess.Popen(
            [*within, *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=temporary_file,
            stderr=temporary_file,
        )
        try:
            code = running.wait(limit_s)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()
            raise Impossible(f"{command[0]} was not done after {limit_s:g} s") from None
        temporary_file.seek(0)
        if code != 0:
            raise Impossible(f"{command[0]} failed ({code}): {_end(temporary_file.read())}")


def _end(output: str) -> str:
    """The end of what a program said, without the lines about its progress."""
    lines = [line for line in output.splitlines() if line and not line.startswith("I: ")]
    return " | ".join(lines[-8:])[-1000:]
