"""Inspect a root file system: find its Pythons, machine and board.

In: a folder, or ``/``. Out: a `Rootfs`, or an `InstallError` that states why the folder is not a
    root file system.

An absolute link in a root file system is resolved relative to that root, and no link is followed
out of it.

Standard library only: this runs on the board before anything is installed.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from pilotfish.deploy.errors import InstallError

ELF_MACHINES = {62: "x86_64", 183: "aarch64"}  # e_machine: EM_X86_64, EM_AARCH64
_MAX_LINKS = 20
_SYSTEMD_RUNS = Path("/run/systemd/system")  # sd_booted(3)


@dataclass(frozen=True)
class Rootfs:
    """A root file system and its properties.

    pythons: version ("3.10") of each of its CPythons → machine. release: line that names NVIDIA's
    L4T release; None if the file system is not a Jetson's.
    """

    root: Path
    pythons: dict[str, str]
    release: str | None

    @classmethod
    def inspect(cls, root: Path) -> "Rootfs":
        """Inspect a folder."""
        root = root.resolve()
        if (root / "rootfs").is_dir() and (root / "apply_binaries.sh").exists():
            raise InstallError(
                f"{root} is the folder of the BSP, not of its root file system: name "
                f"{root / 'rootfs'}."
            )
        if not root.is_dir():
            raise InstallError(f"{root} is not a folder.")
        rootfs = cls(root, dict(_pythons(root)), _release(root))
        if not rootfs.pythons:
            raise InstallError(
                f"{root} is not a root file system with Python: its usr/bin has no python3.N. "
                "In a BSP, "
                "unpack the sample root file system and run apply_binaries.sh first."
            )
        return rootfs

    @property
    def live(self) -> bool:
        """Return whether this is the running system with systemd; a chroot is not."""
        return self.root == Path("/") and _SYSTEMD_RUNS.is_dir()

    def require(self, python: str, machine: str) -> None:
        """Raise `InstallError` unless a bundle for this Python and machine runs here."""
        machines = sorted(set(self.pythons.values()))
        if machine not in machines:
            raise InstallError(
                f"The bundle is for {machine}, but {self.root} is for "
                f"{' and '.join(machines)}: make another bundle with --machine."
            )
        if self.pythons.get(python) != machine:
            there = ", ".join(sorted(self.pythons))
            raise InstallError(
                f"The bundle is for Python {python}, but {self.root} has {there}: make another "
                "bundle with --python."
            )

    def path(self, inside: str) -> Path:
        """Convert a path in the root to a path of this system; resolve links in its parents."""
        parent, _, name = inside.strip("/").rpartition("/")
        return resolve(self.root, parent) / name


def resolve(root: Path, inside: str) -> Path:
    """Follow the links of a path as the system at ``root`` would; never leaves ``root``."""
    done = root
    rest = [part for part in inside.split("/") if part]
    links = 0
    while rest:
        part = rest.pop(0)
        if part == "..":
            done = done.parent if done != root else root
        elif part != ".":
            step = done / part
            if step.is_symlink():
                links += 1
                if links > _MAX_LINKS:
                    raise InstallError(f"{step} is a broken link.")
                target = os.readlink(step)
                done = root if target.startswith("/") else done
                rest = [piece for piece in target.split("/") if piece] + rest
            else:
                done = step
    return done


def _pythons(root: Path) -> "list[tuple[str, str]]":
    pythons = []
    for path in sorted(resolve(root, "usr/bin").glob("python3.*")):
        version = path.name.removeprefix("python")
        machine = _machine(resolve(root, f"usr/bin/{path.name}"))
        if machine is not None and version.removeprefix("3.").isdecimal():
            pythons.append((version, machine))
    return pythons


def _machine(path: Path) -> str | None:
    """Return the machine of an ELF file; None for another file or an unknown machine."""
    try:
        with path.open("rb") as file:
            head = file.read(20)
    except OSError:
        return None
    if len(head) < 20 or head[:6] != b"\x7fELF\x02\x01":  # not 64-bit little-endian ELF
        return None
    (machine,) = struct.unpack_from("<H", head, 18)
    return ELF_MACHINES.get(machine)


def _release(root: Path) -> str | None:
    try:
        text = resolve(root, "etc/nv_tegra_release").read_text(errors="replace")
    except OSError:
        return None
    return text.strip().partition("\n")[0].lstrip("# ")
