"""The last minutes of a service: acceptance, round trips and absences by steps of five seconds."""

from __future__ import annotations

import json

import pytest

from pilotfish.device_runtime.service.status_history import STEP_S, STEPS, StatusHistory
from tests.support.service_facts import a_round


@pytest.fixture
def history():
    return StatusHistory(began_s=100.0)


def test_a_new_history_knows_nothing(history):
    assert history.body(100.0) == {
        "step_s": STEP_S,
        "acceptance": [None] * STEPS,
        "rtt_s": [None] * STEPS,
        "away": [False] * STEPS,
    }


def test_each_step_has_its_own_acceptance_and_median_round_trip(history):
    history.add_round(a_round(window=4, accepted=4), 101.0)
    history.add_round(a_round(window=4, accepted=0), 104.9)  # 1 position verified
    history.add_round(a_round(window=4, accepted=1), 105.0)
    for rtt_s in (0.01, 0.5, 0.02):
        history.set_link(away=False, rtt_s=rtt_s, now_s=106.0)
    body = history.body(112.0)
    assert body["acceptance"][-3:] == [0.8, 0.5, None]
    assert body["rtt_s"][-3:] == [None, 0.02, None]


def test_a_step_with_an_absence_says_so(history):
    history.set_link(away=False, rtt_s=0.01, now_s=100.0)
    history.set_link(away=True, rtt_s=None, now_s=106.0)
    history.set_link(away=False, rtt_s=0.01, now_s=109.0)
    assert history.body(110.0)["away"][-3:] == [False, True, False]


def test_rounds_without_drafts_have_no_acceptance(history):
    history.add_round(a_round("stream", window=0, accepted=0), 100.0)
    assert history.body(100.0)["acceptance"] == [None] * STEPS


def test_old_steps_leave_and_idle_steps_are_unknown(history):
    """Two hours at two readings a second: the same number of steps as ever."""
    for second in range(7200):
        history.add_round(a_round(window=4, accepted=4), 100.0 + second)
        for half in (0.0, 0.5):
            history.set_link(away=False, rtt_s=0.01, now_s=100.0 + second + half)
    body = history.body(7299.0)
    assert body["acceptance"] == [1.0] * STEPS
    body = history.body(7299.0 + 4 * STEP_S)
    assert body["acceptance"] == [1.0] * (STEPS - 4) + [None] * 4
    assert history.body(9999.0)["acceptance"] == [None] * STEPS
    assert len(json.dumps(body)) < 2000  # bytes that each poll of a page costs
