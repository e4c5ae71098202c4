"""Take up each step of a rotation of ``edge.key`` while a daemon serves (`wire.rotation`)."""

import logging
from collections.abc import Mapping
from pathlib import Path

import zmq

from pilotfish.base.errors import KeysError, ListenError
from pilotfish.wire.keys import EDGE, FORMER, EdgeKeys, reread_secret, is_rotating
from pilotfish.wire.transport import Listener

_log = logging.getLogger("pilotfish.edge")


class KeyRotation:
    """The secret keys that a daemon answers to. secret: the present one.

    former: the one before it, which is answered to as well during a rotation; else None.
    """

    def __init__(self, keys: EdgeKeys) -> None:
        self.secret = keys.secret
        self.former = keys.former
        self._fault = keys.fault

    def __str__(self) -> str:
        also = " (and the former one)" if self.former is not None else ""
        return f"edge.pub is {zmq.curve_public(self.secret).decode()}{also}"

    def start(self, listener: Listener) -> list[str]:
        """Answer to both keys if the daemon starts within a rotation; returns its faults."""
        if self.former is not None:
            try:
                self._overlap(listener, self.secret, self.former)
            except ListenError as error:
                self.former = None
                return [_one_key(error)]
        return [self._fault] if self._fault else []

    def reload(self, folder: Path, listener: Listener, allowed: Mapping[bytes, str]) -> list[str]:
        """Take up what the folder says; returns what stands against it. allowed: names by key.

        Another key than a rotation brings needs a restart: it might be the wrong folder's. A
        credential of systemd's is as old as this process, so the folder's own files count here.
        """
        try:
            secret = reread_secret(folder, EDGE)
            if not is_rotating(folder):
                self._finish(listener, allowed)
            elif secret is not None and (secret != self.secret or self.former is None):
                former = reread_secret(folder, FORMER)
                # also where it could not be read before
                if former not in (None, secret) and self.secret in (secret, former):
                    self._overlap(listener, secret, former)
        except KeysError as error:
            return [str(error)]
        except ListenError as error:
            return [_one_key(error)]
        if secret is None and is_rotating(folder) and self.former is None:
            return [
                f"This service may not read {folder}/{EDGE}.key, so it knows nothing of the "
                "rotation: that needs a restart."
            ]
        if secret not in (None, self.secret):
            return [
                f"{folder}/{EDGE}.key has changed without a rotation, or by more than one: that "
                "needs a restart."
            ]
        return []

    def _overlap(self, listener: Listener, secret: bytes, former: bytes) -> None:
        listener.set_secret_keys(secret, former)
        self.secret, self.former = secret, former
        _log.info(
            "new and former edge.key are both answered to: give the devices the new edge.pub, "
            "then run `pilotfish keys rotate --finish`"
        )

    def _finish(self, listener: Listener, allowed: Mapping[bytes, str]) -> None:
        if self.former is None:
            return
        behind = listener.gate.clients_of_former_key if listener.gate is not None else set()
        names = sorted(name for key, name in allowed.items() if key in behind)
        listener.set_secret_keys(self.secret, None)
        self.former = None
        _log.info("the former edge.key is answered to no longer")
        if names:
            _log.warning("devices that came by the former edge.pub last: %s", ", ".join(names))


def _one_key(error: ListenError) -> str:
    return f"Only one edge.key is answered to. {error} docs/keys.md says what to do."
