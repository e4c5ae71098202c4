"""Rotate the edge's key in its folder; between the two steps the edge accepts both keys.

    begin    move the pair to edge.old.key and edge.old.pub, write a new edge.key and edge.pub
    finish   remove edge.old.key and edge.old.pub

A running edge applies each step when it reloads. Each step can be repeated after a kill or a full
disk: every file is written whole, and the former key is saved before it is replaced.
"""

import os
from pathlib import Path

import zmq

from pilotfish.base.errors import KeysError
from pilotfish.base.files import write_whole
from pilotfish.wire.keys import (
    EDGE,
    FORMER,
    PUBLIC_MODE,
    SECRET_MODE,
    edge_secret,
    former_secret,
    holds_key,
    locked_folder,
)

_SHARED_MODE = 0o640  # mode of secret keys that a service rereads while it runs


def begin(directory: Path) -> Path:
    """Save the edge's pair and write a new one; return the new ``edge.pub``.

    Raises `KeysError` if a rotation is in progress, or the edge has no key yet.
    """
    public = directory / f"{EDGE}.pub"
    with locked_folder(directory / f"{EDGE}.key", 0o700):
        secret, former = edge_secret(directory), former_secret(directory)
        if former is not None and former != secret:
            if holds_key(public, zmq.curve_public(secret)):
                raise KeysError(
                    f"{directory} is in a key rotation already: run `pilotfish keys rotate "
                    "--finish` once every device has the new edge.pub."
                )
        else:
            write_whole(directory / f"{FORMER}.pub", zmq.curve_public(secret) + b"\n", PUBLIC_MODE)
            _write_secret(directory / f"{FORMER}.key", secret)
            _, secret = zmq.curve_keypair()
            _write_secret(directory / f"{EDGE}.key", secret)
        write_whole(public, zmq.curve_public(secret) + b"\n", PUBLIC_MODE)
    return public


def finish(directory: Path) -> list[Path]:
    """Remove the former pair; return its files. Raises `KeysError` if there is no former pair."""
    files = [directory / f"{FORMER}.key", directory / f"{FORMER}.pub"]
    with locked_folder(files[0], 0o700):
        if not any(map(os.path.lexists, files)):
            raise KeysError(f"{directory} is not in a key rotation: there is no {FORMER}.key.")
        public = zmq.curve_public(edge_secret(directory))
        if not holds_key(directory / f"{EDGE}.pub", public) or holds_key(files[1], public):
            raise KeysError(
                f"The rotation in {directory} was cut off: run `pilotfish keys rotate` again."
            )
        for path in files:
            path.unlink(missing_ok=True)
    return files


def _write_secret(path: Path, secret: bytes) -> None:
    """Write a secret key; if root owns the folder for a service's group, let the group read it.

    Otherwise the service would have its key only as a systemd credential, which does not change
    until a restart.
    """
    group = path.parent.stat().st_gid
    if os.geteuid() == 0 and group != 0:
        write_whole(path, secret + b"\n", _SHARED_MODE, group=group)
    else:
        write_whole(path, secret + b"\n", SECRET_MODE)
