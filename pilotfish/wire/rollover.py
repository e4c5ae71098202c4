"""Replace the secret key of a listening socket while it serves (key rollover).

ZeroMQ copies a socket's secret key when it binds, so each further key gets its own listening socket
on the same port. For each connection the kernel chooses one of these sockets. A client with the
``edge.pub`` of another key fails its handshake and reconnects after a tenth of a second; its
address is then routed to the other key. If clients of both keys share an address (NAT), the kernel
chooses at random.
"""

import logging
import math
import os
import threading
from time import monotonic
from typing import Final

import zmq

from pilotfish.base.errors import ListenError
from pilotfish.wire.access import Gate, key_domain
from pilotfish.wire.reuseport import MOST_ADDRESSES, Route, SharedPort

_log = logging.getLogger("pilotfish.wire")

_MOST_KEYS: Final = 8  # maximum number of keys of one process, over its life
# A handshake that fails from a routed address after this time (s) means that its client now has the
# present key. An earlier failure means that clients of both keys share the address.
_ROUTE_HOLD_S: Final = 10.0
_LOG_S: Final = 10.0  # minimum pause (s) between two log entries
_STEER_S: Final = 0.01  # minimum pause (s) between two programs for the kernel


class KeyRollover:
    """The edge's present secret key and, during a rotation, its former key.

    `note_undecipherable` is thread-safe. backlog: maximum number of connections that may wait to be
    accepted.
    """

    def __init__(
        self, listening: "zmq.Socket[bytes]", gate: Gate, secret: bytes, backlog: int
    ) -> None:
        self._listening, self._gate, self._backlog = listening, gate, backlog
        self._secrets = [secret]  # index: number of the key's socket
        self._present, self._former = 0, 0  # numbers of keys; equal: there is one key
        self._port: SharedPort | None = None
        self._routes: dict[str, Route] = {}  # by address; "": all other addresses
        self._routed_s: dict[str, float] = {}
        self._steered_s = self._logged_s = -math.inf
        self._lock = threading.Lock()  # guards routes and keys

    @property
    def overlaps(self) -> bool:
        """Whether the edge accepts two keys."""
        return self._former != self._present

    def set_secret_keys(self, descriptor: int | None, secret: bytes, former: bytes | None) -> None:
        """Accept new connections with these keys only; open connections go on.

        descriptor: the socket that listened first. Raises `ListenError`, and changes nothing, if
        these keys need a restart.
        """
        secrets = [secret, former or secret]
        if secrets == [self._secrets[self._present], self._secrets[self._former]]:
            return
        for each in secrets:
            if each not in self._secrets:
                self._bind(descriptor, each)
        with self._lock:
            self._present, self._former = map(self._secrets.index, secrets)
            self._gate.present_domain = key_domain(self._present)
            self._routes.clear()
            self._routed_s.clear()
            self._steer()

    def _bind(self, first_descriptor: int | None, secret: bytes) -> None:
        number = len(self._secrets)
        if first_descriptor is None or number == _MOST_KEYS:
            raise ListenError("To use another edge.key, this edge must be restarted.")
        self._port = self._port or SharedPort(first_descriptor)
        endpoint = self._listening.getsockopt_string(zmq.LAST_ENDPOINT)
        descriptor = self._port.open_socket(self._backlog)
        self._listening.curve_secretkey, self._listening.zap_domain = secret, key_domain(number)
        self._listening.setsockopt(zmq.USE_FD, descriptor)
        try:
            self._listening.bind(endpoint)
        except zmq.ZMQError as error:
            os.close(descriptor)
            raise ListenError(
                f"To use another edge.key, this edge must be restarted: {error}."
            ) from error
        finally:
            self._listening.setsockopt(zmq.USE_FD, -1)
        self._secrets.append(secret)

    def note_undecipherable(self, address: str) -> None:
        """Note a failed handshake of a client with another key; address "": unknown."""
        with self._lock:
            now_s = monotonic()
            # Just after a new program was set, a failure is ignored, since the client tries again.
            if self.overlaps and now_s - self._steered_s >= _STEER_S:
                if self._reroute(address, now_s):
                    self._steered_s = now_s
                    self._steer()
            elif not self.overlaps and now_s - self._logged_s >= _LOG_S:
                self._logged_s = now_s
                _log.warning(
                    "%s has another edge.pub than this edge's: copy this edge's edge.pub to it",
                    f"a device at {address}" if address else "a device",
                )

    def _reroute(self, address: str, now_s: float) -> bool:
        """Route an address to the other key, or to either; return whether the route changed."""
        present, former = (self._present,), (self._former,)
        before = self._routes.get(address)
        route = before or self._routes.get("", present)
        if route == present:
            route = former
        elif route == former and now_s - self._routed_s.get(address, -math.inf) > _ROUTE_HOLD_S:
            route = present
        else:
            route = self._present, self._former
        self._route(address, route, now_s)
        return route != before

    def _route(self, address: str, route: Route, now_s: float) -> None:
        self._routes.pop(address, None)  # the newest route comes last
        self._routes[address], self._routed_s[address] = route, now_s
        if len(self._routes) > MOST_ADDRESSES:
            oldest = next(iter(self._routes))
            del self._routes[oldest], self._routed_s[oldest]

    def _steer(self) -> None:
        if self._port is not None:
            self._port.steer(self._routes.get("", (self._present,)), self._routes)
