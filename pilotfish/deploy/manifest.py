"""`manifest.json` of a bundle: its purpose, and hash, size and mode of every file.

In: a folder. Out: its `BundleManifest`, or a `BundleError`.

A folder that passes `verify` holds exactly the files that the manifest names, byte for byte, and
the manifest's signature (`deploy.signatures`): no links, nothing else. `reading` returns the bytes
that the manifest describes, or fails if the folder has changed. The digest covers the whole
manifest, so it identifies the bundle. It detects damage only, since a forger can compute a new
digest; signatures detect forgery.

Standard library only: this runs on the board before anything is installed.
"""

import errno
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from pilotfish.base.prose import one_line
from pilotfish.deploy import signatures
from pilotfish.deploy.errors import BundleError

NAME = "manifest.json"
FORMAT = 1
ROOMS = ("wheels", "artifacts", "systemd", "config", "keys", "signers")
ROLES = ("device", "edge")
MACHINES = ("aarch64", "x86_64")
MODES = (0o644, 0o755, 0o600)
_MAX_BYTES = 4 << 20
_PART = re.compile(r"[A-Za-z0-9_+@!][A-Za-z0-9._+@!-]{0,199}")
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!]{0,63}")
_PYTHON = re.compile(r"3\.[0-9]{1,2}")
_CHUNK = 1 << 20

Progress = Callable[[str, int, int], None]  # (step, done, total)


@dataclass(frozen=True)
class Entry:
    """A file of a bundle. sha256: in hex. size: bytes. mode: of the installed file."""

    sha256: str
    size: int
    mode: int


@dataclass(frozen=True)
class BundleManifest:
    """A bundle's content. files: path → entry; paths are relative, with slashes."""

    version: str
    role: str
    python: str
    machine: str
    files: dict[str, Entry]

    @property
    def digest(self) -> str:
        """The SHA-256 of all other fields of the manifest, in hex."""
        plain = json.dumps(self._fields(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(plain.encode()).hexdigest()

    @property
    def name(self) -> str:
        """The name of the installed version's folder."""
        return f"{self.version}-{self.digest[:8]}"

    @property
    def size(self) -> int:
        """The size of all files, in bytes."""
        return sum(entry.size for entry in self.files.values())

    def encode(self) -> bytes:
        """Encode as the bytes of `manifest.json`."""
        fields = {"digest": self.digest, **self._fields()}
        return json.dumps(fields, indent=1, sort_keys=True).encode() + b"\n"

    def verify(self, folder: Path, progress: Progress) -> None:
        """Compare every file of a bundle with the manifest; `BundleError` names the first fault."""
        sizes = dict(_walk(folder))
        for name in (NAME, signatures.NAME):
            sizes.pop(name, None)
        for path in self.files:
            if path not in sizes:
                raise BundleError(f"The bundle is incomplete: {path} is missing.")
        done = 0
        for path, size in sizes.items():
            entry = self.files.get(path)
            if entry is None:
                raise BundleError(
                    f"The bundle contains {one_line(path)}, which its manifest does not name."
                )
            if size != entry.size or hash_file(folder / path) != entry.sha256:
                raise BundleError(
                    f"{path} differs from the bundle's manifest: copy the bundle again."
                )
            done += size
            progress("checking the bundle", done, self.size)

    def _fields(self) -> dict[str, Any]:
        return {"format": FORMAT, **asdict(self)}


def describe(folder: Path, version: str, role: str, python: str, machine: str) -> BundleManifest:
    """Return the manifest of a folder's files; secret keys get mode 0600, other files 0644."""
    files = {}
    for path, size in sorted(_walk(folder)):
        mode = 0o600 if path.startswith("keys/") and path.endswith(".key") else 0o644
        files[path] = Entry(hash_file(folder / path), size, mode)
    return _checked(BundleManifest(version, role, python, machine, files))


def read(folder: Path) -> BundleManifest:
    """Read a bundle's manifest; check its digest and every path in it."""
    return decode(read_bytes(folder))


def read_bytes(folder: Path) -> bytes:
    """Read the bytes of a bundle's manifest, unchecked."""
    path = folder / NAME
    try:
        with open_file(path) as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise BundleError(
            f"{folder} is not a bundle: {NAME} cannot be read ({error.strerror})."
        ) from error
    if len(raw) > _MAX_BYTES:
        raise BundleError(f"{path} is too large to be a bundle's manifest.")
    return raw


def decode(raw: bytes) -> BundleManifest:
    """Decode a manifest; `BundleError` for any other bytes."""
    try:
        fields = json.loads(raw, object_pairs_hook=_without_doubles)
        if fields["format"] != FORMAT:
            raise BundleError(
                f"The bundle has format {fields['format']!r}, but this pilotfish reads format "
                f"{FORMAT}: make and install the bundle with the same version of pilotfish."
            )
        files = {path: Entry(**entry) for path, entry in fields["files"].items()}
        names = ("version", "role", "python", "machine")
        manifest = BundleManifest(files=files, **{name: fields[name] for name in names})
        digest = fields["digest"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BundleError(f"{NAME} of the bundle is damaged: copy the bundle again.") from error
    if _checked(manifest).digest != digest or manifest.encode() != raw:
        raise BundleError(
            f"{NAME} of the bundle was changed: its digest does not match its content."
        )
    return manifest


def hash_file(path: Path) -> str:
    """Compute a file's SHA-256 in hex; a link in its place is an error."""
    digest = hashlib.sha256()
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def open_file(path: Path) -> BinaryIO:
    """Open a regular file of a bundle without blocking; `BundleError` for anything else."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno != errno.ELOOP:  # ELOOP: the path is a link
            raise
        raise BundleError(f"{path} is a link, not a file: copy the bundle again.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BundleError(f"{path} is not a file: copy the bundle again.")
    return os.fdopen(descriptor, "rb")


class CheckedReader:
    """A reader that hashes a file of a bundle, up to the size that the manifest names."""

    def __init__(self, file: BinaryIO, path: str, entry: Entry) -> None:
        self._file = file
        self._path = path
        self._entry = entry
        self._left = entry.size
        self._digest = hashlib.sha256()

    def read(self, size: int = -1, /) -> bytes:
        """Read the next ``size`` bytes, or the rest if ``size`` is negative."""
        wanted = self._left if size < 0 else min(size, self._left)
        data = self._file.read(wanted)
        if wanted and not data:
            raise self._changed()
        self._left -= len(data)
        self._digest.update(data)
        return data

    def finish(self) -> None:
        """Raise `BundleError` unless the whole file was read and has the manifest's hash."""
        if self._left or self._digest.hexdigest() != self._entry.sha256:
            raise self._changed()

    def _changed(self) -> BundleError:
        return BundleError(f"{self._path} of the bundle changed while it was read: copy it again.")


@contextmanager
def reading(folder: Path, path: str, entry: Entry) -> Iterator[CheckedReader]:
    """Read a file of a bundle once, to its end.

    The bytes must not be used before the block ends without an error: only then are they verified.
    """
    with open_file(folder / path) as file:
        reader = CheckedReader(file, path, entry)
        yield reader
        reader.finish()


def is_plain(path: str) -> bool:
    """Return whether a path stays below the folder that it is joined to, and is safe in a shell."""
    return all(_PART.fullmatch(part) for part in path.split("/"))


def _checked(manifest: BundleManifest) -> BundleManifest:
    """Check that the manifest's fields have the right types and its paths are plain."""
    if not (
        all(isinstance(field, str) for field in (manifest.version, manifest.python))
        and _VERSION.fullmatch(manifest.version)
        and _PYTHON.fullmatch(manifest.python)
        and manifest.role in ROLES
        and manifest.machine in MACHINES
    ):
        raise BundleError(
            f"{NAME} of the bundle is damaged: its version, role, Python or "
            "machine has a wrong form."
        )
    for path, entry in manifest.files.items():
        room, _, name = path.partition("/")
        fits = {  # "config" becomes the folder that also contains keys/ and signers/
            "config": "/" not in name and name not in ("keys", "signers"),
            "signers": "/" not in name and name.endswith(".pub"),
        }
        if not is_plain(path) or room not in ROOMS or not name or not fits.get(room, True):
            raise BundleError(
                f"The bundle's manifest names a file {path!r}, which no bundle may contain."
            )
        if not (
            isinstance(entry.sha256, str)
            and isinstance(entry.size, int)
            and type(entry.mode) is int
            and entry.mode in MODES
        ):
            raise BundleError(
                f"{NAME} of the bundle is damaged: its entry {path} has a wrong form."
            )
    return manifest


def _walk(folder: Path, below: str = "") -> Iterator[tuple[str, int]]:
    """Yield path and size of every file below a folder; refuse anything but files and folders."""
    for entry in os.scandir(folder):
        path = f"{below}{entry.name}"
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            inside = list(_walk(Path(entry.path), f"{path}/"))
            if not inside:
                raise BundleError(
                    f"The bundle contains the empty folder {one_line(path)}, but no bundle may "
                    "contain empty folders."
                )
            yield from inside
        elif stat.S_ISREG(status.st_mode):
            yield path, status.st_size
        else:
            raise BundleError(
                f"The bundle contains {one_line(path)}, which is neither a file nor a folder."
            )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a JSON object has the same key twice")
    return fields
