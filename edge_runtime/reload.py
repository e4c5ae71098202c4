"""Read the daemon's settings and allow-list again while it serves.

Law: a faulty or half-written configuration changes nothing, but the allow-list is read in any case.
A key is allowed exactly as long as a valid file of the list holds it: a removed key is revoked, and
so is one whose file is damaged.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from pilotfish.edge_runtime.config import MEBIBYTE, EdgeConfig
from pilotfish.edge_runtime.service import Service
from pilotfish.edge_runtime.tally import Tally
from pilotfish.wire.connections import Bounds
from pilotfish.wire.descriptors import room
from pilotfish.wire.errors import KeysError, ListenError, PilotfishError
from pilotfish.wire.keys import EDGE, FORMER, AllowList, EdgeKeys, reread_secret, rotates
from pilotfish.wire.settings import fixed_changes
from pilotfish.wire.supervisor import in_brief
from pilotfish.wire.transport import Listener

_log = logging.getLogger("pilotfish.edge")

_OVERLAP = (
    "new and former edge.key are both answered to: give the devices the new edge.pub, then run "
    "`pilotfish keys rotate --finish`"
)
_OWN_DESCRIPTORS = 128  # open files of the process besides connections


def bounds_of(config: EdgeConfig) -> Bounds:
    """Return a configuration's bounds on connections, within the system's limit of open files."""
    limits = config.limits
    connections = room(limits.connections, _OWN_DESCRIPTORS)
    if connections < limits.connections:
        wanted = limits.connections + _OWN_DESCRIPTORS
        _log.warning("room for %d connections only: raise LimitNOFILE to %d", connections, wanted)
    return Bounds(connections, limits.connections_per_client, limits.message_mib * MEBIBYTE)


class LiveSettings:
    """The configuration and keys in force. troubles: the faults of the last reload.

    allowed: names by allowed key; None: the edge has no keys.
    """

    def __init__(
        self,
        config: EdgeConfig,
        keys: EdgeKeys | None,
        reread: Callable[[], EdgeConfig],
        tally: Tally,
    ) -> None:
        self.config = config
        self.allowed = None if keys is None else keys.allowed
        self._started = config
        self._folder = config.keys  # of the allow-list in force
        self._secret = b"" if keys is None else keys.secret
        self._former = None if keys is None else keys.former
        self._reread = reread
        self._tally = tally
        self.troubles: Sequence[str] = ()
        if keys is not None:
            self.troubles = [*keys.listed.broken, *([keys.fault] if keys.fault else ())]
            tally.broken_keys = len(keys.listed.broken)
        self._report("started")

    def start(self, listener: Listener) -> None:
        """Have a listener answer to the former key, too, if the edge starts within a rotation."""
        if self._former is None:
            return
        try:
            listener.answer_to(self._secret, self._former)
        except ListenError as error:
            self._former = None
            self.troubles = [*self.troubles, f"The former edge.key is not answered to: {error}"]
            self._report("started")
        else:
            _log.info("%s", _OVERLAP)

    @property
    def trouble(self) -> str:
        """The faults in one line; "" for none."""
        return in_brief(self.troubles)

    @property
    def keys_in_use(self) -> str:
        """Which keys are in force, in a line."""
        if self.allowed is None:
            return "no keys: whoever reaches this address is let in"
        former = " (and the former one)" if self._former is not None else ""
        public = zmq.curve_public(self._secret).decode()
        return f"edge.pub is {public}{former}; {len(self.allowed)} keys are allowed"

    def reload(self, listener: Listener, service: Service) -> None:
        """Read everything again and apply its valid parts."""
        troubles: list[str] = []
        try:
            config = self._reread()
        except (PilotfishError, OSError) as error:
            troubles.append(str(error))
        else:
            self._adopt(config, listener)
        if self._folder is not None and listener.gate is not None:
            troubles += self._reload_keys(self.config.keys or self._folder, self._folder)
            troubles += self._reload_secrets(self._folder, listener)
            listener.gate.allowed = self.allowed or {}
        service.revise(self.config.limits, self.allowed)
        self.troubles = troubles
        self._tally.reloads["refused" if troubles else "done"] += 1
        self._report("reloaded")

    def _adopt(self, config: EdgeConfig, listener: Listener) -> None:
        fixed = fixed_changes(self._started, config)
        if (self._started.keys is None) != (config.keys is None):
            fixed.append("keys")
        for name in fixed:
            _log.warning("%s has changed; that needs a restart", name)
        self.config = config
        held = listener.connections.bounds
        listener.connections.bounds = bounds_of(config)._replace(message_bytes=held.message_bytes)

    def _reload_keys(self, folder: Path, before: Path) -> list[str]:
        """Read the allow-list again; returns its faults."""
        try:
            listed = AllowList.load(folder)
        except KeysError as error:  # not known whether keys were removed: keep them
            return [str(error), *(self._reload_keys(before, before) if folder != before else ())]
        self._folder, self.allowed = folder, listed.names
        self._tally.broken_keys = len(listed.broken)
        return [*listed.broken]

    def _reload_secrets(self, folder: Path, listener: Listener) -> list[str]:
        """Take up the next step of a rotation; returns what stands against it.

        Another key than a rotation brings needs a restart: it might be the wrong folder's. A
        credential of systemd's is as old as this process, so the folder's own files count here.
        """
        try:
            secret = reread_secret(folder, EDGE)
            if not rotates(folder):
                if self._former is not None:
                    self._finish(listener)
            elif secret not in (None, self._secret):
                former = reread_secret(folder, FORMER)
                if former == self._secret:
                    listener.answer_to(secret, former)
                    self._secret, self._former = secret, former
                    _log.info("%s", _OVERLAP)
        except (KeysError, ListenError) as error:
            return [str(error)]
        if secret not in (None, self._secret):
            _log.warning("edge.key has changed without a rotation; that needs a restart")
        return []

    def _finish(self, listener: Listener) -> None:
        behind = listener.gate.behind if listener.gate is not None else set()
        names = sorted(name for key, name in (self.allowed or {}).items() if key in behind)
        listener.answer_to(self._secret, None)
        self._former = None
        _log.info("the former edge.key is answered to no longer")
        if names:
            _log.warning("devices that came by the former edge.pub last: %s", ", ".join(names))

    def _report(self, what: str) -> None:
        self._tally.sound = not self.troubles
        if not self.troubles:
            self._tally.sound_s = time.time()
        for trouble in self.troubles:
            _log.error("%s but for this: %s", what, trouble)
        if what == "reloaded":
            _log.info("reloaded; %s", self.keys_in_use)
