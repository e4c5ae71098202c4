"""When "auto" has the target stream with hints, whose, and what a thrifty request takes instead."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.choice import Evidence
from pilotfish.device_runtime.choice.costs import PlanCosts, add_forecast_error, plan_costs
from pilotfish.device_runtime.choice.predictive import PredictivePolicy
from pilotfish.device_runtime.plan import Auto, Plan
from pilotfish.device_runtime.record import Choice, Round, Timings
from pilotfish.speculation.ahead import survival, token_costs
from pilotfish.speculation.latency import Link
from pilotfish.wire.protocols import STREAM, names
from pilotfish.wire.protocols.protocol import PairSizes
from pilotfish.wire.request import Options
from tests.device_runtime.test_choice import plans, rounds, state
from tests.support.plans import alternatives, plan

AHEAD = "ahead"
DRAFTER = {1: 0.006, 2: 0.007, 4: 0.009}
GPU = {1: 0.040, 16: 0.0445, 32: 0.0493}  # 40 ms, and 0.3 for each position more
SIZES = PairSizes(49152, 576)


def streamed(
    runs: list[tuple[int, int, int]],
    *,
    source: str = "",
    window: int = 0,
    accepted: int = 0,
    drafted_s: float = DRAFTER[1],
    pass_s: float = GPU[1],
) -> list[Round]:
    """Rounds of `ahead`, one for each run, in which the device drafted three tokens each."""
    return [
        Round(
            protocol=AHEAD,
            start=10,
            window=window,
            accepted=accepted,
            source=source,
            tokens=[0] * (accepted + 1),
            nodes=3,
            run=run,
            timings=Timings(draft=3 * drafted_s, verify=max(0.0, pass_s - 3 * drafted_s)),
            pass_s=pass_s,
        )
        for run in runs
    ]


def runs_of(alpha: float, count: int = 400) -> list[tuple[int, int, int]]:
    """Of so many corrections as many runs come so far as a geometric law says."""
    lengths = [int(np.log(1 - (at + 0.5) / count) / np.log(alpha)) for at in range(count)]
    return [(0, length + 1, length) for length in lengths]


def evidence(alpha: float | None, edge_with_drafter: dict[int, float] | None = None) -> Evidence:
    """Of a pair whose device's drafts are right with this probability each; None: nothing yet."""
    result = Evidence(DRAFTER, GPU, SIZES, edge_with_drafter)
    if alpha is not None:
        result.add(plan(protocol=AHEAD, hints="device"), streamed(runs_of(alpha)))
    return result


def chosen(rtt_ms: float, seen: Evidence, auto: Auto | None = None) -> Choice:
    link = state(rtt_ms * 1e-3, 1e8, 1e8)
    return PredictivePolicy().choose(auto or Auto(), plans(auto), link, seen)[1]


def cost(wanted: Plan, rtt_ms: float, seen: Evidence) -> PlanCosts:
    return plan_costs(wanted, Link(rtt_s=rtt_ms * 1e-3, up_bps=1e9, down_bps=1e9), seen)


@pytest.mark.parametrize("rtt_ms", [5, 20, 50, 100])
@pytest.mark.parametrize("alpha", [0.6, 0.8])
def test_the_forecast_is_the_model(alpha: float, rtt_ms: int) -> None:
    long = plan(protocol=AHEAD, hints="device", max_tokens=10**6)
    pass_s = [0.040 + 0.0003 * drafts for drafts in range(16)]
    by_hand = token_costs(
        survival(np.full(300, alpha)), rtt_s=rtt_ms * 1e-3, draft_s=0.006, pass_s=pass_s
    )
    assert cost(long, rtt_ms, evidence(alpha)).token_s == pytest.approx(by_hand.token_s, rel=0.03)


@pytest.mark.parametrize(
    ("alpha", "rtt_ms", "wanted"),
    [
        (0.7, 0, AHEAD),
        (0.7, 50, AHEAD),
        (0.9, 200, AHEAD),
        (0.3, 0, AHEAD),  # greedy with a window of 1 is near
    ],
)
def test_hints_of_the_device_where_they_pay(alpha: float, rtt_ms: float, wanted: str) -> None:
    choice = chosen(rtt_ms, evidence(alpha))
    assert (choice.protocol, choice.hints) == (wanted, "all")


def test_rounds_where_a_pass_is_long_and_steep_and_the_link_short() -> None:
    """A target that takes ten drafts in one pass gains by waiting for them."""
    slow = {1: 0.139, 16: 0.139 + 15 * 0.009}
    seen = Evidence(DRAFTER, slow, SIZES)
    seen.add(plan(protocol=AHEAD, hints="device"), streamed(runs_of(0.7), pass_s=slow[1]))
    assert chosen(5, seen).protocol == "greedy"
    assert chosen(100, seen).protocol == AHEAD


@pytest.mark.parametrize(("alpha", "rtt_ms"), [(0.4, 100), (0.6, 400), (0.05, 20)])
def test_the_device_rests_where_its_hints_come_too_late(alpha: float, rtt_ms: float) -> None:
    seen = evidence(alpha)
    choice = chosen(rtt_ms, seen)
    assert (choice.protocol, choice.hints) == (AHEAD, "edge")
    assert choice.token_s is not None
    alone_s = cost(plan(protocol=STREAM), rtt_ms, seen).token_s
    assert 0.95 * alone_s < choice.token_s <= alone_s


def test_acceptance_is_by_the_run_so_far() -> None:
    """After a correction half of the drafts are right; who survives that goes on for long."""
    seen = Evidence(DRAFTER, GPU, SIZES)
    wanted = plan(protocol=AHEAD, hints="device")
    pieces = [*[(0, 1, 0)] * 200, *[(0, 1, 1)] * 200]  # a run comes in pieces, a pass each
    for depth in range(1, 20):
        pieces += [(depth, 1, 1)] * 190 + [(depth, 1, 0)] * 10
    seen.add(wanted, streamed(pieces))
    hazards = seen.acceptance_by_depth(wanted)
    assert hazards[0] == pytest.approx(0.5, abs=0.03)
    assert hazards[[1, 5, 15]] == pytest.approx(0.95, abs=0.02)
    assert hazards[60] == pytest.approx(0.95, abs=0.02)  # where no run has come so far yet
    once = evidence(hazards[:20].mean())
    far = 100
    assert cost(wanted, far, seen).token_s < 0.97 * cost(wanted, far, once).token_s


def test_what_windows_showed_is_expected_of_runs() -> None:
    seen = Evidence(DRAFTER, GPU, SIZES)
    wanted = plan(protocol=AHEAD, hints="device")
    hopeful = cost(wanted, 20, seen).token_s
    windows = plan(protocol="greedy", window=8)
    seen.add(windows, rounds(windows, [0, 1, 0, 2] * 50, draft=8 * DRAFTER[1], verify=0.042))
    assert cost(wanted, 20, seen).token_s > 1.2 * hopeful


def test_drafting_is_as_slow_as_it_is_while_the_target_runs() -> None:
    """Two ends on one machine: each is slower while the other computes, and alone it is not."""
    seen, hinted = Evidence(DRAFTER, GPU, SIZES), plan(protocol=AHEAD, hints="device")
    rounds_ = plan(protocol="greedy", window=4)
    for _ in range(6):
        alone = {"draft": 4 * DRAFTER[1], "verify": 0.0412}
        seen.add(rounds_, rounds(rounds_, [2] * 20, **alone))
        seen.add(hinted, streamed([(0, 2, 1)] * 20, drafted_s=1.6 * DRAFTER[1]))
    assert seen.hint_s(AHEAD) == pytest.approx(1.6 * DRAFTER[1], rel=0.05)
    assert seen.computing_s(rounds_) == pytest.approx(sum(alone.values()), rel=0.05)


def test_the_edge_alone_is_as_fast_as_under_stream() -> None:
    """What slows the target down while the device drafts does not while it rests."""
    seen = Evidence(DRAFTER, GPU, SIZES)
    for _ in range(4):
        seen.add(plan(protocol=STREAM), rounds(plan(protocol=STREAM), [0] * 20, verify=GPU[1]))
        slow = streamed([(0, 1, 0)] * 20, pass_s=1.5 * GPU[1])
        seen.add(plan(protocol=AHEAD, hints="device"), slow)
    alone_s = cost(plan(protocol=STREAM), 100, seen).token_s
    ours = plan(protocol=AHEAD, hints="edge")
    assert cost(ours, 100, seen).token_s == pytest.approx(alone_s, rel=0.1)
    device = plan(protocol=AHEAD, hints="device")
    assert cost(device, 100, seen).token_s > 1.3 * alone_s


@pytest.mark.parametrize("hints", ["edge", "all"])
def test_what_a_drafter_slows_beside_it_is_not_expected_of_the_target_alone(hints: str) -> None:
    """Untried, `stream` would else be as slow, and never be tried."""
    seen = evidence(0.8, edge_with_drafter={1: 0.004})
    alone_s = cost(plan(protocol=STREAM), 20, seen).token_s
    wanted = plan(protocol=AHEAD, hints=hints)
    for _ in range(8):
        slow = streamed([(0, 1, 1)] * 20, source="edge", window=3, accepted=3, pass_s=2 * GPU[1])
        seen.add(wanted, slow)
    assert cost(plan(protocol=STREAM), 20, seen).token_s == pytest.approx(alone_s, rel=0.1)
    paced = seen.streaming_s(seen.pace_protocol(wanted))
    assert paced == pytest.approx(2 * seen.streaming_s(STREAM), rel=0.1)


def test_prompts_that_repeat_themselves_are_left_to_the_edge() -> None:
    seen = evidence(0.3)
    ours = plan(protocol=AHEAD, hints="edge")
    before_s = cost(ours, 100, seen).token_s
    for _ in range(3):
        result = streamed([(0, 0, 0)] * 30, source="text", window=6, accepted=4, pass_s=0.0415)
        seen.add(ours, result + streamed([(0, 0, 0)] * 30))
    # every other pass brings five tokens, the others one
    assert cost(ours, 100, seen).token_s == pytest.approx(before_s / 3, rel=0.25)
    choice = chosen(100, seen)
    assert (choice.protocol, choice.hints) == (AHEAD, "edge")
    for _ in range(10):
        seen.add(ours, streamed([(0, 0, 0)] * 60))  # a chat in between
    assert cost(ours, 100, seen).token_s > 0.8 * before_s


def test_hints_that_nobody_looked_for_are_no_evidence() -> None:
    seen = evidence(0.3)
    ours = plan(protocol=AHEAD, hints="edge")
    before = cost(ours, 20, seen)
    for wanted, source in (("device", ""), ("all", "device")):
        others = streamed([(0, 1, 0)] * 60, source=source, window=source != "")
        seen.add(plan(protocol=AHEAD, hints=wanted), others)
    assert cost(ours, 20, seen).token_s == pytest.approx(before.token_s, rel=0.01)


def test_a_drafter_beside_the_target_has_no_rtt() -> None:
    seen = evidence(0.7, edge_with_drafter={1: 0.004, 4: 0.006})
    near, far = chosen(0, seen), chosen(150, seen)
    assert (far.protocol, far.hints) == (AHEAD, "edge")
    ours = plan(protocol=AHEAD, hints="edge", max_tokens=10**6)
    assert cost(ours, 150, seen).token_s == pytest.approx(cost(ours, 0, seen).token_s, rel=0.01)
    assert near.token_s == pytest.approx(far.token_s, rel=0.1)
    # which is seldom right
    for _ in range(3):
        wrong = streamed([(0, 0, 0)] * 100, source="edge", window=3, accepted=0)
        seen.add(ours, wrong)
    assert chosen(0, seen).hints == "all"


LINK = Link(rtt_s=0.1, up_bps=1e9, down_bps=1e9)


def answered(wanted: Plan, rounds_: list[Round], seen: Evidence) -> None:
    """One answer more."""
    seen.add(wanted, rounds_)
    add_forecast_error(wanted, rounds_, LINK, seen)


def test_an_edge_whose_drafter_gives_nothing_is_not_held() -> None:
    """It tells of one, which is never heard: a full edge, or one that cannot draft."""
    seen, policy = evidence(0.8, edge_with_drafter={1: 0.002}), PredictivePolicy()
    link = state(0.1, 1e8, 1e8)
    results = []
    for _ in range(30):
        wanted, choice = policy.choose(Auto(), plans(), link, seen)
        results.append(choice.hints)
        if choice.hints == "edge":
            answered(wanted, streamed([(0, 0, 0)] * 40), seen)
        else:
            paying = streamed([(0, 3, 3)] * 40, source="device", window=1, accepted=1)
            answered(wanted, paying, seen)
    assert results[0] == "edge"  # it promises as much, and the device might rest
    assert results.count("edge") <= 4  # tried again now and then
    assert set(results) == {"edge", "all"}
    # long after, nothing is held against it
    ours = plan(protocol=AHEAD, hints="edge")
    for _ in range(100):
        seen.add(plan(protocol=STREAM), [])
    assert seen.forecast_errors.factor(ours) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize("slower", [0.6, 1.0, 1.8])
def test_forecasts_follow_what_came_of_them(slower: float) -> None:
    """An edge that takes fewer hints than the model has, or more of other sources."""
    seen = evidence(0.8)
    wanted = plan(protocol=AHEAD, hints="device")
    model_s = cost(wanted, 100, seen).token_s
    for _ in range(20):  # the passes are those of the model, and the tokens fewer
        add_forecast_error(wanted, streamed([(0, 1, 1)] * 20, pass_s=slower * model_s), LINK, seen)
    assert cost(wanted, 100, seen).token_s == pytest.approx(slower * model_s, rel=0.12)
    before = cost(plan(protocol=STREAM), 100, seen)
    assert cost(plan(protocol=STREAM), 100, seen) == before
    assert seen.forecast_errors.factor(plan(protocol=AHEAD, hints="edge")) == 1.0


@pytest.mark.parametrize("waited_s", [0.0, 1e-9, 1e9])
def test_one_answer_changes_a_forecast_by_a_part(waited_s: float) -> None:
    seen, wanted = evidence(0.8), plan(protocol=AHEAD)
    add_forecast_error(
        wanted, streamed([(0, 1, 1)] * 20, pass_s=waited_s, drafted_s=0.0), LINK, seen
    )
    assert 0.8 < seen.forecast_errors.factor(wanted) <= 1.5
    add_forecast_error(wanted, streamed([(0, 1, 1)]), LINK, seen)  # which waited for the prompt
    add_forecast_error(plan(protocol=STREAM), streamed([(0, 1, 1)] * 20), LINK, seen)
    assert 0.8 < seen.forecast_errors.factor(wanted) <= 1.5


def test_the_device_rests_as_soon_as_it_drafts_in_vain() -> None:
    """What is held is not kept where it is no faster than to let the device rest."""
    seen, policy = evidence(0.8), PredictivePolicy()
    auto, link = Auto(among=[AHEAD, STREAM]), state(0.1, 1e8, 1e8)
    results = []
    while len(results) < 30 and results[-1:] != ["edge"]:
        wanted, choice = policy.choose(auto, plans(auto), link, seen)
        results.append(choice.hints)
        # a busy edge takes nothing of it
        answered(wanted, streamed([(0, 3, 3)] * 20, pass_s=1.1 * GPU[1]), seen)
    assert results[0] == "all"
    assert results[-1] == "edge"


def test_whoever_names_the_hints_gets_them() -> None:
    options = Options(seed=1)
    options.update({"hints": "device"})
    result = alternatives(Auto(among=[AHEAD]), options, offered=names())
    assert len(result) == 1
    choice = PredictivePolicy().choose(Auto(), result, state(0.02), evidence(0.7))[1]
    assert [forecast.hints for forecast in choice.forecasts] == ["device"]
    assert choice.reason.startswith("ahead, hints device at ")


def test_thrift_takes_what_spares_the_edge_and_is_no_slower_than_the_target_alone() -> None:
    seen, thrifty = evidence(0.8), Auto(thrift=True)
    near, far = chosen(20, seen, thrifty), chosen(300, seen, thrifty)
    assert chosen(20, seen).protocol == AHEAD
    assert near.protocol == "greedy"
    alone_s = cost(plan(protocol=STREAM), 20, seen).token_s
    edge_s = {
        (forecast.protocol, forecast.window, forecast.hints): forecast.edge_s
        for forecast in near.forecasts
    }
    assert near.token_s is not None
    assert near.token_s <= alone_s
    allowed = [forecast for forecast in near.forecasts if forecast.token_s <= alone_s]
    assert edge_s[near.protocol, near.window, ""] == min(forecast.edge_s for forecast in allowed)
    assert edge_s[AHEAD, 0, "all"] == pytest.approx(chosen(20, seen).token_s, rel=0.03)
    assert far.protocol in (AHEAD, STREAM)  # no window is as fast
    assert "of the edge's time" in near.reason


def test_thrift_is_held_as_long_as_it_is_hardly_slower() -> None:
    policy, seen, auto = PredictivePolicy(), evidence(0.8), Auto(thrift=True)
    alike = plans(auto)
    first = policy.choose(auto, alike, state(0.02, 1e8, 1e8), seen)[1]
    for rtt_ms in (21, 19, 22, 20):
        again = policy.choose(auto, alike, state(rtt_ms * 1e-3, 1e8, 1e8), seen)[1]
        assert (again.protocol, again.window) == (first.protocol, first.window)
    far = policy.choose(auto, alike, state(0.4, 1e8, 1e8), seen)[1]
    assert far.protocol != "greedy"
    assert far.token_s is not None
    # a request that is not thrifty has a last choice of its own
    assert policy.choose(Auto(), alike, state(0.02, 1e8, 1e8), seen)[1].protocol == AHEAD


def test_a_policy_that_does_not_predict_knows_no_thrift() -> None:
    with pytest.raises(UnsupportedError, match="not support thrift"):
        Auto(thrift=True, lossy=True, policy="threshold")


@pytest.mark.parametrize("seconds", [0.0, 1e12])
def test_an_edge_that_lies_about_its_passes(seconds: float) -> None:
    seen = evidence(0.7, edge_with_drafter={1: max(seconds, 1e-9)})
    seen.add(plan(protocol=AHEAD), streamed([(0, 2, 1)] * 10, drafted_s=seconds, pass_s=seconds))
    choice = chosen(50, seen)
    assert choice.token_s is not None
    assert choice.token_s >= 0.0


MASKED = {1: 0.006, 2: 0.007, 4: 0.009, 8: 0.012}


def test_the_drafts_of_one_pass_share_its_time() -> None:
    seen = Evidence(MASKED, GPU, SIZES, drafts_per_pass=8)
    assert seen.hint_s(AHEAD) == pytest.approx(0.012 / 8)
    # the measured time of a draft corrects it, as for other drafters
    hinted = plan(protocol=AHEAD, hints="device")
    seen.add(hinted, streamed(runs_of(0.7), drafted_s=2 * 0.012 / 8))
    assert seen.hint_s(AHEAD) == pytest.approx(2 * 0.012 / 8, rel=0.05)


@pytest.mark.parametrize(
    ("window", "drafting_s"),
    [(1, 0.006), (4, 0.009), (8, 0.012), (9, 0.012 + 0.012), (12, 0.012 + 0.012 / 8 * 11)],
)
def test_a_window_of_a_masked_drafter_takes_a_pass_for_each_eight(
    window: int, drafting_s: float
) -> None:
    """The second pass reads the drafts of the first, and masks."""
    masked, ordinary = (
        Evidence(MASKED, GPU, SIZES, drafts_per_pass=most).computing_s(
            plan(protocol="greedy", window=window)
        )
        for most in (8, 1)
    )
    assert ordinary - masked == pytest.approx(window * 0.006 - drafting_s)


@pytest.mark.parametrize(
    ("wanted", "drafting_s"),
    [
        ({"protocol": "tree", "expansion": (2, 2)}, 0.007),  # one pass of 2 tokens, for both levels
        ({"protocol": "wisv-full", "window": 4}, 0.009 + 0.009),  # the second reads the drafts
    ],
)
def test_all_kinds_of_windows_share_passes_over_masks(
    wanted: dict[str, Any], drafting_s: float
) -> None:
    masked, ordinary = (
        Evidence(MASKED, GPU, SIZES, drafts_per_pass=most).computing_s(plan(**wanted))
        for most in (8, 1)
    )
    level_by_level_s = 0.006 + 0.007 if wanted["protocol"] == "tree" else 5 * 0.006
    assert ordinary - masked == pytest.approx(level_by_level_s - drafting_s)


def test_passes_of_one_draft_do_not_make_the_machine_seem_slow() -> None:
    """Under `ahead` a pass may make fewer drafts than it could; windows take what they took."""
    seen = Evidence(MASKED, GPU, SIZES, drafts_per_pass=8)
    greedy, hinted = plan(protocol="greedy", window=8), plan(protocol=AHEAD, hints="device")
    before_s = seen.computing_s(greedy)
    for _ in range(3):
        seen.add(hinted, streamed(runs_of(0.7), drafted_s=0.006))
    assert seen.hint_s(AHEAD) == pytest.approx(0.006, rel=0.05)
    assert seen.computing_s(greedy) == pytest.approx(before_s, rel=0.05)
    assert seen.local_token_s() == pytest.approx(0.006, rel=0.05)
