"""The proxy of `Emulator` and `pilotfish emulate`: sockets and a clock around two shapers.

The proxy has one thread. The time-outs of epoll are whole milliseconds, too coarse for a link of 1
ms, so `select` waits for the epoll descriptor with a time-out in microseconds. A machine still
wakes 0.1 to 0.2 ms late after a long sleep; the loop measures this delay and shortens its time-outs
by it.

The end, half-close and reset of a connection cross the link in order with its bytes. The proxy does
not model TCP's handshake (it accepts at once), slow start, headers, or congestion control after a
loss.
"""

import errno
import logging
import math
import os
import resource
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

from pilotfish.emulation.addresses import address_of, endpoint_of, listen_on
from pilotfish.emulation.emulator import Conditions, Traffic
from pilotfish.emulation.proxied_connection import (
    DirectedFlow,
    SocketEnd,
    join_sockets,
    limit_received,
    reset,
)
from pilotfish.emulation.shaper import RESET, LinkShaper, split_conditions

_log = logging.getLogger("pilotfish.emulate")

_EARLY_S = 0.0001  # time (s): bytes that are due within it are sent now
_LATE_S = 0.001  # longest delay (s) ascribed to the timer; a longer one is a busy machine's
_LONGEST_S = 3600.0  # longest time-out of one `select` (s)
_BROKEN = select.EPOLLERR | select.EPOLLHUP


def take_precedence() -> None:
    """Raise this process's priority, if that is allowed."""
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)


class Proxy:
    """A listener at ``endpoint`` that relays connections to ``connect`` over the emulated link.

    Raises ListenError, UnsupportedError, EdgeUnreachableError, TraceError.
    """

    def __init__(self, listen: str, connect: str, conditions: Conditions) -> None:
        self._target = address_of(connect)
        self._connect = connect
        now = monotonic()
        up, down = split_conditions(conditions)
        self._up: LinkShaper[DirectedFlow] = LinkShaper(up, now)
        self._down: LinkShaper[DirectedFlow] = LinkShaper(down, now)
        self.since_s = now
        self._ends: dict[int, SocketEnd] = {}
        self._paused: set[SocketEnd] = set()
        self._active: set[DirectedFlow] = set()  # flows with segments in transit
        self._delivered_bytes: dict[LinkShaper[DirectedFlow], int] = {self._up: 0, self._down: 0}
        self._connections = 0
        self._refused_until_s = self._silent_until_s = -math.inf
        self._target_absent = False
        self._full_logged = False
        self._late_s = 0.00015  # mean delay of a wake-up on this machine (s)
        self._running = True
        self._listener = listen_on(listen)
        limit_received(self._listener, self._up)
        self.endpoint = endpoint_of(self._listener)
        self._epoll = select.epoll()
        self._watchers: dict[int, Callable[[], None]] = {}
        self._set_accepting(True)
        # a connection takes two descriptors; 32 are reserved for other files
        self._max_connections = max(1, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 32) // 2)

    def change(self, conditions: Conditions) -> None:
        """Change the link; a TraceError leaves the old conditions in effect."""
        up, down = split_conditions(conditions)
        self.since_s = monotonic()
        self._up.change(up, self.since_s)
        self._down.change(down, self.since_s)
        limit_received(self._listener, self._up)
        for end in self._ends.values():
            limit_received(end.socket, end.out.shaper)

    def cut(self, for_s: float, *, silent: bool) -> None:
        """Break the link for ``for_s`` seconds; see `Emulator.cut`."""
        until_s = monotonic() + for_s
        if silent:
            self._silent_until_s = until_s
            return
        self._refused_until_s = until_s
        for end in list(self._ends.values()):
            if end.descriptor in self._ends:  # otherwise it was dropped together with its peer
                self._drop(end)

    def traffic(self) -> Traffic:
        """Return the totals so far."""
        return Traffic(
            up_bytes=self._delivered_bytes[self._up],
            down_bytes=self._delivered_bytes[self._down],
            up_lost=self._up.lost,
            down_lost=self._down.lost,
            connections=self._connections,
        )

    def watch(self, descriptor: int, ready: Callable[[], None]) -> None:
        """Call ``ready`` whenever the descriptor is readable."""
        self._watchers[descriptor] = ready
        self._epoll.register(descriptor, select.EPOLLIN)

    def stop(self) -> None:
        """Make `run` return."""
        self._running = False

    def run(self) -> None:
        """Relay bytes until a watcher calls `stop` or a signal handler raises."""
        while self._running:
            self._sleep(self._deliver(monotonic() + _EARLY_S))
            happened = self._epoll.poll(0)
            # listener first, while connections with pending events are open: a new connection
            # cannot get a descriptor that has a pending event
            happened.sort(key=lambda event: event[0] not in self._watchers)
            for descriptor, events in happened:
                if (other := self._watchers.get(descriptor)) is not None:
                    other()
                elif (end := self._ends.get(descriptor)) is not None:
                    self._serve(end, events)

    def _sleep(self, until_s: float) -> None:
        """Wait for a socket or for this time; the mean delay is subtracted from the time-out."""
        if math.isinf(until_s):
            select.select([self._epoll], [], [])
            return
        asked_s = min(until_s - self._late_s, monotonic() + _LONGEST_S)
        ready, _, _ = select.select([self._epoll], [], [], max(0.0, asked_s - monotonic()))
        if not ready:
            late_s = min(monotonic() - asked_s, _LATE_S)
            self._late_s += (late_s - self._late_s) * 0.1

    def close(self) -> None:
        """Cut all connections and stop listening."""
        for end in list(self._ends.values()):
            end.socket.close()
        self._ends.clear()
        self._listener.close()
        self._epoll.close()

    # -- connections -------------------------------------------------------------------------------

    def _set_accepting(self, open_: bool) -> None:
        descriptor = self._listener.fileno()
        if open_ and descriptor not in self._watchers:
            self.watch(descriptor, self._accept)
        elif not open_ and descriptor in self._watchers:
            del self._watchers[descriptor]
            self._epoll.unregister(descriptor)

    def _accept(self) -> None:
        while len(self._ends) < 2 * self._max_connections:
            try:
                near, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in {errno.EMFILE, errno.ENFILE}:
                    break
                continue  # the connection ended before it was accepted
            if monotonic() < self._refused_until_s:
                reset(near)
            else:
                self._open(near)
        self._set_accepting(False)  # until `_forget` closes a connection
        if not self._full_logged:
            _log.warning(
                "%d connections are open, the maximum; new ones wait", len(self._ends) // 2
            )
        self._full_logged = True

    def _open(self, near: socket.socket) -> None:
        family, address = self._target
        try:
            far = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            _log.warning("cannot connect to %s: %s", self._connect, error)
            near.close()
            return
        ends = join_sockets(near, far, self._up, self._down)
        self._ends.update((end.descriptor, end) for end in ends)
        self._connections += 1
        failed = far.connect_ex(address)
        if failed not in {0, errno.EINPROGRESS}:
            self._refuse(ends[1], failed)
            return
        for end in ends:
            self._watch(end)

    def _connected(self, end: SocketEnd) -> None:
        failed = end.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if failed:
            self._refuse(end, failed)
            return
        if self._target_absent:
            _log.warning("%s answers again", self._connect)
        self._target_absent = False
        end.connecting = False
        self._watch(end)

    def _refuse(self, end: SocketEnd, failed: int) -> None:
        if not self._target_absent:  # logged once: a device retries several times a second
            _log.warning("%s does not answer: %s", self._connect, os.strerror(failed))
        self._target_absent = True
        self._drop(end)

    def _drop(self, end: SocketEnd) -> None:
        """Cut both sides of the connection at once."""
        end.abort()
        end.peer.abort()
        self._forget(end)

    def _forget(self, end: SocketEnd) -> None:
        for side in (end, end.peer):
            side.out.drop()
            self._active.discard(side.out)
            self._paused.discard(side)
            if self._ends.pop(side.descriptor, None) is not None:
                side.socket.close()  # epoll forgets a closed socket
        self._set_accepting(True)

    def _watch(self, end: SocketEnd) -> None:
        end.watch(self._epoll, paused=end in self._paused)

    # -- bytes in ----------------------------------------------------------------------------------

    def _serve(self, end: SocketEnd, events: int) -> None:
        if end.connecting:
            self._connected(end)
            return
        if end.reads and events & (select.EPOLLIN | _BROKEN):
            self._read(end)
        elif end in self._paused and events & select.EPOLLERR:
            self._break(end)
        elif events & select.EPOLLHUP:
            end.hung = True
        if end.blocked and events & (select.EPOLLOUT | _BROKEN):
            end.blocked = False  # `_deliver` sends, or gets the error
        if end.descriptor in self._ends:
            self._watch(end)

    def _read(self, end: SocketEnd) -> None:
        flow = end.out
        try:
            data = end.receive()
        except BlockingIOError:
            return
        if data is RESET:
            self._break(end)
        elif not flow.dead:
            flow.shaper.put(flow, data, monotonic())
            if end.must_wait:
                self._paused.add(end)

    def _break(self, end: SocketEnd) -> None:
        """Mark this end as broken; the reset crosses the link to its peer."""
        end.finished = end.broken = True
        end.blocked = False
        if end.peer.broken or end.peer.blocked:  # the peer is broken, or may never read
            self._drop(end)
            return
        end.into.drop()
        end.out.shaper.put(end.out, RESET, monotonic())
        self._watch(end)

    # -- bytes out ---------------------------------------------------------------------------------

    def _deliver(self, now: float) -> float:
        """Deliver the bytes due by ``now``; return the time of the next delivery."""
        if now < self._silent_until_s:
            return self._silent_until_s
        wake_s = math.inf
        for shaper in self._delivered_bytes:
            shaper.advance(now)
            self._active |= shaper.moved
            shaper.moved.clear()
            wake_s = min(wake_s, shaper.wake_s())
        for flow in list(self._active):
            wake_s = min(wake_s, self._deliver_flow(flow, now))
        for end in list(self._paused):
            if not end.must_wait:
                self._paused.remove(end)
                self._watch(end)
        return wake_s

    def _deliver_flow(self, flow: DirectedFlow, now: float) -> float:
        end = flow.sink
        while not (flow.dead or end.connecting or end.blocked):
            due_s = flow.due_s()
            if due_s > now and not end.has_rest:
                if not flow.in_transit:
                    self._active.discard(flow)
                return due_s
            parts = flow.take_due(now)
            if parts or end.has_rest:
                self._send(flow, parts)
            elif flow.take() is RESET:
                self._drop(end)
            else:
                self._finish(flow)
        if flow.dead:
            self._active.discard(flow)
        return math.inf

    def _send(self, flow: DirectedFlow, parts: list[bytes]) -> None:
        end = flow.sink
        try:
            self._delivered_bytes[flow.shaper] += end.send(parts)
        except OSError:
            self._break(end)
            return
        if end.blocked and flow.source.broken:  # nobody may ever read the rest
            self._drop(end)
        else:
            self._watch(end)

    def _finish(self, flow: DirectedFlow) -> None:
        """Pass a sender's FIN on to the receiver."""
        flow.sink.finish()
        flow.finished = True
        if flow.sink.out.finished:
            self._forget(flow.sink)
