"""CURVE keys on disk: one folder per machine, and the edge's allow-list.

    NAME.key        secret key, readable by its owner only      (edge.key, device.key)
    NAME.pub        public key                                  (device side also: the edge's)
    allowed/*.pub   public keys of the devices that the edge lets in

Each file holds one key in Z85, 40 characters. A device needs ``device.key`` and ``edge.pub``, an
edge ``edge.key`` and ``allowed/``; one folder may serve both ends, as in the demo and in tests.

Under systemd's ``LoadCredential=`` a secret key lies in ``$CREDENTIALS_DIRECTORY`` instead, which
only the service can read; the public ones stay in the folder.
"""

import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from wire.errors import KeysError

EDGE = "edge"
DEVICE = "device"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def default_directory() -> Path:
    """``$PILOTFISH_KEYS``, else ``pilotfish/keys`` in the user's configuration folder."""
    chosen = os.environ.get("PILOTFISH_KEYS")
    if chosen:
        return Path(chosen)
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config) / "pilotfish" / "keys"


@dataclass(frozen=True)
class DeviceKeys:
    """What a device needs to reach its edge."""

    secret: bytes
    public: bytes
    edge: bytes

    @classmethod
    def load(cls, directory: Path) -> "DeviceKeys":
        """Read ``device.key`` and ``edge.pub``; `KeysError` says which one is missing and why."""
        secret = _read_secret(directory, DEVICE)
        edge = directory / f"{EDGE}.pub"
        if not edge.exists():
            raise KeysError(
                f"{edge} is missing: copy edge.pub from the edge's key folder to this device."
            )
        return cls(secret, zmq.curve_public(secret), read_public(edge))


@dataclass(frozen=True)
class EdgeKeys:
    """What an edge needs to let devices in, and only those.

    allowed: the public keys of its devices, and their names.
    """

    secret: bytes
    allowed: Mapping[bytes, str]

    @classmethod
    def load(cls, directory: Path) -> "EdgeKeys":
        """Read ``edge.key`` and the allow-list, which may be empty."""
        secret = _read_secret(directory, EDGE)
        return cls(secret, {read_public(path): path.stem for path in _listed(directory)})


def create(directory: Path, name: str) -> Path:
    """Make a new pair ``NAME.key`` and ``NAME.pub``; returns the public file. Never overwrites."""
    _check_name(name)
    secret_path, public_path = directory / f"{name}.key", directory / f"{name}.pub"
    for path in (secret_path, public_path):
        if path.exists():
            raise KeysError(f"{path} exists already; remove it first if it is to be replaced.")
    public, secret = zmq.curve_keypair()
    with _writing(secret_path):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(secret_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret + b"\n")
        public_path.write_bytes(public + b"\n")
    return public_path


def allow(directory: Path, public: Path, name: str | None = None) -> Path:
    """Put a device's public key file on the allow-list of ``directory``."""
    key = read_public(public)
    chosen = name or public.stem
    _check_name(chosen)
    target = directory / "allowed" / f"{chosen}.pub"
    if target.exists() and read_public(target) != key:
        raise KeysError(
            f"{target} holds another key already; give this device another name with --name."
        )
    with _writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(key + b"\n")
    return target


def listing(directory: Path) -> list[dict[str, str]]:
    """All keys of a folder: name, kind (``pair``, ``public`` or ``allowed``) and public key."""
    rows = []
    for path in sorted(directory.glob("*.pub")):
        kind = "pair" if path.with_suffix(".key").exists() else "public"
        rows.append({"name": path.stem, "kind": kind, "public": read_public(path).decode()})
    rows += [
        {"name": path.stem, "kind": "allowed", "public": read_public(path).decode()}
        for path in _listed(directory)
    ]
    return rows


def read_public(path: Path) -> bytes:
    """One public key file, in Z85."""
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        return _checked(path.read_bytes().strip(), path)
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}.") from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise KeysError(f"{path} cannot be written: {error.strerror}.") from error


def _listed(directory: Path) -> list[Path]:
    """The files of the allow-list; a list that cannot be read is not an empty one."""
    allowed = directory / "allowed"
    try:
        return sorted(path for path in allowed.iterdir() if path.suffix == ".pub")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise KeysError(f"{allowed} cannot be read: {error.strerror}.") from error


def _read_secret(directory: Path, name: str) -> bytes:
    credentials = os.environ.get("CREDENTIALS_DIRECTORY")
    handed = Path(credentials) / f"{name}.key" if credentials else None
    # blank: our units' stand-in for a file that is not there
    if handed is not None and handed.exists() and handed.read_bytes().strip():
        # who may read it is systemd's business: it gives the service's user access by an ACL
        return _read(handed)
    path = directory / f"{name}.key"
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
    except FileNotFoundError:
        raise KeysError(
            f"{path} is missing: make it with `pilotfish keys new {name} --keys {directory}`."
        ) from None
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}.") from error
    if mode & stat.S_IRWXO:
        raise KeysError(f"{path} is open to every user of this machine: run `chmod 600 {path}`.")
    return _checked(secret, path)


def _checked(key: bytes, path: Path) -> bytes:
    try:
        if len(z85.decode(key)) == 32:
            return key
    except (ValueError, KeyError, struct.error):  # the last: five characters beyond 32 bits
        pass
    raise KeysError(f"{path} does not hold a key: 40 characters of Z85 are expected.")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise KeysError(f"{name!r} is no key name: use letters, digits, dots, dashes, underscores.")
