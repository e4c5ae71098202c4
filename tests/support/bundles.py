"""Small wheels, bundles and root file systems, for tests of making and installing bundles."""

from __future__ import annotations

import atexit
import base64
import hashlib
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from pilotfish.deploy import manifest, signatures
from pilotfish.deploy.admission import AdmissionPolicy
from pilotfish.deploy.install import Installation
from pilotfish.deploy.rootfs import Rootfs
from pilotfish.deploy.wheels import normalized

PYTHON = f"3.{sys.version_info.minor}"
MACHINE = platform.machine()
HOME = "opt/pilotfish"
_ELF = {"x86_64": 62, "aarch64": 183}
TOOLS = ("systemctl", "systemd-sysusers", "systemd-tmpfiles")
UNIT = (
    "[Service]\nExecStart=/opt/pilotfish/current/bin/pilotfish {}\n"
    "[Install]\nWantedBy=basic.target\n"
)

can_install = pytest.mark.skipif(
    os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS),
    reason="installing needs root and systemd's tools",
)


def write_wheel(
    folder: Path,
    name: str,
    files: Mapping[str, bytes],
    *,
    version: str = "1.0",
    tag: str = "py3-none-any",
    requires: Iterable[str] = (),
    record: bytes | None = None,
) -> Path:
    """Write a wheel with these files; ``record`` replaces the right RECORD."""
    info = f"{name}-{version}.dist-info"
    lines = [f"Requires-Dist: {text}\n" for text in requires]
    content = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        f"{''.join(lines)}".encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    rows = [f"{path},{_hash(data)},{len(data)}" for path, data in content.items()]
    rows.append(f"{info}/RECORD,,")
    content[f"{info}/RECORD"] = record if record is not None else "\n".join(rows).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in content.items():
            archive.writestr(member, data)
    return path


def repack(distribution: metadata.Distribution, folder: Path) -> Path:
    """Make a wheel of an installed distribution, with a right RECORD."""
    name = distribution.metadata["Name"].replace("-", "_")
    tags = [
        line.partition(": ")[2].split("-")
        for line in (distribution.read_text("WHEEL") or "").splitlines()
        if line.startswith("Tag: ")
    ]
    tag = "-".join(".".join(dict.fromkeys(parts)) for parts in zip(*tags, strict=True))
    path = folder / f"{name}-{distribution.version}-{tag}.whl"
    rows = []
    record = ""
    with zipfile.ZipFile(path, "w") as archive:
        for file in distribution.files or ():
            if ".." in file.parts or "__pycache__" in file.parts:
                continue
            if file.name == "RECORD":
                record = str(file)
            elif file.parts[0].endswith(".dist-info") and file.name not in (
                "METADATA",
                "WHEEL",
                "entry_points.txt",
                "top_level.txt",
            ):
                continue  # written by the installer
            else:
                data = file.read_binary()
                archive.writestr(str(file), data)
                rows.append(f"{file},{_hash(data)},{len(data)}")
        archive.writestr(record, "\n".join([*rows, f"{record},,"]))
    return path


def needed(requirements: Iterable[str]) -> Iterator[metadata.Distribution]:
    """Yield the installed distributions that these requirements need, recursively."""
    waiting = [_name(text) for text in requirements]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another platform, or of an unused extra
        yield distribution
        waiting += [_name(text) for text in distribution.requires or () if "extra ==" not in text]


def tiny_bundle(
    folder: Path,
    *,
    version: str = "1.0",
    role: str = "device",
    python: str = PYTHON,
    machine: str = MACHINE,
    settings: str = "draft = 'x'\n",
    units: Mapping[str, str] | None = None,
    wheels: Mapping[str, bytes] | None = None,
    marker: str = "",
) -> Path:
    """Make a bundle with a pilotfish of a few lines, which can be installed but does nothing."""
    code = f"VERSION = {version!r} {marker}\n\n\ndef main():\n    print(VERSION)\n".encode()
    modules = {"pilotfish/__init__.py": b"", "pilotfish/cli.py": code}
    write_wheel(folder / "wheels", "pilotfish", modules, version=version)
    write_wheel(
        folder / "wheels",
        "odd",
        wheels or {"odd/__init__.py": b"", "odd-1.0.data/scripts/odd": b"#!python\nprint(1)\n"},
    )
    name = f"pilotfish-{role}.service"
    texts = {
        f"systemd/{unit}": text for unit, text in (units or {name: UNIT.format(version)}).items()
    }
    texts |= {
        "systemd/pilotfish.sysusers": "u pilotfish - - -\n",
        "systemd/pilotfish.tmpfiles": "d /var/lib/pilotfish 0750 pilotfish pilotfish -\n",
        "artifacts/draft/manifest.json": f'{{"version": "{version}"}}\n',
        f"config/{role}.toml": settings,
        "keys/device.key": "secret\n",
        "keys/edge.pub": "public\n",
    }
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return seal(folder, version=version, role=role, python=python, machine=machine)


@cache
def release() -> Path:
    """The folder of the signer of these tests' bundles."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    signatures.create(folder)
    return folder


def demands(**changes: Any) -> AdmissionPolicy:
    """Demand a signature of these tests' signer."""
    return AdmissionPolicy(**{"signers": release() / "signers", **changes})


def seal(folder: Path, **fields: str) -> Path:
    """Write a bundle's manifest for its present files and sign it; changes the fields given."""
    path = folder / manifest.NAME
    (folder / signatures.NAME).unlink(missing_ok=True)
    if path.exists():
        known = json.loads(path.read_text())
        fields = {key: known[key] for key in ("version", "role", "python", "machine")} | fields
        path.unlink()
    path.write_bytes(manifest.describe(folder, **fields).encode())
    return sign(folder)


def sign(folder: Path, by: Path | None = None) -> Path:
    """Sign a bundle's manifest with the key in a signer's folder."""
    content = (folder / manifest.NAME).read_bytes()
    signature = signatures.sign(content, (by or release()) / "signer.key")
    (folder / signatures.NAME).write_bytes(signature)
    return folder


def plant(bundle: Path, mark: Path | str) -> Path:
    """Make a bundle's own installer leave a mark when run, and seal the bundle again."""
    (wheel,) = (bundle / "wheels").glob("pilotfish-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        modules = {
            name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name
        }
    version = wheel.name.split("-")[1]
    wheel.unlink()
    evil = f"open({str(mark)!r}, 'w').write('ran')\n".encode()
    modules["pilotfish/deploy/__init__.py"] = evil + modules.get(
        "pilotfish/deploy/__init__.py", b""
    )
    write_wheel(bundle / "wheels", "pilotfish", modules, version=version)
    return seal(bundle)


def tiny_rootfs(folder: Path, *, python: str = PYTHON, machine: str = MACHINE) -> Path:
    """Make a root file system with only an interpreter's first bytes."""
    (folder / "usr/bin").mkdir(parents=True)
    (folder / "etc").mkdir()
    head = b"\x7fELF\x02\x01" + bytes(12) + struct.pack("<H", _ELF[machine])
    (folder / f"usr/bin/python{python}").write_bytes(head)
    (folder / "usr/bin/python3").symlink_to(f"python{python}")
    return folder


@contextmanager
def in_memory() -> Iterator[Path]:
    """Make a folder, in memory if possible: hundreds of installations would wait for disks."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def put(root: Path, bundle: Path, **changes: Any) -> list[str]:
    """Install under changed `demands`; returns the installer's lines."""
    here, info = installation(root)
    here.install(bundle, demands(**changes))
    return info


def current(root: Path) -> str:
    """Return the current version."""
    return os.readlink(root / HOME / "current").partition("/")[2].partition("-")[0]


def installation(root: Path) -> tuple[Installation, list[str]]:
    """Make an installer for a root, and the list of its output lines."""
    messages: list[str] = []
    return Installation(Rootfs.inspect(root), messages.append), messages


def snapshot(root: Path) -> dict[str, object]:
    """Map every path below a folder to its kind, mode and content."""
    results: dict[str, object] = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        mode = path.lstat().st_mode
        if path.is_symlink():
            results[name] = os.readlink(path)
        elif path.is_dir():
            results[name] = mode
        else:
            results[name] = (mode, path.read_bytes())
    return results


def _name(requirement: str) -> str:
    for index, char in enumerate(requirement):
        if not (char.isalnum() or char in "-_."):
            return normalized(requirement[:index])
    return normalized(requirement)


def _hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"


def install_over_this_machine(
    folder: Path, bundle: Path, files: str = ""
) -> subprocess.CompletedProcess[str]:
    """Install a bundle into ``/`` of a chroot: this machine's root under an overlay.

    folder: an empty folder; ``all`` in it is the root. files: shell commands that add files to it.
    Skips the test where that is not possible.
    """
    if Path("/run/systemd/system").is_dir():
        pytest.skip("systemd runs here: this would be a live system")
    script = (
        f"mkdir {folder}/up {folder}/all && mount -t tmpfs none {folder}/up && "
        f"mkdir {folder}/up/up {folder}/up/work && mount -t overlay -o "
        f"lowerdir=/,upperdir={folder}/up/up,workdir={folder}/up/work none {folder}/all && "
        f"mount --rbind /dev {folder}/all/dev && mount --rbind /proc {folder}/all/proc || exit 99; "
        f"{files} "
        f"cp -r {bundle} {folder}/all/bundle; cp -r {release()}/signers {folder}/all/signers; "
        f'exec chroot {folder}/all "$@"'
    )
    install = [sys.executable, "-m", "pilotfish.deploy.install", "--signers", "/signers", "/bundle"]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *install],
        env=os.environ | {"PYTHONPATH": os.getcwd()},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 99:
        pytest.skip(f"no overlay can be mounted here: {done.stderr.strip()[-80:]}")
    if "usr/bin" in done.stderr or "bundle is for Python" in done.stderr:
        pytest.skip("this machine's own Python is another one")
    return done
