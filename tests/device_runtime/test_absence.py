"""How long an edge was away, whatever broke in between; and what of a request has crossed."""

from __future__ import annotations

import pytest

from pilotfish.device_runtime.link.pending import PendingRequest, SentRequest
from pilotfish.device_runtime.link.retry import (
    CONNECT_S,
    GRACE_S,
    RESEND_S,
    AbsenceClock,
    LinkPhase,
    RetryPolicy,
)
from pilotfish.wire.link.liveness import Liveness
from pilotfish.wire.link.tcp import Volume
from pilotfish.wire.messages import Ping

AWAY, HERE = LinkPhase.AWAY, LinkPhase.IDLE
CONNECTING, CARRYING = LinkPhase.CONNECTING, LinkPhase.CARRYING
BLOCKED = LinkPhase.BLOCKED


def passed(absence: AbsenceClock, begin_s: float, *steps: tuple[LinkPhase, float]) -> float:
    """Note these standings for so long each, in slices of 0.1 s; returns when it was over."""
    now_s = begin_s
    for standing, seconds in steps:
        for _ in range(round(seconds / 0.1)):
            now_s += 0.1
            absence.note(standing, now_s)
            if absence.expired:
                return now_s - begin_s
    return float("nan")


@pytest.mark.parametrize(
    ("policy", "seconds"), [("fail", CONNECT_S), ("local", GRACE_S), ("wait", 5.0)]
)
def test_away_is_over_after_the_policy_s_time_whatever_breaks_in_between(
    policy: str, seconds: float
) -> None:
    patience = RetryPolicy.from_policy(policy, 5.0)
    absence = AbsenceClock(patience, 0.0)
    absence.expect(0.0)
    flapping = [(AWAY, 0.6), (CONNECTING, 0.1), (HERE, 0.2)] * 20
    over_s = passed(absence, 0.0, *flapping)
    turns = seconds / 0.5
    assert 0.9 * (turns - 1) <= over_s <= 0.9 * (turns + 2)


def test_only_progress_makes_up_for_it() -> None:
    absence = AbsenceClock(RetryPolicy.from_policy("fail", 1.0), 0.0)
    absence.expect(0.0)
    assert passed(absence, 0.0, (AWAY, 2.0), (HERE, 9.0)) != pytest.approx(2.0)
    absence.on_progress()
    assert not absence.in_doubt
    assert passed(absence, 11.0, (AWAY, 2.0)) != pytest.approx(2.0)


def test_a_transfer_is_never_away_nor_overdue() -> None:
    absence = AbsenceClock(RetryPolicy.from_policy("wait", 3.0), 0.0)
    absence.expect(0.0)
    passed(absence, 0.0, (CARRYING, 60.0))
    assert absence.away_s == absence.owed_s == 0.0
    passed(absence, 60.0, (HERE, 3.2))
    assert absence.overdue
    assert not absence.expired


def test_what_crosses_again_and_again_is_overdue_in_the_end() -> None:
    """An older edge ends a connection over which a message takes more than 0.9 s."""
    absence = AbsenceClock(RetryPolicy.from_policy("wait", 20.0), 0.0)
    absence.expect(0.0)
    now_s = 0.0
    while not (absence.expired or absence.overdue):
        for standing, seconds in ((CARRYING, 2.0), (AWAY, 0.2), (CONNECTING, 0.5)):
            now_s += seconds
            absence.note(standing, now_s)
    assert now_s < 35.0


def test_handshakes_without_end_are_away_in_the_end() -> None:
    absence = AbsenceClock(RetryPolicy.from_policy("fail", 1.0), 0.0)
    absence.expect(0.0)
    assert 15.0 < passed(absence, 0.0, (CONNECTING, 60.0)) < 18.0


def test_a_full_queue_before_us_is_no_absence_for_some_seconds() -> None:
    absence = AbsenceClock(RetryPolicy.from_policy("fail", 1.0), 0.0)
    absence.expect(0.0)
    assert 7.0 < passed(absence, 0.0, (BLOCKED, 60.0)) < 7.5
    absence = AbsenceClock(RetryPolicy.from_policy("fail", 1.0), 0.0)
    absence.expect(0.0)
    over_s = passed(absence, 0.0, (BLOCKED, 4.5), (HERE, 1.0), (AWAY, 4.0))
    assert over_s == pytest.approx(4.5 + 1.0 + CONNECT_S, abs=0.3)


def test_a_process_that_stood_still_has_not_waited() -> None:
    absence = AbsenceClock(RetryPolicy.from_policy("fail", 1.0), 0.0)
    absence.note(AWAY, 0.1)
    absence.note(AWAY, 9.0, stalled_s=8.8)
    assert absence.away_s == pytest.approx(0.2)


def test_under_local_the_grace_is_for_a_loss_not_for_each_answer() -> None:
    absence = AbsenceClock(RetryPolicy.from_policy("local", 1.0), 0.0)
    absence.note(AWAY, 1.5)
    absence.expect(60.0)
    absence.note(AWAY, 60.1)
    assert absence.expired


def alive(acknowledged: int) -> Liveness:
    liveness = Liveness(0.0)
    liveness.update(Volume(0, 0, acknowledged), 0.1)
    return liveness


def request(position: int | None, size: int = 1000) -> SentRequest:
    return SentRequest(Ping(nonce=1), (), size, 0, position)


def test_a_message_sent_again_advances_only_beyond_what_crossed_before() -> None:
    pending = PendingRequest(request(500), late=False)
    assert not pending.advances(alive(500))
    assert pending.advances(alive(1100))
    pending.on_resent(request(200), 0.0)
    assert not pending.advances(alive(800))
    assert pending.advances(alive(801))
    assert pending.advances(alive(99_999))
    assert not pending.advances(alive(999_999))


def test_a_message_under_way_is_not_sent_again() -> None:
    pending = PendingRequest(request(500), late=False)
    pending.advances(alive(900))
    assert not pending.is_lost(2 * RESEND_S)
    pending.advances(alive(1500))
    assert pending.is_lost(RESEND_S)
    pending.on_resent(request(1500), RESEND_S)
    pending.advances(alive(2500))
    assert not pending.is_lost(2 * RESEND_S)
    assert pending.is_lost(3 * RESEND_S)


def test_without_a_position_nothing_advances() -> None:
    pending = PendingRequest(request(None), late=False)
    assert not pending.advances(alive(99_999))
    assert pending.is_lost(RESEND_S)
