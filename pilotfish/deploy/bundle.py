"""Make a bundle: all files that turn a machine without a network into a device or an edge.

In:  artifacts, an address, keys, a Python version and a machine. Out: a folder

    wheels/      pilotfish and its requirements          systemd/  units and similar files
    artifacts/   draft or target, and further ones       config/   files of /etc/pilotfish
    keys/        this machine's pair, and the other end's public keys
    signers/     public keys of further signers for the board to trust
    manifest.json, manifest.json.sig                     `deploy.manifest`, `deploy.signatures`

The folder appears complete or not at all.
"""

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import zmq

from pilotfish.base.errors import KeysError, UnsupportedError
from pilotfish.boards.board import board_named
from pilotfish.deploy import board_record, manifest, models, signatures, wheelhouse
from pilotfish.deploy.board_record import BoardRecord
from pilotfish.deploy.errors import BundleError
from pilotfish.deploy.install import ARTIFACTS
from pilotfish.deploy.manifest import BundleManifest, Progress
from pilotfish.engines.artifact import Artifact
from pilotfish.wire import keys
from pilotfish.wire.address import require_address, require_listenable
from pilotfish.wire.transport import is_loopback

_ADDRESS = re.compile(r"tcp://(\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%A-Za-z]+\]):([0-9]{1,5})")


@dataclass(frozen=True, kw_only=True)
class BundleContents:
    """The content of a bundle to be made.

    artifacts: the machine serves the first artifact; further artifacts are installed under their
    own names. address: tcp://HOST:PORT, the edge for a device to use, or the address for an edge to
    listen on. keys: folder with the machine's keys; None: make a new pair. secret: file of the key
    to sign with; None: do not sign. signers: files of further public keys for the board to trust.
    board: the board that the artifacts were checked for (`deploy.board_check`). cpu: whether the
    configuration names the provider cpu.
    """

    role: str
    artifacts: Sequence[Path]
    address: str
    keys: Path | None
    python: str
    machine: str
    wheels: Sequence[Path] = ()
    secret: Path | None = None
    signers: Sequence[Path] = ()
    board: BoardRecord | None = None
    cpu: bool = False


def make(wanted: BundleContents, out: Path, progress: Progress) -> tuple[BundleManifest, list[str]]:
    """Make a bundle in ``out``; return its manifest and the remaining manual steps.

    Replaces an existing bundle. A key pair that was made for the old bundle is used again.
    """
    (require_address if wanted.role == "device" else require_listenable)(wanted.address)
    match = _ADDRESS.fullmatch(wanted.address)
    anywhere = match is not None and match[1] == "*"  # an edge may listen on all addresses
    if match is None or not 0 < int(match[2]) < 1 << 16 or (anywhere and wanted.role == "device"):
        raise UnsupportedError(f"{wanted.address!r} is not an address: write tcp://HOST:PORT.")
    if wanted.secret is not None:
        signatures.require_secret(wanted.secret)
    artifacts = dict(_named(wanted))
    engines = {name: _engines(wanted, artifact) for name, artifact in artifacts.items()}
    every = [engine for each in engines.values() for engine in each]
    if wanted.board is not None and wanted.board.jetpack is not None:
        models.refuse_for_jetson(every)
    with _replacing(out) as folder:
        advice = bring_keys(wanted, folder / "keys", out / "keys")
        _bring_settings(wanted, engines[ARTIFACTS[wanted.role]], folder)
        _bring_signers(wanted, folder / "signers")
        for count, (name, artifact) in enumerate(artifacts.items()):
            progress("copying artifacts", count, len(artifacts))
            artifact.verify()
            models.copy(artifact, engines[name], folder / "artifacts" / name)
        progress("copying artifacts", len(artifacts), len(artifacts))
        (folder / "wheels").mkdir()
        wheels = wheelhouse.gather(
            folder / "wheels",
            wanted.python,
            wanted.machine,
            wanted.wheels,
            progress,
            models.extras(every),
            lambda versions: models.require_runtime(every, versions),
        )
        version = next(wheel.version for wheel in wheels if wheel.name == wheelhouse.NAME)
        progress("writing the manifest", 0, 1)
        content = manifest.describe(folder, version, wanted.role, wanted.python, wanted.machine)
        (folder / manifest.NAME).write_bytes(content.encode())
        if wanted.secret is not None:
            signature = signatures.sign(content.encode(), wanted.secret)
            (folder / signatures.NAME).write_bytes(signature)
        progress("writing the manifest", 1, 1)
    if wanted.role == "edge" and (served := engines[ARTIFACTS["edge"]]):
        key = models.largest(served)
        advice.append(
            f"build the engine with more --slots and --context if {key.slots} sessions of "
            f"{key.context} tokens are too few: the edge serves what its engine can"
        )
    return content, advice


def _engines(wanted: BundleContents, artifact: Artifact) -> list[models.PackedEngine]:
    """Check an artifact's engines and return them; none if the machine computes on its CPU."""
    board = wanted.board and wanted.board.board
    if wanted.cpu or (board and not board_named(board).gpu):
        return []
    return models.engines_of(artifact)


def _named(wanted: BundleContents) -> Iterator[tuple[str, Artifact]]:
    """Yield each artifact with its name in the bundle; check that the board's Python can run it."""
    taken: set[str] = set()
    for path in wanted.artifacts:
        name = path.resolve().name if taken else ARTIFACTS[wanted.role]
        if name in taken or not manifest.is_plain(name):
            raise BundleError(
                f"The folder {path} cannot be called {name!r} in the bundle: rename the folder."
            )
        taken.add(name)
        yield name, models.open_artifact(path, wanted.python)


def _bring_settings(
    wanted: BundleContents, engines: Sequence[models.PackedEngine], folder: Path
) -> None:
    """Write the units and the role's configuration, an example file with the bundle's address."""
    for name in ("systemd", "config"):
        (folder / name).mkdir()
    shipped = resources.files("pilotfish") / "systemd"
    for source in shipped.iterdir():
        if source.name.endswith(".conf") and wanted.role == "device":
            (folder / "config" / source.name).write_bytes(source.read_bytes())
        elif not source.name.endswith((".conf", ".toml")):
            (folder / "systemd" / source.name).write_bytes(source.read_bytes())
    key = "edge" if wanted.role == "device" else "listen"
    for name in ("device.toml", "watch.toml") if wanted.role == "device" else ("edge.toml",):
        text = (shipped / name).read_text()
        text = re.sub(rf"(?m)^{key} = .*$", f'{key} = "{wanted.address}"', text)
        if not (folder / "keys").is_dir():
            text = re.sub(r"(?m)^keys = ", "#keys = ", text)
        if name == "edge.toml":
            text = models.edge_settings(text, engines)
        if wanted.cpu and not name.startswith("watch"):
            text += '\nprovider = "cpu"  # chosen by --cpu of `pilotfish bundle`\n'
        (folder / "config" / name).write_text(text)
    if wanted.board is not None:
        (folder / "config" / board_record.NAME).write_bytes(wanted.board.encode())


def _bring_signers(wanted: BundleContents, folder: Path) -> None:
    for path in wanted.signers:
        key = signatures.read_public(path)
        target = folder / f"{path.stem}.pub"
        if target.exists() or not manifest.is_plain(target.name):
            raise BundleError(
                f"The file {path} cannot be called {target.name!r} in the bundle: rename the file."
            )
        folder.mkdir(exist_ok=True)
        target.write_bytes(signatures.public_file(key))


def bring_keys(wanted: BundleContents, folder: Path, former: Path) -> list[str]:
    """Write this machine's keys; return the steps to take on the other end.

    former: folder of the replaced bundle's keys, which the other end may know already.
    """
    if wanted.keys is not None and not wanted.keys.is_dir():
        raise KeysError(f"{wanted.keys} is not a folder of keys.")
    sources = [path for path in (wanted.keys, former) if path is not None]
    if wanted.role == "edge":
        return _bring_edge_keys(wanted, folder, sources, former)
    public = (wanted.keys or keys.default_directory()) / f"{keys.EDGE}.pub"
    if not public.is_file():
        if wanted.keys is None and is_loopback(wanted.address):
            return []
        raise KeysError(
            f"{public} is missing: copy edge.pub from the edge's key folder into a folder, and "
            "name that folder with --keys."
        )
    with_pair = next((path for path in sources if (path / f"{keys.DEVICE}.key").exists()), None)
    pair = keys.DeviceKeys.load(with_pair) if with_pair else None
    _pair(folder, keys.DEVICE, (pair.secret, pair.public) if pair else None)
    _put(folder / public.name, keys.read_public(public))
    # the pair is the same as before, so the edge may know it
    if with_pair is not None and with_pair == former:
        return []
    unless = "" if pair is None else ", unless the edge knows this device already"
    file = "(the file is in the bundle's folder keys)"
    return [f"on the edge{unless}: run `pilotfish keys allow device.pub` {file}"]


def _bring_edge_keys(
    wanted: BundleContents, folder: Path, sources: Sequence[Path], former: Path
) -> list[str]:
    with_pair = next((path for path in sources if (path / f"{keys.EDGE}.key").exists()), None)
    secret = keys.EdgeKeys.load(with_pair).secret if with_pair else None
    _pair(folder, keys.EDGE, (secret, zmq.curve_public(secret)) if secret else None)
    allowed = sorted((wanted.keys / "allowed").glob("*.pub")) if wanted.keys else []
    for path in allowed:
        (folder / "allowed").mkdir(exist_ok=True)
        _put(folder / "allowed" / path.name, keys.read_public(path))
    advice = []
    # the pair is new, so the devices lack its public key
    if with_pair is None or with_pair != former:
        advice.append("give every device the edge's public key: the bundle's keys/edge.pub")
    if not allowed:
        advice.append("allow devices on the edge: pilotfish keys allow …")
    return advice


def _pair(folder: Path, name: str, pair: tuple[bytes, bytes] | None) -> None:
    """Write a key pair (secret, public); None: make a new pair."""
    if pair is None:
        keys.create(folder, name)
        return
    folder.mkdir()
    _put(folder / f"{name}.key", pair[0], 0o600)
    _put(folder / f"{name}.pub", pair[1])


def _put(path: Path, key: bytes, mode: int = 0o644) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key + b"\n")


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Yield a hidden folder; at the end it replaces ``out``, after an error it is removed."""
    if out.exists() and not _is_ours(out):
        raise BundleError(
            f"The folder {out} contains something other than a bundle: choose another --out."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    old = out.parent / f".{out.name}.old-{os.getpid()}"
    partial.mkdir(mode=0o700)
    try:
        yield partial
        partial.chmod(0o755)
        if out.exists():
            out.rename(old)
        partial.rename(out)
    finally:
        if (
            old.exists() and not out.exists()
        ):  # an interrupted run left this folder, which then has the only copy of the keys
            old.rename(out)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _is_ours(out: Path) -> bool:
    """Return whether a folder may be replaced: it is empty or a bundle."""
    if not out.is_dir():
        return False
    try:
        return "role" in json.loads((out / manifest.NAME).read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return not any(out.iterdir())
