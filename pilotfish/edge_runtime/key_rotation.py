"""Apply the steps of a rotation of ``edge.key`` while a daemon serves (`wire.rotation`)."""

import logging
from collections.abc import Mapping
from pathlib import Path

import zmq

from pilotfish.base.errors import KeysError, ListenError
from pilotfish.wire.keys import EDGE, FORMER, EdgeKeys, is_rotating, reread_secret
from pilotfish.wire.transport import Listener

_log = logging.getLogger("pilotfish.edge")


class KeyRotation:
    """Secret keys with which a daemon accepts connections.

    secret: the present key. former: during a rotation, the key before it; else None.
    """

    def __init__(self, keys: EdgeKeys) -> None:
        self.secret = keys.secret
        self.former = keys.former
        self._fault = keys.fault

    def __str__(self) -> str:
        also = " (and the former key is accepted)" if self.former is not None else ""
        return f"edge.pub is {zmq.curve_public(self.secret).decode()}{also}"

    def start(self, listener: Listener) -> list[str]:
        """Accept both keys if the daemon starts during a rotation; return problems."""
        if self.former is not None:
            try:
                self._use_both(listener, self.secret, self.former)
            except ListenError as error:
                self.former = None
                return [_one_key_message(error)]
        return [self._fault] if self._fault else []

    def reload(self, folder: Path, listener: Listener, allowed: Mapping[bytes, str]) -> list[str]:
        """Apply the keys in ``folder``; return problems. allowed: key → device name.

        A changed key without a rotation is not applied: it may be the wrong folder, so the operator
        must restart the daemon. The keys are read from the files, since a systemd credential never
        changes during the life of a process.
        """
        try:
            secret = reread_secret(folder, EDGE)
            if not is_rotating(folder):
                self._finish(listener, allowed)
            elif secret is not None and (secret != self.secret or self.former is None):
                former = reread_secret(folder, FORMER)
                # this also applies a former key that was unreadable at an earlier reload
                if former not in (None, secret) and self.secret in (secret, former):
                    self._use_both(listener, secret, former)
        except KeysError as error:
            return [str(error)]
        except ListenError as error:
            return [_one_key_message(error)]
        if secret is None and is_rotating(folder) and self.former is None:
            return [
                f"This service may not read {folder}/{EDGE}.key, so it cannot follow the "
                "rotation: restart it."
            ]
        if secret not in (None, self.secret):
            return [
                f"{folder}/{EDGE}.key has changed without a rotation, or by more than one "
                "rotation: restart this edge."
            ]
        return []

    def _use_both(self, listener: Listener, secret: bytes, former: bytes) -> None:
        listener.set_secret_keys(secret, former)
        self.secret, self.former = secret, former
        _log.info(
            "the new and the former edge.key are both accepted: give the devices the new edge.pub, "
            "then run `pilotfish keys rotate --finish`"
        )

    def _finish(self, listener: Listener, allowed: Mapping[bytes, str]) -> None:
        if self.former is None:
            return
        keys = listener.gate.clients_of_former_key if listener.gate is not None else set()
        names = sorted(name for key, name in allowed.items() if key in keys)
        listener.set_secret_keys(self.secret, None)
        self.former = None
        _log.info("the former edge.key is no longer accepted")
        if names:
            _log.warning(
                "devices that last connected with the former edge.pub: %s", ", ".join(names)
            )


def _one_key_message(error: ListenError) -> str:
    return f"Only one edge.key is accepted. {error} See docs/keys.md."
