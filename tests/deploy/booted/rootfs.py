"""A minimal Debian or Ubuntu of this machine's own release, made once and unpacked for each run."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

INCLUDED = ("systemd", "systemd-sysv", "dbus", "python3", "procps", "openssh-client")
_LEFT_OUT = ("usr/share/doc/*", "usr/share/man/*", "usr/share/locale/*", "var/cache/apt/*",
             "var/lib/apt/lists/*")  # fmt: skip
_LINE = re.compile(r"^deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)", re.MULTILINE)


class Impossible(Exception):  # noqa: N818  # a reason to skip, not a fault
    """Why no system can be booted here, in a sentence."""


def tools() -> None:
    """Raise `Impossible` where systems cannot be made or booted."""
    if os.geteuid() != 0:
        raise Impossible("booting a system needs root")
    packages = {"debootstrap": "debootstrap", "systemd-nspawn": "systemd-container"}
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


def archive(cache: Path) -> Path:
    """The tar file of a fresh rootfs in ``cache``; made there when it is missing."""
    mirror, suite = release()
    wanted = hashlib.sha256(" ".join((suite, *INCLUDED, *_LEFT_OUT)).encode()).hexdigest()[:8]
    found = cache / f"rootfs-{suite}-{wanted}.tar"
    if not found.exists():
        cache.mkdir(parents=True, exist_ok=True)
        building = cache / f"{found.name}.{os.getpid()}"
        try:
            _debootstrap(suite, building, mirror)
            partial = building.with_suffix(".tar")
            leave_out = [f"--exclude=./{pattern}" for pattern in _LEFT_OUT]
            _check("tar", "-C", building, "-cf", partial, *leave_out, "--numeric-owner", ".")
            partial.rename(found)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return found


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
    found = []
    apt = Path("/etc/apt")
    for path in [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*.list"))]:
        if path.exists():
            found += [(uri, [suite]) for uri, suite in _LINE.findall(path.read_text())]
    for path in sorted((apt / "sources.list.d").glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text()):
            fields = dict(re.findall(r"^(\w[\w-]*):[ \t]*(.*)$", stanza, re.M))
            if "deb" in fields.get("Types", "").split():
                suites = fields.get("Suites", "").split()
                found += [(uri, suites) for uri in fields.get("URIs", "").split()]
    return found


def _debootstrap(suite: str, root: Path, mirror: str) -> None:
    include = f"--include={','.join(INCLUDED)}"
    _check("debootstrap", "--variant=minbase", include, suite, root, mirror)


def _check(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        output = (done.stdout + done.stderr)[-2000:]
        raise Impossible(f"{command[0]} failed ({done.returncode}): {output}")
