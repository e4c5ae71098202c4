"""Collect a bundle's wheels: pilotfish's own, its requirements for a board, and extra wheels.

In:  the running pilotfish, its pins (`constraints.txt`), a Python version, a machine, extra wheels
     (for example, from a board's vendor). Out: a folder of wheels, each checked.
Guarantees: no source distribution is ever built; every version is the pinned one; every downloaded
     file has the hash that the resolver gave. An extra wheel replaces the wheel of the same
     distribution; an extra ONNX Runtime wheel of any name replaces the ONNX Runtime for CPUs.

`uv` resolves, since it evaluates markers for the board's Python (pip evaluates them for the Python
that runs pip); `pip` downloads. Both read their own configuration files and variables (mirrors,
proxies).
"""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path

from pilotfish.deploy.errors import BundleError, FetchError
from pilotfish.deploy.manifest import Progress
from pilotfish.deploy.wheels import Wheel, normalized

NAME = "pilotfish"
EXTRAS = ("serve",)
RUNTIME = "onnxruntime"
RUNTIME_EXTRA = "cpu"
# Minor version of the newest glibc 2.x that wheels may require; supported systems have a later one.
_GLIBC_MINOR = 31
# (extra, machine) → the same, for an extra whose wheels require a newer glibc
_NEWER_GLIBC_MINOR = {("tensorrt-rtx", "aarch64"): 35}
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_DATE = (1980, 1, 1, 0, 0, 0)  # date of all members of a wheel, so that wheels are reproducible
_PIN = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)")
_UNREACHABLE = re.compile(
    r"failed to fetch|error sending request|dns error|connection|timed out|network", re.IGNORECASE
)


def gather(
    out: Path,
    python: str,
    machine: str,
    wheel_paths: Sequence[Path],
    progress: Progress,
    extras: Sequence[str] = (),
    check: Callable[[Mapping[str, str]], None] | None = None,
) -> list[Wheel]:
    """Fill the folder ``out`` with every wheel that a bundle needs.

    extras: further extras of pilotfish. An extra is left out if an extra wheel's name begins with
    the extra's name: then all of its wheels must be given. check: function that gets name →
    version of all wheels before any is downloaded, and may raise.
    """
    replacing = [_checked_wheel(path, python, machine) for path in wheel_paths]
    progress("packing pilotfish", 0, 1)
    pilotfish_wheel = pack(out, _chosen(extras, replacing))
    progress("packing pilotfish", 1, 1)
    with tempfile.TemporaryDirectory() as scratch:
        pins = resolve(Path(scratch), pilotfish_wheel, replacing, python, machine, progress, extras)
        if check is not None:
            versions = {match["name"]: match["version"] for match in map(_PIN.match, pins) if match}
            check(versions | {wheel.name: wheel.version for wheel in replacing})
        fetch(Path(scratch), pins, out, python, machine, progress, extras)
    for wheel in replacing:
        shutil.copyfile(wheel.path, out / wheel.path.name)
    wheels = [Wheel.from_path(path) for path in sorted(out.iterdir())]
    for count, wheel in enumerate(wheels):
        progress("checking wheels", count, len(wheels))
        wheel.verify()
    progress("checking wheels", len(wheels), len(wheels))
    return wheels


def resolve(
    scratch: Path,
    pilotfish_wheel: Wheel,
    extra_wheels: Sequence[Wheel],
    python: str,
    machine: str,
    progress: Progress,
    extras: Sequence[str] = (),
) -> list[str]:
    """Return the wheels to download, as requirements ``name==version`` with hashes.

    Raises:
        FetchError: if there is no set of wheels for that Python and machine, or no network.
    """
    names = {wheel.name for wheel in extra_wheels}
    chosen = ",".join(_chosen(extras, extra_wheels))
    requirements_in = scratch / "wanted.txt"
    requirements_in.write_text(
        f"{NAME}[{chosen}] @ {pilotfish_wheel.path.resolve().as_uri()}\n"
        + "".join(f"{wheel.name} @ {wheel.path.resolve().as_uri()}\n" for wheel in extra_wheels)
    )
    pins = scratch / "pins.txt"
    pins.write_text("\n".join(_pins(leave_out=names)))
    locked = scratch / "locked.txt"
    progress("resolving", 0, 1)
    command = _command(
        "uv",
        *(
            "pip",
            "compile",
            requirements_in,
            "--constraints",
            pins,
            "--output-file",
            locked,
            "--quiet",
        ),
        *("--python-version", python),
        *("--python-platform", f"{machine}-manylinux_2_{glibc_minor(machine, extras)}"),
        *("--only-binary", ":all:", "--generate-hashes", "--no-annotate", "--no-header"),
    )
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        what = f"The wheels for Python {python} on {machine} cannot be resolved"
        raise FetchError(f"{what}: {_reason(done.stderr)}")
    progress("resolving", 1, 1)
    return _requirements(locked.read_text())


def fetch(
    scratch: Path,
    requirements: Sequence[str],
    out: Path,
    python: str,
    machine: str,
    progress: Progress,
    extras: Sequence[str] = (),
) -> None:
    """Download the resolved wheels into ``out``, and compare each with its hashes."""
    listed = scratch / "fetch.txt"
    listed.write_text("\n".join(requirements))
    command = _command(
        "pip",
        *("download", "--requirement", listed, "--dest", out),
        *("--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-input"),
        *("--python-version", python, "--implementation", "cp", "--progress-bar", "off"),
        *("--disable-pip-version-check",),
        *(f"--platform={tag}" for tag in platforms(machine, extras)),
    )
    count = len(requirements)
    progress("fetching wheels", 0, count)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        begun = 0
        for line in process.stdout:
            lines.append(line)
            begun += line.startswith("Collecting ")
            progress("fetching wheels", max(0, begun - 1), count)
    progress("fetching wheels", count, count)
    if process.returncode != 0:
        raise FetchError(f"The wheels cannot be fetched: {_reason(''.join(lines))}")


def glibc_minor(machine: str, extras: Sequence[str] = ()) -> int:
    """Return the minor version of the newest glibc 2.x that the wheels of a bundle may require."""
    return max([_GLIBC_MINOR, *(_NEWER_GLIBC_MINOR.get((extra, machine), 0) for extra in extras)])


def platforms(machine: str, extras: Sequence[str] = ()) -> Iterator[str]:
    """Yield every compatible platform tag, since pip does not derive tags of older systems."""
    for minor in range(glibc_minor(machine, extras), 4, -1):
        yield f"manylinux_2_{minor}_{machine}"
        if minor in _OLD_NAMES:
            yield f"{_OLD_NAMES[minor]}_{machine}"


def pack(out: Path, extras: Sequence[str] = (*EXTRAS, RUNTIME_EXTRA)) -> Wheel:
    """Write a wheel of the running pilotfish from its own files, without a build tool.

    The same files give the same bytes. The metadata are those of the running installation, which
    must know the extras.
    """
    try:
        distribution = metadata.distribution(NAME)
    except metadata.PackageNotFoundError:
        distribution = None
    known = (distribution.metadata.get_all("Provides-Extra") or []) if distribution else []
    if distribution is None or not {*extras} <= {*known}:
        raise BundleError(
            "This pilotfish was not installed by pip, or its code is newer than the "
            "installation: run "
            "`pip install -e '.[bundle]'` in the folder of its source code."
        )
    files = dict(_modules(distribution))
    info = f"{NAME}-{distribution.version}.dist-info"
    for name in ("METADATA", "entry_points.txt", "top_level.txt"):
        text = distribution.read_text(name) or (
            distribution.read_text("PKG-INFO") if name == "METADATA" else None
        )
        if text is not None:
            files[f"{info}/{name}"] = text.encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: pilotfish\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = f"{info}/RECORD"
    rows = [f"{name},{_record_hash(content)},{len(content)}" for name, content in files.items()]
    files[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    path = out / f"{NAME}-{distribution.version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            member = zipfile.ZipInfo(name, _DATE)
            member.external_attr = 0o100644 << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, content)
    return Wheel.from_path(path)


def _modules(distribution: metadata.Distribution) -> Iterator[tuple[str, bytes]]:
    """Yield (name in a wheel, content) of each file of pilotfish's packages."""
    for package in sorted((distribution.read_text("top_level.txt") or "").split()):
        spec = find_spec(package)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for parent, folders, names in os.walk(folder, followlinks=True):
                folders[:] = sorted(name for name in folders if name != "__pycache__")
                for name in sorted(names):
                    path = Path(parent) / name
                    yield f"{package}/{path.relative_to(folder).as_posix()}", path.read_bytes()


def _record_hash(content: bytes) -> str:
    digest = hashlib.sha256(content).digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _checked_wheel(path: Path, python: str, machine: str) -> Wheel:
    """Return an extra wheel; raise `BundleError` if it does not fit the board."""
    if not path.is_file():
        raise BundleError(f"{path} is not a file.")
    wheel = Wheel.from_path(path)
    if not wheel.fits(python, machine):
        raise BundleError(f"The wheel {path.name} is not for Python {python} on {machine}.")
    return wheel


def _chosen(extras: Sequence[str], extra_wheels: Sequence[Wheel]) -> list[str]:
    """Return the extras of pilotfish to install: without those that extra wheels replace."""
    begins = {RUNTIME_EXTRA: RUNTIME, **{extra: extra for extra in extras}}
    names = [wheel.name for wheel in extra_wheels]
    return [
        *EXTRAS,
        *(
            extra
            for extra, begin in begins.items()
            if not any(name.startswith(begin) for name in names)
        ),
    ]


def _pins(leave_out: set[str]) -> Iterator[str]:
    """Read the tested pins, except the pins of extra wheels."""
    shipped = resources.files("pilotfish.deploy") / "constraints.txt"
    for line in shipped.read_text().splitlines():
        match = _PIN.match(line)
        if match and normalized(match["name"]) not in leave_out:
            yield line


def _requirements(locked: str) -> list[str]:
    """Return the resolver's requirements in pip's form, without requirements of local files."""
    return [line for line in locked.replace("\\\n", " ").splitlines() if _PIN.match(line)]


def _command(tool: str, *arguments: object) -> list[str]:
    """Return the command line of a tool, a Python module here; `FetchError` if it is missing."""
    if find_spec(tool) is None:
        raise FetchError(
            f"To make a bundle, {tool} is needed, which is not installed: run pip install {tool}."
        )
    return [sys.executable, "-m", tool, *map(str, arguments)]


def _reason(output: str) -> str:
    """Return the reason of a tool's failure, in one line."""
    if _UNREACHABLE.search(output):
        return "the package index cannot be reached. Make bundles on a machine with a network."
    lines = [line.strip(" │╰─▶×├") for line in output.splitlines() if line.strip()]
    return " ".join(lines) if lines else "no reason was given"
