"""Read, check and unpack wheels. A wheel is a zip archive with a list of its files.

In:  `NAME-VERSION(-BUILD)-PYTHON-ABI-PLATFORM.whl`. Out: its files below a version's folder.
Guarantees: exactly the files that the wheel's RECORD lists are unpacked, and each has the listed
hash; no path leaves the folder. The layout follows PyPA's binary distribution format: the wheel's
root is `purelib` or `platlib`, and `NAME.data/…` goes elsewhere.

Standard library only: this runs on the board before anything is installed.
"""

import base64
import csv
import errno
import hashlib
import io
import os
import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import IO

from pilotfish.deploy.errors import BundleError
from pilotfish.deploy.manifest import hash_file

SITE = "site"
# Folder of `NAME.data` → target in the version's folder. There is no other target, so that a
# wheel cannot write, for example, units.
_SCHEMES = {
    "purelib": SITE,
    "platlib": SITE,
    "scripts": "bin",
    "data": "data",
    "headers": "include",
}
# Errors that reading a damaged archive raises; RuntimeError: the archive is encrypted.
_DAMAGE = (zipfile.BadZipFile, zlib.error, csv.Error, EOFError, ValueError, RuntimeError)
_FILE = re.compile(
    r"(?P<name>[A-Za-z0-9_.]+)-(?P<version>[A-Za-z0-9_.!+]+)(-[0-9][A-Za-z0-9_.]*)?"
    r"-(?P<python>[a-z0-9_.]+)-(?P<abi>[a-z0-9_.]+)-(?P<platform>[A-Za-z0-9_.]+)\.whl"
)
_INTERPRETER = re.compile(r"(py|cp)3(\d*)")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_CHUNK = 1 << 20


def normalized(name: str) -> str:
    """Normalize a distribution's name for comparison."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Wheel:
    """A wheel on disk, described by its file name."""

    path: Path
    name: str
    version: str
    python: str
    abi: str
    platform: str

    @classmethod
    def from_path(cls, path: Path) -> "Wheel":
        """Parse a wheel's path; `BundleError` if the file is not named like one."""
        match = _FILE.fullmatch(path.name)
        if match is None:
            raise BundleError(f"{path.name} is not named like a wheel.")
        fields = match.groupdict()
        return cls(path, normalized(fields.pop("name")), **fields)

    def fits(self, python: str, machine: str) -> bool:
        """Return whether CPython ``3.N`` can use the wheel on Linux on this kind of machine."""
        minor = int(python.partition(".")[2])
        platforms = self.platform.split(".")
        return any(
            name == "any" or (name.endswith(f"_{machine}") and "linux" in name)
            for name in platforms
        ) and any(_fits(tag, abi, minor) for tag in self.python.split(".") for abi in self._abis)

    @property
    def _abis(self) -> list[str]:
        return self.abi.split(".")

    def verify(self) -> None:
        """Read every file and compare it with RECORD; `BundleError` names the first fault."""
        with _opened(self.path) as archive:
            for info, digest in _listed(archive, self.path.name):
                what = f"{info.filename} in {self.path.name}"
                with _reading(what), archive.open(info) as source:
                    _copy(source, None, digest, what)

    def unpack(self, folder: Path, interpreter: str, content: IO[bytes] | None = None) -> None:
        """Unpack the files to their places below a version's folder.

        interpreter: path that replaces `#!python` in scripts. content: the wheel's bytes; None:
        read them from the wheel's path.
        """
        with _opened(self.path, content) as archive:
            for info, digest in _listed(archive, self.path.name):
                target = folder / placed(info.filename)
                what = f"{info.filename} in {self.path.name}"
                if target.exists():  # two wheels may share a file, such as an empty __init__.py
                    if bytes.fromhex(hash_file(target)) != digest:
                        raise BundleError(f"{what} is in another wheel too, with other content.")
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                runs = info.external_attr >> 16 & 0o111 or target.parent == folder / "bin"
                descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                with os.fdopen(descriptor, "wb") as out:
                    with _reading(what), archive.open(info) as source:
                        _copy(source, out, digest, what)
                    os.fchmod(out.fileno(), 0o755 if runs else 0o644)
                if target.parent == folder / "bin":
                    _name_interpreter(target, interpreter)

    def metadata(self) -> dict[str, list[str]]:
        """Read METADATA: every field with its values."""
        with _opened(self.path) as archive:
            names = [
                name
                for name in archive.namelist()
                if name.count("/") == 1 and name.endswith(".dist-info/METADATA")
            ]
            if len(names) != 1:
                raise BundleError(f"{self.path.name} has no METADATA.")
            with _reading(f"{names[0]} in {self.path.name}"):
                message = HeaderParser().parsestr(archive.read(names[0]).decode())
        return {key: list(message.get_all(key, [])) for key in dict.fromkeys(message.keys())}


def placed(name: str) -> str:
    """Return where a wheel's member goes, relative to the version's folder."""
    parts = name.split("/")
    if not parts[0].endswith(".data"):
        return f"{SITE}/{name}"
    if len(parts) < 3 or parts[1] not in _SCHEMES:
        raise BundleError(
            f"A wheel contains {name}, which has no target folder in an installation."
        )
    return "/".join([_SCHEMES[parts[1]], *parts[2:]])


def _fits(tag: str, abi: str, minor: int) -> bool:
    match = _INTERPRETER.fullmatch(tag)
    if match is None:
        return False
    named = int(match[2]) if match[2] else None
    if match[1] == "py":
        return abi == "none" and (named is None or named <= minor)
    if abi == "abi3":
        return named is not None and named <= minor
    return named == minor and abi in ("none", f"cp3{minor}")


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn all errors of a damaged archive into a `BundleError` that names the archive."""
    try:
        yield
    except _DAMAGE as error:
        raise BundleError(f"{what} is damaged: {error}.") from error
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # an error of the disk, not of the archive
            raise
        raise BundleError(f"{what} is damaged: {error}.") from error


def _opened(path: Path, content: IO[bytes] | None = None) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path if content is None else content)
    except (OSError, *_DAMAGE) as error:
        raise BundleError(f"{path.name} is not a wheel, or is damaged: {error}.") from error


def _listed(archive: zipfile.ZipFile, wheel: str) -> Iterator[tuple[zipfile.ZipInfo, bytes]]:
    """Yield every file with the SHA-256 that RECORD gives; RECORD itself with its own SHA-256."""
    files = [info for info in archive.infolist() if not info.is_dir()]
    names = [info.filename for info in files]
    records = [
        name for name in names if name.count("/") == 1 and name.endswith(".dist-info/RECORD")
    ]
    if len(records) != 1 or len(set(names)) != len(names):
        raise BundleError(f"{wheel} is damaged: it has no RECORD, or has a file twice.")
    if any(info.compress_type not in _METHODS for info in files):
        raise BundleError(f"{wheel} uses a compression that wheels may not use, or is damaged.")
    with _reading(f"The RECORD of {wheel}"):
        raw = archive.read(records[0])
    hashes = _record(raw, wheel)
    hashes[records[0]] = hashlib.sha256(raw).digest()
    if missing := next((name for name in hashes if name not in set(names)), None):
        raise BundleError(f"{wheel} is incomplete: it lacks {missing}, which its RECORD names.")
    for info in files:
        mode = info.external_attr >> 16
        if not _is_inside(info.filename) or (stat.S_IFMT(mode) and not stat.S_ISREG(mode)):
            raise BundleError(
                f"{wheel} contains a file {info.filename!r}, which no wheel may contain."
            )
        if info.filename not in hashes:
            raise BundleError(f"{wheel} contains {info.filename}, which its RECORD does not name.")
        yield info, hashes[info.filename]


def _record(raw: bytes, wheel: str) -> dict[str, bytes]:
    """Read RECORD: name → SHA-256. Rows without a hash (RECORD, signatures) are skipped."""
    hashes = {}
    with _reading(f"The RECORD of {wheel}"):
        for row in csv.reader(io.StringIO(raw.decode(), newline="")):
            if len(row) > 1 and row[1]:
                kind, _, value = row[1].partition("=")
                if kind != "sha256":
                    raise ValueError(f"a hash of kind {kind}")
                hashes[row[0]] = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
    return hashes


def _is_inside(name: str) -> bool:
    """Return whether a member's name, joined to a folder, stays below that folder."""
    parts = name.split("/")
    return "\\" not in name and "\0" not in name and not {"", ".", ".."} & set(parts)


def _copy(source: IO[bytes], out: IO[bytes] | None, sha: bytes, what: str) -> None:
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK):
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
    if digest.digest() != sha:
        raise BundleError(f"{what} differs from the wheel's RECORD.")


def _name_interpreter(script: Path, interpreter: str) -> None:
    """Replace `#!python` in a script of `NAME.data/scripts`, as the format requires."""
    text = script.read_bytes()
    for generic in (b"#!pythonw", b"#!python"):
        if text.startswith(generic):
            script.write_bytes(b"#!" + interpreter.encode() + text[len(generic) :])
            return
