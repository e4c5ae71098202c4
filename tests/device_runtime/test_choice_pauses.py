"""What "auto" makes of a pause: nothing for long. One that stood still is no slow protocol."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pilotfish.device_runtime.choice import Evidence
from pilotfish.device_runtime.choice.costs import add_forecast_error, plan_costs, with_defaults
from pilotfish.device_runtime.choice.predictive import PredictivePolicy
from pilotfish.device_runtime.plan import Auto, Plan
from pilotfish.device_runtime.record import Round
from pilotfish.wire.protocols import STREAM
from pilotfish.wire.protocols.protocol import PairSizes
from tests.device_runtime.test_choice import (
    DRAFTER,
    SLOW_TARGET,
    VOCAB,
    evidence,
    plans,
    rounds,
    state,
)
from tests.device_runtime.test_choice_ahead import AHEAD, GPU, runs_of, streamed
from tests.device_runtime.test_choice_ahead import evidence as ahead_evidence
from tests.support.plans import plan

LINK = state(0.02, 1e8, 1e8)
GREEDY = "greedy"
PAUSES = [1.0, 5.0]


def untried(hope: float) -> Evidence:
    """Nothing is known of any time; of drafts this is hoped."""
    return Evidence(DRAFTER, SLOW_TARGET, PairSizes(VOCAB, 576), prior=hope)


def usual(wanted: Plan, count: int, accepted: int = 0) -> list[Round]:
    """Rounds as they are on a machine at rest; the first of an answer tells no time."""
    if wanted.streams:
        return rounds(wanted, [0] * count, downlink=SLOW_TARGET[1], verify=0.0)
    width = len(wanted.expansion)
    times = {"draft": width * DRAFTER[1], "verify": SLOW_TARGET[8], "queue": 0.001, "settle": 0.001}
    return rounds(wanted, [accepted] * count, **times)


def answer(
    wanted: Plan, count: int, accepted: int = 0, stage: str = "", pause_s: float = 0.0
) -> list[Round]:
    """Rounds of an answer; its last one meets a pause in this stage."""
    result = usual(wanted, count, accepted)
    for item in result:
        item.pass_s = SLOW_TARGET[1] if wanted.streams else SLOW_TARGET[8]
    if stage:
        timings = result[-1].timings
        result[-1].timings = replace(timings, **{stage: getattr(timings, stage) + pause_s})
        if stage == "verify":
            result[-1].pass_s += pause_s
    return result


@pytest.mark.parametrize("pause_s", PAUSES)
@pytest.mark.parametrize("stage", ["draft", "encode", "queue", "verify", "settle", "downlink"])
@pytest.mark.parametrize("best", [GREEDY, STREAM])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_pause_in_the_first_short_answer_bars_no_protocol(best, stage, count, pause_s):
    hope, accepted = (0.8, 6) if best == GREEDY else (0.2, 0)
    seen, policy = untried(hope), PredictivePolicy()
    known = plans(Auto(among=[GREEDY, STREAM]))
    wanted, choice = policy.choose(Auto(), known, LINK, seen)
    assert choice.protocol == best
    seen.add(wanted, answer(wanted, count, accepted, stage, pause_s))
    answers = 0
    while True:
        wanted, choice = policy.choose(Auto(), known, LINK, seen)
        if choice.protocol == best:
            break
        assert answers < 8
        seen.add(wanted, answer(wanted, 20, accepted))
        answers += 1
    seen.add(wanted, answer(wanted, 20, accepted))
    seen.add(wanted, answer(wanted, 20, accepted))
    assert policy.choose(Auto(), known, LINK, seen)[1].protocol == best


@pytest.mark.parametrize("pause_s", PAUSES)
@pytest.mark.parametrize(("count", "at"), [(20, 1), (20, 19), (40, 20), (100, 1), (100, 99)])
def test_a_pause_in_an_answer_changes_no_forecast(count, at, pause_s):
    wanted = plan(protocol=STREAM)
    quiet, paused = evidence(), evidence()
    quiet.add(wanted, answer(wanted, count))
    info = answer(wanted, count)
    info[at].timings.downlink += pause_s
    paused.add(wanted, info)
    link = with_defaults(LINK)
    expected_s = plan_costs(wanted, link, quiet).token_s
    assert plan_costs(wanted, link, paused).token_s == pytest.approx(expected_s, rel=0.02)


@pytest.mark.parametrize("pause_s", PAUSES)
@pytest.mark.parametrize(("count", "at"), [(20, 1), (20, 19), (40, 20), (100, 1), (100, 99)])
def test_a_pause_in_an_answer_of_ahead_is_no_outcome(count, at, pause_s):
    wanted, link = plan(protocol=AHEAD, hints="device"), with_defaults(state(0.05, 1e8, 1e8))

    def after(pause_s: float) -> tuple[float, Evidence]:
        seen = ahead_evidence(0.8)
        info = streamed(runs_of(0.8, count), source="device", window=2, accepted=1, pass_s=GPU[1])
        info[at].timings.downlink += pause_s
        seen.add(wanted, info)
        add_forecast_error(wanted, info, link, seen)
        return seen.forecast_errors.factor(wanted), seen

    quiet, _ = after(0.0)
    paused, _ = after(pause_s)
    assert paused == pytest.approx(quiet, rel=0.03)


def test_an_answer_while_others_worked_is_not_held_against_its_protocol_for_good():
    """The machine was overloaded during one answer; since then another protocol has run alone."""
    seen, link = untried(0.2), with_defaults(LINK)
    slow, since = plan(protocol=STREAM), plan(protocol=GREEDY, window=8)
    expected_s = plan_costs(slow, link, seen).token_s
    info = answer(slow, 20)
    for item in info:
        item.pass_s *= 4.0
        item.timings.downlink *= 4.0
    seen.add(slow, info)
    for _ in range(40):
        seen.add(since, answer(since, 20))
    assert plan_costs(slow, link, seen).token_s == pytest.approx(expected_s, rel=0.05)
