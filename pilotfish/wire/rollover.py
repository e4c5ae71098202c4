"""The secret keys that a listening socket answers to, exchanged while it serves (key rollover).

ZeroMQ copies a socket's secret key when it binds. So each further key is bound on a listening
socket of its own, at the same port. A client whose ``edge.pub`` belongs to another key than the
kernel's choice fails its handshake and comes again after a tenth of a second; its address is then
given to the other one. Behind one address (NAT) there may be clients of both: chance decides.
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

_MOST_KEYS: Final = 8  # that one process has answered to
_ROUTE_HOLD_S: Final = (
    10.0  # after which a client has moved on to the present key; before, it is two
)
_LOG_S: Final = 10.0  # between two entries in the log, however many strangers come
_STEER_S: Final = 0.01  # between two programs for the kernel, however many strangers come


class KeyRollover:
    """The present key and perhaps the one before it. `missed` is for any thread.

    backlog: connections that the kernel holds until they are accepted.
    """

    def __init__(
        self, listening: "zmq.Socket[bytes]", gate: Gate, secret: bytes, backlog: int
    ) -> None:
        self._listening, self._gate, self._backlog = listening, gate, backlog
        self._secrets = [secret]  # by the numbers of their sockets
        self._present, self._former = 0, 0  # the same number: one key is answered to
        self._port: SharedPort | None = None
        self._routes: dict[str, Route] = {}  # by address; "": of all others
        self._routed_s: dict[str, float] = {}
        self._steered_s = self._logged_s = -math.inf
        self._lock = threading.Lock()  # for routes and keys

    @property
    def overlaps(self) -> bool:
        """Whether two keys are answered to."""
        return self._former != self._present

    def set_secret_keys(self, descriptor: int | None, secret: bytes, former: bytes | None) -> None:
        """Answer new connections by these keys only; those that are open go on.

        first: the descriptor of the socket that has listened from the start. `ListenError`: both
        cannot be had here, and nothing has changed.
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
            raise ListenError("Another edge.key needs a restart of this edge.")
        self._port = self._port or SharedPort(first_descriptor)
        endpoint = self._listening.getsockopt_string(zmq.LAST_ENDPOINT)
        descriptor = self._port.open_socket(self._backlog)
        self._listening.curve_secretkey, self._listening.zap_domain = secret, key_domain(number)
        self._listening.setsockopt(zmq.USE_FD, descriptor)
        try:
            self._listening.bind(endpoint)
        except zmq.ZMQError as error:
            os.close(descriptor)
            raise ListenError(f"Another edge.key needs a restart of this edge: {error}.") from error
        finally:
            self._listening.setsockopt(zmq.USE_FD, -1)
        self._secrets.append(secret)

    def note_undecipherable(self, address: str) -> None:
        """Note that a client failed by the key it met; address "": unknown, as it left at once."""
        with self._lock:
            now_s = monotonic()
            # one that came too early for another program comes again
            if self.overlaps and now_s - self._steered_s >= _STEER_S:
                if self._reroute(address, now_s):
                    self._steered_s = now_s
                    self._steer()
            elif not self.overlaps and now_s - self._logged_s >= _LOG_S:
                self._logged_s = now_s
                _log.warning(
                    "%s has another edge.pub than this edge's: give it the one from here",
                    f"a device at {address}" if address else "a device",
                )

    def _reroute(self, address: str, now_s: float) -> bool:
        """Lead an address to another key, or to either; False if it is led there already."""
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
        self._routes.pop(address, None)  # the newest stands last
        self._routes[address], self._routed_s[address] = route, now_s
        if len(self._routes) > MOST_ADDRESSES:
            oldest = next(iter(self._routes))
            del self._routes[oldest], self._routed_s[oldest]

    def _steer(self) -> None:
        if self._port is not None:
            self._port.steer(self._routes.get("", (self._present,)), self._routes)
