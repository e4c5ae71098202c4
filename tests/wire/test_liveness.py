"""Whether a connection is alive, by made counters."""

from __future__ import annotations

import pytest

from pilotfish.wire.link.liveness import HANDSHAKE_STEP_S, Liveness
from pilotfish.wire.link.tcp import Volume

LOOK_S = 0.05
PING = 9  # bytes


class Line:
    """A connection whose counters are made; looked at every 50 ms."""

    def __init__(self, rtt_s: float = 0.001, deviation_s: float = 0.05) -> None:
        self.now_s = 1000.0
        self.liveness = Liveness(self.now_s)
        self._tcp = (rtt_s, deviation_s)
        self._received = self._acknowledged = 0
        self._came_s = self.now_s
        self.arrived = 0  # packets

    def pass_s(
        self,
        seconds: float,
        *,
        flag: bool = True,
        acked_bps: float | None = None,
        outstanding: int = 0,
        bytes_each: int = PING,
        every_s: float = 0.3,
    ) -> None:
        """Let time pass. acked_bps: bytes a second acknowledged; None: as many as are heard."""
        until_s = self.now_s + seconds
        while self.now_s < until_s - 1e-9:
            self.now_s += LOOK_S
            if flag and self.now_s - self._came_s >= every_s:
                self._received += bytes_each
                self._came_s = self.now_s
                if acked_bps is None and not outstanding:
                    self._acknowledged += PING
            self._acknowledged += round((acked_bps or 0.0) * LOOK_S)
            idle_s = self.now_s - self._came_s
            crossed = (self._received, self._received, self._acknowledged, outstanding, idle_s)
            self.liveness.update(Volume(*crossed, *self._tcp, self.arrived), self.now_s)


def test_an_idle_connection_is_alive() -> None:
    line = Line()
    for _ in range(100):
        line.pass_s(0.1)
        assert not line.liveness.quiet
        assert not line.liveness.transfers


def test_a_dead_path_shows_within_a_second() -> None:
    line = Line()
    line.pass_s(3.0)
    line.pass_s(0.6, flag=False, outstanding=27)
    assert not line.liveness.quiet
    line.pass_s(0.4, flag=False, outstanding=27)
    assert line.liveness.quiet


def test_a_frozen_process_whose_kernel_acknowledges_pings_is_quiet() -> None:
    line = Line()
    line.pass_s(3.0)
    line.pass_s(1.05, flag=False, acked_bps=60.0)
    assert line.liveness.quiet


@pytest.mark.parametrize("repeats", [False, True])
def test_a_peer_that_only_repeats_does_not_hear_us(repeats: bool) -> None:
    """Its acknowledgements, and ours, wait in a queue that others have filled."""
    line = Line()
    line.pass_s(3.0)
    for packets in range(12):
        line.arrived = packets * repeats
        line.pass_s(0.25, flag=False, outstanding=27)
    assert line.liveness.quiet
    assert line.liveness.blocked == repeats


def test_a_message_that_crosses_is_life_however_slowly() -> None:
    line = Line(rtt_s=0.1)
    line.pass_s(1.0)
    line.pass_s(30.0, flag=False, acked_bps=1000.0, outstanding=20_000)
    assert not line.liveness.quiet
    assert line.liveness.transfers


def test_a_reply_that_comes_slowly_is_carried() -> None:
    line = Line()
    line.pass_s(5.0, every_s=0.1, bytes_each=120)
    assert line.liveness.transfers


def test_what_is_not_acknowledged_is_quiet_though_the_peer_is_heard() -> None:
    """As on a path that swallows large segments one way."""
    line = Line()
    line.pass_s(1.0)
    line.pass_s(1.2, outstanding=12_000)
    assert line.liveness.quiet


@pytest.mark.parametrize("rtt_s", [0.3, 0.7, 3.0])
def test_a_long_way_is_given_more_time(rtt_s: float) -> None:
    line = Line(rtt_s=rtt_s)
    line.pass_s(1.0)
    line.pass_s(2.0 * rtt_s, flag=False, outstanding=50)
    assert not line.liveness.quiet


def test_a_path_that_pauses_is_given_more_time_for_a_while() -> None:
    line = Line()
    line.pass_s(1.0)
    line.pass_s(2.0, flag=False)
    assert line.liveness.quiet
    line.pass_s(1.0)
    assert not line.liveness.quiet
    line.pass_s(2.0, flag=False)
    assert not line.liveness.quiet
    line.pass_s(100.0)
    line.pass_s(1.2, flag=False)
    assert line.liveness.quiet


def test_what_was_not_looked_at_is_no_pause() -> None:
    """A process that stood still does not know how long its peer was silent."""
    line = Line()
    line.pass_s(1.0)
    line.now_s += 60.0
    line.pass_s(1.0)
    line.pass_s(1.1, flag=False)
    assert line.liveness.quiet


def test_a_handshake_that_goes_on_is_waited_for() -> None:
    line = Line(rtt_s=1.5)
    line.pass_s(4.0, flag=False)
    assert line.liveness.progresses
    line.pass_s(0.6, flag=False)
    assert not line.liveness.progresses
    assert not line.liveness.stuck
    line.pass_s(HANDSHAKE_STEP_S - 4.5, flag=False, outstanding=64)
    assert line.liveness.stuck


def test_steps_tell_the_rtt_behind_a_proxy() -> None:
    line = Line()
    assert not line.liveness.progresses
    line.pass_s(0.75, every_s=0.7, bytes_each=64)
    line.pass_s(1.2, flag=False)
    assert line.liveness.progresses
    line.pass_s(0.5, flag=False)
    assert not line.liveness.progresses
