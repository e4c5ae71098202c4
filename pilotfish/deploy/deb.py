"""The edge as a Debian package: ``python -m pilotfish.deploy.deb --out dist`` (`make deb`).

In:  the running pilotfish, its pins, a Python version and a machine (`deploy.wheelhouse`), the
     units in ``systemd/``, and perhaps a target's artifact with its engines (`deploy.models`).
     Out: ``pilotfish-edge_VERSION-REVISION_ARCHITECTURE.deb``.

The program is installed below ``/usr/lib/pilotfish-edge``, not in the folders of `deploy.versions`:
dpkg manages versions itself, and the machine may also have a device that was flashed. The target is
installed there, too; ``/var/lib/pilotfish/target`` becomes a link to it if nothing has that name,
so `edge.toml` is the same in every package. The same input and SOURCE_DATE_EPOCH give the same
bytes.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from importlib import metadata, resources
from pathlib import Path

from pilotfish.deploy import models, wheelhouse
from pilotfish.deploy.errors import BundleError, exit_code_of
from pilotfish.deploy.install import LAUNCHER
from pilotfish.deploy.manifest import MACHINES, Progress
from pilotfish.deploy.models import PackedEngine
from pilotfish.deploy.wheels import Wheel
from pilotfish.engines.artifact import Artifact

NAME = "pilotfish-edge"
HOME = f"usr/lib/{NAME}"
ARCHITECTURES = {"aarch64": "arm64", "x86_64": "amd64"}
_FLASHED = "/opt/pilotfish/current/"  # the program's path in the units of a flashed machine
_SCRIPTS = ("postinst", "prerm", "postrm")
_SETTINGS = ("etc/pilotfish/edge.toml", "etc/pilotfish/worker.toml")
_TARGET = f"{HOME}/target"
# systemd-tmpfiles makes this link at installation and at boot, unless the path exists.
_LINK = f"""\
# The target of this package. Another folder or link of this name stays as it is.
L /var/lib/pilotfish/target - - - - /{_TARGET}
"""
_CHUNK = 1 << 20


def build(
    out: Path,
    python: str,
    machine: str,
    revision: str,
    progress: Progress,
    wheels: Path | None = None,
    target: Path | None = None,
) -> Path:
    """Build the package in the folder ``out``; return its path.

    wheels: folder of wheels, as in a bundle for that machine; None: download them.
    target: folder of the artifact that the edge serves; None: the package holds no target.
    """
    epoch_s = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    version = f"{metadata.version(wheelhouse.NAME)}-{revision}"
    artifact = None if target is None else models.open_artifact(target, python)
    engines = [] if artifact is None else models.engines_of(artifact)
    extras = models.extras(engines)
    check = partial(models.require_runtime, engines)
    out.mkdir(parents=True, exist_ok=True)
    package = out / f"{NAME}_{version}_{ARCHITECTURES[machine]}.deb"
    # a target may be larger than the memory that /tmp often is
    with tempfile.TemporaryDirectory(dir=out, prefix=".deb-") as scratch:
        tree = Path(scratch) / "tree"
        if wheels is None:
            wheels = Path(scratch) / "wheels"
            wheels.mkdir()
            wheelhouse.gather(wheels, python, machine, (), progress, extras, check)
        else:
            check({wheel.name: wheel.version for wheel in _wheels_in(wheels)})
        _program(tree / HOME, wheels, python, machine)
        _system(tree, epoch_s, engines)
        if artifact is not None:
            progress("copying the target", 0, 1)
            artifact.verify()
            _bring_target(tree, artifact, engines)
            progress("copying the target", 1, 1)
        libc = f"2.{wheelhouse.glibc_minor(machine, extras)}"
        _control(tree, version, python, ARCHITECTURES[machine], libc)
        progress("packing", 0, 1)
        _pack(tree, package, epoch_s)
        progress("packing", 1, 1)
    return package


def _program(home: Path, wheels: Path, python: str, machine: str) -> None:
    """Install Pilotfish and its requirements in the same way as an installation from a bundle."""
    for wheel in _wheels_in(wheels):
        if not wheel.fits(python, machine):
            raise BundleError(f"The wheel {wheel.path} is not for Python {python} on {machine}.")
        wheel.unpack(home, f"/usr/bin/python{python}")
    shutil.rmtree(home / "bin", ignore_errors=True)  # scripts of the wheels
    _put(home / "bin" / "pilotfish", LAUNCHER.format(python=f"/usr/bin/python{python}"), 0o755)


def _wheels_in(folder: Path) -> list[Wheel]:
    # hidden: our own scratch folder, if the wheels are in the output folder
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return [Wheel.from_path(path) for path in paths]


def _system(tree: Path, epoch_s: int, engines: Sequence[PackedEngine]) -> None:
    """Write units, user, folders, configuration, the command and documents."""
    units = resources.files("pilotfish") / "systemd"
    for name in (f"{NAME}.service", f"{NAME}.socket", "pilotfish-worker.service"):
        text = (units / name).read_text().replace(_FLASHED, f"/{HOME}/")
        _put(tree / "usr/lib/systemd/system" / name, text)
    for kind in ("sysusers", "tmpfiles"):
        text = (units / f"pilotfish.{kind}").read_text()
        _put(tree / f"usr/lib/{kind}.d/{NAME}.conf", text)
    for path in _SETTINGS:
        text = (units / Path(path).name).read_text()
        _put(tree / path, models.edge_settings(text, engines) if "edge" in path else text)
    (tree / "usr/bin").mkdir()
    (tree / "usr/bin/pilotfish").symlink_to(f"../lib/{NAME}/bin/pilotfish")
    documents = tree / "usr/share/doc" / NAME
    date = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(epoch_s))
    _put(documents / "copyright", f"Pilotfish is licensed under Apache-2.0; made on {date}.\n")


def _bring_target(tree: Path, artifact: Artifact, engines: Sequence[PackedEngine]) -> None:
    """Write the target with its engines, and the line that makes a link to it."""
    models.copy(artifact, engines, tree / _TARGET)
    with (tree / f"usr/lib/tmpfiles.d/{NAME}.conf").open("a") as file:
        file.write(_LINK)


def _control(tree: Path, version: str, python: str, architecture: str, libc: str) -> None:
    """Write dpkg's control files: fields, scripts, configuration files, checksums."""
    size_kb = sum(path.lstat().st_size for path in tree.rglob("*")) // 1024
    words = {
        "@VERSION@": version,
        "@PYTHON@": python,
        "@ARCHITECTURE@": architecture,
        "@LIBC@": libc,
        "@SIZE@": str(size_kb),
    }
    files = sorted(path for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    sums = [
        f"{_md5(path)}  {path.relative_to(tree)}\n"
        for path in files
        if path.relative_to(tree).parts[0] != "etc"
    ]
    for name in ("control", *_SCRIPTS):
        text = (resources.files("pilotfish.deploy") / "debian" / name).read_text()
        text = re.sub("|".join(words), lambda match: words[match[0]], text)
        _put(tree / "DEBIAN" / name, text, 0o755 if name in _SCRIPTS else 0o644)
    _put(tree / "DEBIAN" / "md5sums", "".join(sums))
    _put(tree / "DEBIAN" / "conffiles", "".join(f"/{path}\n" for path in _SETTINGS))


def _pack(tree: Path, package: Path, epoch_s: int) -> None:
    if shutil.which("dpkg-deb") is None:
        raise BundleError(
            "The command dpkg-deb is missing on this machine: make the package on Debian or Ubuntu."
        )
    for folder, names, _ in os.walk(tree):
        os.chmod(folder, 0o755)
        names.sort()
    environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch_s)}
    partial = package.with_name(f".{package.name}.partial")
    command = ["dpkg-deb", "--root-owner-group", "-Zzstd", "--build", str(tree), str(partial)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BundleError(f"dpkg-deb failed: {done.stderr.strip()}")
        partial.replace(package)
    finally:
        partial.unlink(missing_ok=True)


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):  # weights and libraries have hundreds of megabytes
            digest.update(chunk)
    return digest.hexdigest()


def _put(path: Path, text: str, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m pilotfish.deploy.deb", description="Makes the edge's Debian package."
    )
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    add = parser.add_argument
    add(
        "--out",
        type=Path,
        default=Path("dist"),
        metavar="DIR",
        help="folder to write (%(default)s)",
    )
    pythons = [f"3.{minor}" for minor in range(10, 14)]
    add("--python", choices=pythons, default=here, help="the target system's Python (%(default)s)")
    add(
        "--machine",
        choices=MACHINES,
        default=os.uname().machine,
        help="the target system's CPU (%(default)s)",
    )
    add(
        "--wheels",
        type=Path,
        metavar="DIR",
        help="a bundle's folder of wheels (default: download them)",
    )
    add(
        "--artifact",
        type=Path,
        metavar="DIR",
        help="artifact of the target to install with the edge, with the engines in its folder "
        "(default: none; copy it to /var/lib/pilotfish/target)",
    )
    add("--revision", default="1", help="the package's revision (%(default)s)")
    args = parser.parse_args()

    def run() -> int:
        place = (args.out, args.python, args.machine, args.revision)
        print(build(*place, _say, args.wheels, args.artifact))
        return 0

    return exit_code_of(run)


def _say(what: str, done: int, total: int) -> None:
    if done == 0:
        print(f"{what} …", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
