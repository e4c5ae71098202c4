"""The daemon's settings and allow-list, read again while it serves.

Law: a configuration that is broken, or half written just now, changes nothing; the allow-list is
looked up all the same. A key is in as long as a sound file on the list says so, whatever is wrong
elsewhere: a key that was taken off is out, and so is one whose file broke.
"""

import logging
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from pilotfish.edge_runtime.config import MEBIBYTE, EdgeConfig
from pilotfish.edge_runtime.service import Service
from pilotfish.edge_runtime.tally import Tally
from pilotfish.wire.connections import Bounds
from pilotfish.wire.errors import KeysError, PilotfishError
from pilotfish.wire.keys import AllowList, EdgeKeys, edge_secret
from pilotfish.wire.settings import fixed_changes
from pilotfish.wire.supervisor import in_brief
from pilotfish.wire.transport import Listener

_log = logging.getLogger("pilotfish.edge")

_OWN_DESCRIPTORS = 128  # what the process has open besides connections


def bounds_of(config: EdgeConfig) -> Bounds:
    """What a configuration allows of connections, as far as the system's own limit lets it."""
    limits = config.limits
    wanted = limits.connections + _OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < wanted:  # below 0: unlimited
        most = wanted if hard < 0 else min(wanted, hard)
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    connections = limits.connections
    if 0 <= soft < wanted:
        connections = max(2, soft - _OWN_DESCRIPTORS)
        _log.warning("room for %d connections only: raise LimitNOFILE to %d", connections, wanted)
    return Bounds(connections, limits.connections_per_client, limits.message_mib * MEBIBYTE)


class LiveSettings:
    """What holds of the configuration and of the keys. ``troubles``: what was wrong with the rest.

    allowed: the keys that may come in, and their names; None: the edge has no keys.
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
        self._folder = config.keys  # where the list is that holds
        self._secret = b"" if keys is None else keys.secret
        self._reread = reread
        self._tally = tally
        self.troubles: Sequence[str] = () if keys is None else keys.listed.broken
        tally.broken_keys = len(self.troubles)
        self._tell("started")

    @property
    def trouble(self) -> str:
        """What is wrong, in a line; "" if nothing is."""
        return in_brief(self.troubles)

    def reload(self, listener: Listener, service: Service) -> None:
        """Read everything again and apply what is sound of it."""
        troubles: list[str] = []
        try:
            config = self._reread()
        except (PilotfishError, OSError) as error:
            troubles.append(str(error))
        else:
            self._adopt(config, listener)
        if self._folder is not None and listener.gate is not None:
            troubles += self._look_up(self.config.keys or self._folder, self._folder)
            listener.gate.allowed = self.allowed or {}
        service.revise(self.config.limits, self.allowed)
        self.troubles = troubles
        self._tally.reloads["refused" if troubles else "done"] += 1
        self._tell("reloaded")

    def _adopt(self, config: EdgeConfig, listener: Listener) -> None:
        fixed = fixed_changes(self._started, config)
        if (self._started.keys is None) != (config.keys is None):
            fixed.append("keys")
        for name in fixed:
            _log.warning("%s has changed; that needs a restart", name)
        self.config = config
        held = listener.connections.bounds
        listener.connections.bounds = bounds_of(config)._replace(message_bytes=held.message_bytes)

    def _look_up(self, folder: Path, before: Path) -> list[str]:
        """Read which keys may come in; returns what is wrong with the list, or the edge's key."""
        try:
            listed = AllowList.load(folder)
        except KeysError as error:  # nothing says that a key was taken off it
            return [str(error), *(self._look_up(before, before) if folder != before else ())]
        self._folder, self.allowed = folder, listed.names
        self._tally.broken_keys = len(listed.broken)
        try:
            if edge_secret(folder) != self._secret:
                _log.warning("edge.key has changed; that needs a restart")
        except KeysError as error:
            return [*listed.broken, str(error)]
        return [*listed.broken]

    def _tell(self, what: str) -> None:
        self._tally.sound = not self.troubles
        if not self.troubles:
            self._tally.sound_s = time.time()
        for trouble in self.troubles:
            _log.error("%s but for this: %s", what, trouble)
        _log.info("%s; %d keys are allowed", what, len(self.allowed or ()))
