"""Reload the daemon's settings and allow-list while it serves.

Law: a faulty or half-written configuration changes no setting; the allow-list is reloaded in any
case. A key is allowed exactly as long as a valid file on the list contains it: if the file is
removed or damaged, the key is revoked.
"""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq

from pilotfish.base.descriptors import connection_room
from pilotfish.base.errors import KeysError, PilotfishError
from pilotfish.base.settings import fixed_changes
from pilotfish.base.supervisor import summarize
from pilotfish.edge_runtime.edge_config import MEBIBYTE, EdgeConfig
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.key_rotation import KeyRotation
from pilotfish.edge_runtime.message_handler import MessageHandler
from pilotfish.wire.connections import Bounds
from pilotfish.wire.keys import AllowList, EdgeKeys
from pilotfish.wire.transport import Listener

_log = logging.getLogger("pilotfish.edge")

_OWN_DESCRIPTORS = 128  # descriptors of the process that are not connections


def bounds_of(config: EdgeConfig) -> Bounds:
    """Return the limits of connections, lowered to the system's limit of open files."""
    limits = config.limits
    connections = connection_room(limits.connections, _OWN_DESCRIPTORS)
    if connections < limits.connections:
        wanted = limits.connections + _OWN_DESCRIPTORS
        _log.warning(
            "the limit of open files leaves room for only %d connections: raise LimitNOFILE to %d",
            connections,
            wanted,
        )
    return Bounds(connections, limits.connections_per_client, limits.message_mib * MEBIBYTE)


class LiveSettings:
    """Configuration and keys in force.

    allowed: allowed key → device name; None: the edge has no keys. problems: problems of the last
    reload.
    """

    def __init__(
        self,
        config: EdgeConfig,
        keys: EdgeKeys | None,
        reread: Callable[[], EdgeConfig],
        metrics: EdgeMetrics,
    ) -> None:
        self.config = config
        self.allowed = None if keys is None else keys.allowed
        self._initial = config
        self._folder = config.keys  # folder of the allow-list in force
        self._rotation = None if keys is None else KeyRotation(keys)
        self._reread = reread
        self._metrics = metrics
        self.problems: Sequence[str] = ()
        if keys is not None:
            self.problems = keys.allow_list.broken
            metrics.broken_keys = len(keys.allow_list.broken)
        self._report("started")

    def start(self, listener: Listener) -> None:
        """Let the listener accept the former key, too, if the edge starts during a rotation."""
        problems = [] if self._rotation is None else self._rotation.start(listener)
        if problems:
            self.problems = [*self.problems, *problems]
            self._report("started")

    @property
    def problem(self) -> str:
        """All problems in one line; "" if there is none."""
        return summarize(self.problems)

    @property
    def folder(self) -> Path | None:
        """Folder of the allow-list in force; None: the edge has no keys."""
        return self._folder

    @property
    def public_key(self) -> bytes:
        """The edge's present public key; b"": it has no keys."""
        return b"" if self._rotation is None else zmq.curve_public(self._rotation.secret)

    @property
    def keys_in_use(self) -> str:
        """Keys in force, in one line for the log."""
        if self.allowed is None or self._rotation is None:
            return "there are no keys: everyone who can reach this address may connect"
        return f"{self._rotation}; {len(self.allowed)} keys are allowed"

    def reload(self, listener: Listener, handler: MessageHandler) -> None:
        """Reload configuration, allow-list and keys, and apply the valid parts."""
        problems: list[str] = []
        try:
            config = self._reread()
        except (PilotfishError, OSError) as error:
            problems.append(str(error))
        else:
            self._apply_config(config, listener)
        if self._folder is not None:
            problems += self._reload_keys(self.config.keys or self._folder, self._folder)
            if self._rotation is not None:
                problems += self._rotation.reload(self._folder, listener, self.allowed or {})
        self._apply_list(listener, handler)
        self.problems = problems
        self._metrics.reloads["refused" if problems else "done"] += 1
        self._report("reloaded")

    def reload_list(self, listener: Listener, handler: MessageHandler) -> None:
        """Reload and apply the allow-list alone, after a device was enrolled."""
        if self._folder is not None:
            for problem in self._reload_keys(self._folder, self._folder):
                _log.error("the allow-list has this problem: %s", problem)
            self._apply_list(listener, handler)

    def _apply_list(self, listener: Listener, handler: MessageHandler) -> None:
        if listener.gate is not None:
            listener.gate.allowed = self.allowed or {}
        handler.apply_config(self.config.limits, self.allowed)

    def _apply_config(self, config: EdgeConfig, listener: Listener) -> None:
        fixed = fixed_changes(self._initial, config)
        if (self._initial.keys is None) != (config.keys is None):
            fixed.append("keys")
        for name in fixed:
            _log.warning("%s has changed; restart the edge to apply the change", name)
        self.config = config
        held = listener.connections.bounds
        listener.connections.bounds = bounds_of(config)._replace(message_bytes=held.message_bytes)

    def _reload_keys(self, folder: Path, before: Path) -> list[str]:
        """Reload the allow-list; return its problems. before: folder of the list in force."""
        try:
            listed = AllowList.load(folder)
        except KeysError as error:  # the list is unreadable: keep the allowed keys
            return [str(error), *(self._reload_keys(before, before) if folder != before else ())]
        self._folder, self.allowed = folder, listed.names
        self._metrics.broken_keys = len(listed.broken)
        return [*listed.broken]

    def _report(self, what: str) -> None:
        self._metrics.config_valid = not self.problems
        if not self.problems:
            self._metrics.config_valid_s = time.time()
        for problem in self.problems:
            _log.error("%s, except for this problem: %s", what, problem)
        if what == "reloaded":
            _log.info("reloaded; %s", self.keys_in_use)
