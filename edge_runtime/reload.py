"""The daemon's settings and allow-list, read again while it serves.

Law: all or nothing. A file that is broken, or half written just now, changes nothing.
"""

import logging
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from edge_runtime.config import MEBIBYTE, EdgeConfig, fixed_changes
from edge_runtime.service import Service
from edge_runtime.tally import Tally
from wire.connections import Bounds
from wire.errors import PilotfishError
from wire.keys import EdgeKeys
from wire.transport import Listener

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


class Settings:
    """The configuration that holds. ``trouble`` says why the last attempt to change it failed."""

    def __init__(
        self,
        config: EdgeConfig,
        keys: EdgeKeys | None,
        reread: Callable[[], EdgeConfig],
        tally: Tally,
    ) -> None:
        self.config = config
        self.trouble = ""
        self._started = config
        self._keys = keys
        self._reread = reread
        self._tally = tally

    def reload(self, listener: Listener, service: Service) -> None:
        """Read everything again and apply it; if something is wrong, log it and leave all as is."""
        try:
            config = self._reread()
            keys = EdgeKeys.load(config.keys) if config.keys is not None else None
        except (PilotfishError, OSError) as error:
            self.trouble = str(error)
            self._tally.reloads["refused"] += 1
            _log.error("nothing was reloaded: %s", error)
            return
        for name in fixed_changes(self._started, config):
            _log.warning("%s has changed; that needs a restart", name)
        self.config, self.trouble = config, ""
        held = listener.connections.bounds
        listener.connections.bounds = bounds_of(config)._replace(message_bytes=held.message_bytes)
        if keys is not None and self._keys is not None and listener.gate is not None:
            if keys.secret != self._keys.secret:
                _log.warning("edge.key has changed; that needs a restart")
            self._keys = replace(self._keys, allowed=keys.allowed)
            listener.gate.allowed = keys.allowed
        allowed = None if self._keys is None else self._keys.allowed
        service.revise(config.limits, allowed)
        self._tally.reloads["done"] += 1
        _log.info("reloaded; %d keys are allowed", len(allowed or ()))
