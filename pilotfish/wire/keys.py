"""CURVE keys on disk: one folder for each machine, with the edge's allow-list.

    NAME.key        secret key, readable by its owner only      (edge.key, device.key)
    NAME.pub        public key                                  (device side also: the edge's)
    edge.old.key    the edge's former key during a rotation (`wire.rotation`)
    edge.address    on a device: the address of the edge at which it was enrolled
    allowed/*.pub   public keys of the devices that the edge admits, each key once

Each file holds one key in Z85, 40 characters, and is written whole or not at all. A device needs
``device.key`` and ``edge.pub``, an edge ``edge.key`` and ``allowed/``; one folder may serve both
ends, as in the demo and in tests.

Under systemd's ``LoadCredential=`` a secret key is in ``$CREDENTIALS_DIRECTORY`` instead, which
only the service can read. The public keys stay in the folder.
"""

import fcntl
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

import zmq
from zmq.utils import z85

from pilotfish.base.errors import KeysError
from pilotfish.base.files import sync, write_whole
from pilotfish.base.home import user_folder
from pilotfish.base.prose import one_line
from pilotfish.base.reading import without_bom

EDGE = "edge"
DEVICE = "device"
FORMER = f"{EDGE}.old"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_WISH = 56  # maximum characters of a name that a device chooses; a number may follow
SECRET_MODE, PUBLIC_MODE = 0o600, 0o644
_MAX_KEY_BYTES = 1024  # maximum number of bytes that are read of a key file


def default_directory() -> Path:
    """Return ``$PILOTFISH_KEYS``, else ``pilotfish/keys`` in the user's configuration folder.

    For a user without a home the path begins with ``~``, for the help text; its use raises
    `KeysError`.
    """
    if chosen := os.environ.get("PILOTFISH_KEYS"):
        return Path(chosen)
    config = user_folder("XDG_CONFIG_HOME", ".config")
    return (Path("~/.config") if config is None else config) / "pilotfish" / "keys"


def _require_home(directory: Path) -> None:
    """Raise `KeysError` for the default folder of a user without a home."""
    if directory.parts[:1] == ("~",):
        raise KeysError(
            "This user has no home folder, so there is no default folder for keys: name a folder "
            "with --keys or "
            "PILOTFISH_KEYS, or set HOME."
        )


@dataclass(frozen=True)
class DeviceKeys:
    """The keys with which a device reaches its edge."""

    secret: bytes
    public: bytes
    edge: bytes

    @classmethod
    def load(cls, directory: Path) -> "DeviceKeys":
        """Read ``device.key`` and ``edge.pub``; `KeysError` names a missing file."""
        secret = _read_secret(directory, DEVICE)
        _require_home(directory)
        edge = directory / f"{EDGE}.pub"
        if not edge.exists():
            raise KeysError(
                f"{edge} is missing: copy edge.pub from the edge's key folder to this device."
            )
        return cls(secret, zmq.curve_public(secret), read_public(edge))


@dataclass(frozen=True)
class AllowList:
    """The devices that an edge admits.

    names: public key → name of its file as one printable line. broken: one sentence for each file
    that is ignored, with the reason.
    """

    names: Mapping[bytes, str]
    broken: tuple[str, ...] = ()

    @classmethod
    def load(cls, directory: Path) -> "AllowList":
        """Read ``allowed/`` of a folder of keys; without that folder the list is empty.

        A broken file shuts out its own device only. `KeysError`: the folder cannot be read, so its
        keys are unknown.
        """
        _require_home(directory)
        if not directory.is_dir():
            raise KeysError(f"{directory} is not a folder of keys.")
        names: dict[bytes, str] = {}
        broken = []
        for path in _list_allowed(directory):
            try:
                key = read_public(path)
            except KeysError as error:
                broken.append(str(error))
                continue
            if key in names:
                broken.append(
                    f"{path} holds the same key as {names[key]}.pub in this folder: `pilotfish "
                    f"keys deny {quote(names[key])}` removes both files, and `pilotfish keys "
                    "allow` then adds the key once."
                )
            else:
                names[key] = one_line(path.stem)
        return cls(names, tuple(broken))


@dataclass(frozen=True)
class EdgeKeys:
    """The edge's secret key and the devices that it admits.

    former: the former secret key, accepted during a rotation. fault: the reason why the former key
    cannot be read.
    """

    secret: bytes
    allow_list: AllowList
    former: bytes | None = None
    fault: str = ""

    @classmethod
    def load(cls, directory: Path) -> "EdgeKeys":
        """Read ``edge.key`` and the allow-list, which may be empty."""
        secret, former, fault = edge_secret(directory), None, ""
        try:
            former = former_secret(directory)
        except KeysError as error:  # devices with the new edge.pub are still served
            fault = str(error)
        allow_list = AllowList.load(directory)
        return cls(secret, allow_list, None if former == secret else former, fault)

    @property
    def allowed(self) -> Mapping[bytes, str]:
        """The public keys of its devices, with their names."""
        return self.allow_list.names


def edge_secret(directory: Path) -> bytes:
    """Read the edge's secret key; raises `KeysError`."""
    return _read_secret(directory, EDGE)


def device_secret(directory: Path) -> bytes:
    """Read the device's secret key; raises `KeysError`."""
    return _read_secret(directory, DEVICE)


def is_rotating(directory: Path) -> bool:
    """Return whether a rotation is in progress: the edge accepts the former key, too."""
    return os.path.lexists(directory / f"{FORMER}.key")


def former_secret(directory: Path) -> bytes | None:
    """Read the key that a rotation replaces; None without a rotation."""
    return _read_secret(directory, FORMER) if is_rotating(directory) else None


def reread_secret(directory: Path, name: str) -> bytes | None:
    """Reread a secret key's file while its service runs; None: only systemd can read the file.

    The credential from systemd does not change while the service runs.
    """
    try:
        return _read_own_secret(directory, name)
    except KeysError as error:
        ours = not isinstance(error.__cause__, PermissionError | FileNotFoundError)
        if ours or _credential_path(name) is None:
            raise
        return None


def create(directory: Path, name: str) -> Path:
    """Write a new pair ``NAME.key`` and ``NAME.pub``; return the public file. Never overwrites."""
    _check_name(name)
    secret_path, public_path = directory / f"{name}.key", directory / f"{name}.pub"
    with locked_folder(secret_path, 0o700):
        for path in (secret_path, public_path):
            if path.exists():
                raise KeysError(f"{path} exists already; remove it first if it is to be replaced.")
        public, secret = zmq.curve_keypair()
        write_whole(secret_path, secret + b"\n", SECRET_MODE)
        try:
            write_whole(public_path, public + b"\n", PUBLIC_MODE)
        except OSError:
            secret_path.unlink()
            raise
    return public_path


def allow(directory: Path, public: Path, name: str | None = None) -> Path:
    """Add a device's public key file to the allow-list; replace a broken file of that name."""
    key = read_public(public)
    chosen = name or public.stem
    _check_name(chosen)
    target = directory / "allowed" / f"{chosen}.pub"
    with locked_folder(target, 0o755):
        if _holds_another(target, key):
            raise KeysError(
                f"{target} holds another key already; give this device another name with --name."
            )
        for other in _list_allowed(directory):
            if other != target and holds_key(other, key):
                raise KeysError(
                    f"{other} allows this key already, under the name {one_line(other.stem)}: to "
                    f"call it {chosen}, run `pilotfish keys deny {quote(one_line(other.stem))}` "
                    "first."
                )
        write_whole(target, key + b"\n", PUBLIC_MODE)
    return target


def enrol(directory: Path, key: bytes, name: str, *, exact: bool = False) -> str:
    """Add a device's public key to the allow-list under a free name, and return that name.

    A key that is on the list keeps its name. No file is ever replaced: if a file has the name, the
    device gets ``NAME-2``, ``NAME-3``, …; exact: raise `KeysError` instead. name: any text, such
    as a host name; characters that a name cannot have become dashes.
    """
    _check_name(wish := valid_name(name))
    with locked_folder(directory / "allowed" / f"{wish}.pub", 0o755):
        listed = _list_allowed(directory)
        for path in listed:
            if holds_key(path, key):
                return one_line(path.stem)
        names = {path.stem for path in listed}
        numbered = (f"{wish}-{number}" for number in range(2, len(listed) + 3))
        free = next(each for each in (wish, *numbered) if each not in names)
        if exact and free != wish:
            raise KeysError(
                f"{directory}/allowed/{wish}.pub exists already, with another key: invite the "
                "device under another name."
            )
        write_whole(directory / "allowed" / f"{free}.pub", key + b"\n", PUBLIC_MODE)
    return free


def expect_free_name(directory: Path, name: str) -> None:
    """Raise `KeysError` unless a device of this name can be added to the allow-list."""
    if name != valid_name(name):
        raise KeysError(
            f"{one_line(name)} cannot be a device's name: {valid_name(name)} could be one."
        )
    if (directory / "allowed" / f"{name}.pub").exists():
        raise KeysError(f"{directory}/allowed has a device {name} already: choose another name.")


def valid_name(name: str) -> str:
    """Return the valid name of a key that is most like this text, such as a host name."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("._-")
    return plain[:_MAX_WISH].rstrip("._-") or DEVICE


def deny(directory: Path, name: str) -> list[Path]:
    """Remove a device from the allow-list; return the files that were removed.

    These files are the file of this name, and all others with the same key.
    """
    allowed = directory / "allowed"
    target = allowed / f"{name}.pub"
    listed = _list_allowed(directory)
    if target not in listed:
        names = ", ".join(one_line(path.stem) for path in listed) or "nobody"
        raise KeysError(f"{target} does not exist; the list allows {names}.")
    with locked_folder(target, 0o755):
        try:
            key = read_public(target)
        except KeysError:  # a broken file admitted nobody
            same = [target]
        else:
            same = [path for path in listed if path == target or holds_key(path, key)]
        for path in same:
            path.unlink(missing_ok=True)
        sync(allowed)
    return same


def listing(directory: Path) -> list[dict[str, str]]:
    """List all keys of a folder: name, kind (``pair``, ``public`` or ``allowed``), public key."""
    _require_home(directory)
    rows = []
    for path in sorted(directory.glob("*.pub")):
        kind = "pair" if path.with_suffix(".key").exists() else "public"
        rows.append({"name": path.stem, "kind": kind, "public": read_public(path).decode()})
    rows += [
        {"name": path.stem, "kind": "allowed", "public": read_public(path).decode()}
        for path in _list_allowed(directory)
    ]
    return rows


def read_public(path: Path) -> bytes:
    """Read one public key file, in Z85."""
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        return _require_key(_read_start(path), path)
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}.") from error


def _read_start(path: Path) -> bytes:
    """Read the start of a file without blocking, since it may be a pipe, or endless."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return without_bom(os.read(descriptor, _MAX_KEY_BYTES)).strip()
    finally:
        os.close(descriptor)


def _holds_another(path: Path, key: bytes) -> bool:
    try:
        return read_public(path) != key
    except KeysError:  # the file is missing or broken
        return False


def holds_key(path: Path, key: bytes) -> bool:
    """Return whether a public key file holds this key; False if it is missing or broken."""
    try:
        return read_public(path) == key
    except KeysError:
        return False


@contextmanager
def locked_folder(path: Path, mode: int) -> Iterator[None]:
    """Lock the file's folder for writing; create it with this mode if it is missing."""
    _require_home(path)
    try:
        if not path.parent.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True, mode=mode)
            path.parent.chmod(mode)  # overrides the umask: a service's user must read the folder
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
    except OSError as error:
        raise KeysError(f"{path} cannot be written: {error.strerror}.") from error


def _list_allowed(directory: Path) -> list[Path]:
    """List the files of the allow-list; raise `KeysError` if the folder cannot be read."""
    allowed = directory / "allowed"
    try:
        return sorted(path for path in allowed.iterdir() if path.suffix == ".pub")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise KeysError(f"{allowed} cannot be read: {error.strerror}.") from error


def _read_secret(directory: Path, name: str) -> bytes:
    credential = _credential_path(name)
    if credential is not None:
        # systemd grants the service's user access by an ACL, so the file's mode does not matter
        return _read(credential)
    return _read_own_secret(directory, name)


def _credential_path(name: str) -> Path | None:
    """Return the path of systemd's credential with a secret key; None without one."""
    folder = os.environ.get("CREDENTIALS_DIRECTORY")
    path = Path(folder) / f"{name}.key" if folder else None
    # our units load a blank placeholder if the file is missing
    return path if path is not None and path.exists() and path.read_bytes().strip() else None


def _read_own_secret(directory: Path, name: str) -> bytes:
    _require_home(directory)
    path = directory / f"{name}.key"
    try:
        mode = path.stat().st_mode
        secret = _read_start(path)
    except FileNotFoundError as error:
        raise KeysError(
            f"{path} is missing: make it with `pilotfish keys new {name} --keys {directory}`."
        ) from error
    except OSError as error:
        raise KeysError(f"{path} cannot be read: {error.strerror}.") from error
    if mode & stat.S_IRWXO:
        raise KeysError(f"{path} is open to every user of this machine: run `chmod 600 {path}`.")
    return _require_key(secret, path)


def _require_key(key: bytes, path: Path) -> bytes:
    try:
        if len(z85.decode(key)) == 32:
            return key
    except (ValueError, KeyError, struct.error):  # struct.error: five characters exceed 32 bits
        pass
    raise KeysError(f"{path} does not hold a key: 40 characters of Z85 are expected.")


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise KeysError(
            f"{name!r} is not a valid key name: use letters, digits, dots, dashes, underscores."
        )
