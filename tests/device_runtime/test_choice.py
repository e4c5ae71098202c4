"""What "auto" chooses, on links and pairs whose best choice is known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.alternatives import WINDOWS
from pilotfish.device_runtime.choice import Evidence
from pilotfish.device_runtime.choice.costs import plan_costs
from pilotfish.device_runtime.choice.predictive import PredictivePolicy
from pilotfish.device_runtime.plan import Auto, Plan
from pilotfish.device_runtime.record import Round, Timings
from pilotfish.speculation.latency import Link
from pilotfish.speculation.theory import tokens_per_round
from pilotfish.speculation.tree import nodes_at_most
from pilotfish.wire.link.state import LinkState, Reading
from pilotfish.wire.protocols import LOCAL, STREAM, names
from pilotfish.wire.protocols.protocol import PairSizes
from pilotfish.wire.request import Options
from tests.support.plans import alternatives, plan
from tests.support.rounds import LOSSLESS

VOCAB = 49152
OFFERED = names()
SLOW_TARGET = {1: 0.100, 2: 0.100, 4: 0.101, 8: 0.103, 16: 0.106, 32: 0.112}
DRAFTER = {1: 0.010, 2: 0.012, 4: 0.015}


def state(rtt_s: float, up: float | None = None, down: float | None = None) -> LinkState:
    def reading(value: float | None) -> Reading | None:
        return None if value is None else Reading(value=value, age_s=0.1, samples=5)

    return LinkState(rtt=reading(rtt_s), up=reading(up), down=reading(down))


def plans(auto: Auto | None = None, **options) -> list[Plan]:
    return alternatives(auto or Auto(), Options(seed=1, **options), offered=OFFERED)


def rounds(wanted: Plan, accepted: list[int], **stages: float) -> list[Round]:
    """Rounds of this plan in which so many tokens were accepted, all with the same timings."""
    return [
        Round(
            protocol=wanted.protocol,
            start=10,
            window=len(wanted.expansion),
            nodes=len(wanted.expansion),
            accepted=count,
            tokens=[0] * (count + 1),
            uplink_bytes=50,
            downlink_bytes=58,
            timings=Timings(**stages),
            pass_s=stages.get("verify", 0.0),
        )
        for count in accepted
    ]


def evidence(alpha: float | None = None, target: dict[int, float] | None = None) -> Evidence:
    """Of a pair that accepts with this α; None: that has not drafted yet."""
    result = Evidence(DRAFTER, target or SLOW_TARGET, PairSizes(VOCAB, 576))
    if alpha is not None:
        wanted = plan(protocol="greedy", window=16)
        # of 300 windows as many reach each depth as a geometric law says
        accepted = [sum(at < 300 * alpha**k for k in range(1, 17)) for at in range(300)]
        times = {"draft": 16 * DRAFTER[1], "verify": SLOW_TARGET[16]}
        result.add(wanted, rounds(wanted, accepted, **times))
    return result


def streamed_s(seen: Evidence) -> float:
    """From one token of `stream` to the next."""
    return seen.streaming_s(STREAM) + seen.pass_interval_s()


@pytest.mark.parametrize("alpha", [0.3, 0.6, 0.9])
def test_what_was_seen_is_what_is_expected(alpha: float) -> None:
    seen = evidence(alpha)
    for window in (1, 4, 16):
        expected = seen.tokens(plan(protocol="greedy", window=window))
        assert expected == pytest.approx(tokens_per_round(alpha, window), rel=0.05)


def test_a_pair_without_evidence_is_hoped_for() -> None:
    assert evidence().tokens(plan(protocol="greedy", window=4)) > tokens_per_round(0.75, 4)


def test_evidence_fades() -> None:
    seen = evidence(0.3)
    wanted = plan(protocol="greedy", window=4)
    fresh = seen.tokens(wanted)
    for _ in range(400):
        seen.add(plan(protocol=STREAM), [])
    assert seen.tokens(wanted) > fresh + 0.5


def test_an_untried_protocol_is_expected_to_accept_as_the_tried_ones_do() -> None:
    seen = evidence()
    tried = plan(protocol="coupled", window=8, temperature=1.0, seed=1)
    seen.add(tried, rounds(tried, [2] * 200))
    hazards = seen.acceptance_by_depth(plan(protocol="dsd", window=8, temperature=1.0, seed=1))
    ours = seen.acceptance_by_depth(tried)
    assert ours[0] == pytest.approx(1.0, abs=0.05)
    assert ours[2] < 0.1
    assert hazards[2] < 0.15
    # at temperature 0 another law holds: nothing is known of it
    greedy = seen.acceptance_by_depth(plan(protocol="greedy", window=8))
    assert greedy[2] > 0.7


def test_computing_times_follow_the_machine() -> None:
    seen = evidence()
    wanted = plan(protocol="greedy", window=4)
    before = seen.computing_s(wanted)
    slowed = {"draft": 3 * 4 * DRAFTER[1], "verify": 3 * 0.1015}
    seen.add(wanted, rounds(wanted, [2] * 10, **slowed))
    assert seen.computing_s(wanted) == pytest.approx(3 * before, rel=0.02)
    assert streamed_s(seen) == pytest.approx(3 * SLOW_TARGET[1], rel=0.05)


def test_what_a_protocol_costs_and_what_the_machine_does_are_told_apart() -> None:
    seen = evidence()
    cheap, dear = (plan(protocol=p, window=4, temperature=1.0, seed=1) for p in ("coupled", "dsd"))
    drafted_s, verified_s = 4 * DRAFTER[1], 0.10125

    def answer(wanted: Plan, slow: float) -> None:
        ours = 1.3 if wanted is dear else 1.0
        times = {"draft": slow * drafted_s, "verify": slow * ours * verified_s}
        seen.add(wanted, rounds(wanted, [2] * 10, **times))

    for _ in range(4):
        answer(cheap, 1.0)
        answer(dear, 1.0)
    assert seen.computing_s(cheap) == pytest.approx(drafted_s + verified_s, rel=0.03)
    assert seen.computing_s(dear) == pytest.approx(drafted_s + 1.3 * verified_s, rel=0.03)
    for _ in range(3):
        answer(cheap, 2.0)  # the machine is busy, and so it will be for the other protocol
    assert seen.computing_s(cheap) == pytest.approx(2 * (drafted_s + verified_s), rel=0.05)
    assert seen.computing_s(dear) == pytest.approx(2 * (drafted_s + 1.3 * verified_s), rel=0.15)


def test_the_first_round_of_an_answer_tells_no_time() -> None:
    seen = evidence()
    wanted = plan(protocol="greedy", window=4)
    before = seen.computing_s(wanted)
    seen.add(wanted, rounds(wanted, [2], draft=9.0, verify=9.0, queue=9.0))
    assert seen.computing_s(wanted) == before


@pytest.mark.parametrize("rtt_s", [0.0, 0.02, 0.05, 0.2])
@pytest.mark.parametrize("alpha", [0.2, 0.5, 0.8, 0.95])
def test_the_prediction_is_the_papers_formula(alpha: float, rtt_s: float) -> None:
    seen = evidence(alpha)
    for window in (2, 8):
        wanted = plan(protocol="greedy", window=window)
        link = Link(rtt_s=rtt_s, up_bps=1e7, down_bps=1e7)
        by_hand = window * DRAFTER[1] + SLOW_TARGET[8] + rtt_s
        by_hand /= tokens_per_round(alpha, window)
        assert plan_costs(wanted, link, seen).token_s == pytest.approx(by_hand, rel=0.06)


def test_windows_grow_with_the_rtt_and_the_acceptance() -> None:
    def window(alpha: float, rtt_s: float) -> int:
        auto = Auto(among=["greedy"])
        link = state(rtt_s, 1e8, 1e8)
        return PredictivePolicy().choose(auto, plans(auto), link, evidence(alpha))[1].window

    assert window(0.5, 0.0) < window(0.9, 0.0)
    assert window(0.9, 0.0) <= window(0.9, 0.3)
    assert window(0.2, 0.0) == 1


def test_stream_where_speculation_does_not_pay() -> None:
    fast_target = {1: 0.011, 8: 0.02, 32: 0.04}
    far = state(0.1, 1e8, 1e8)
    rounds_or_stream = plans(Auto(among=["greedy", STREAM]))
    chosen, choice = PredictivePolicy().choose(
        Auto(), rounds_or_stream, far, evidence(0.6, fast_target)
    )
    assert chosen.protocol == STREAM
    assert choice.window == 0
    assert "greedy" in choice.reason  # and against what
    # a slow target behind the same link is speculated for
    chosen, _ = PredictivePolicy().choose(Auto(), rounds_or_stream, far, evidence(0.8))
    assert chosen.protocol == "greedy"


def test_lossy_protocols_only_when_the_request_allows_them() -> None:
    lossy, sampled = Auto(lossy=True), {"temperature": 1.0}

    def names_of(auto: Auto, **more: Any) -> set[str]:
        return {item.protocol for item in alternatives(auto, sampled, offered=OFFERED, **more)}

    assert names_of(lossy) - names_of(Auto()) == {"adaptive"}
    # the drafter alone, only where there is no edge or where its name was given
    assert names_of(lossy, reachable=False) - names_of(lossy) == {LOCAL}
    assert LOCAL not in names_of(Auto(), reachable=False)
    named = alternatives(Auto(among=["greedy", LOCAL]), {}, offered=OFFERED)
    # a bad link and a drafter that costs next to nothing
    assert PredictivePolicy().choose(Auto(), named, state(1.0), evidence(0.5))[0].protocol == LOCAL


def test_thin_uplinks_get_what_sends_little() -> None:
    result = evidence()
    thin, thick = state(0.02, 1e5, 1e5), state(0.02, 1e10, 1e10)
    chosen = PredictivePolicy().choose(
        Auto(), plans(Auto(among=["dsd", "coupled"]), temperature=1.0), thin, result
    )
    assert chosen[0].protocol == "coupled"
    chosen = PredictivePolicy().choose(
        Auto(), plans(Auto(among=["dsd", "coupled"]), temperature=1.0), thick, result
    )
    assert chosen[0].protocol == "dsd"


def test_an_unmeasured_rate_counts_as_slow() -> None:
    result = evidence()
    chosen = PredictivePolicy().choose(
        Auto(), plans(Auto(among=["dsd", "coupled"]), temperature=1.0), state(0.02), result
    )
    assert chosen[0].protocol == "coupled"


def test_noise_does_not_flip_a_choice() -> None:
    policy, seen, chain = PredictivePolicy(), evidence(0.8), plans(Auto(among=["greedy"]))
    first = policy.choose(Auto(), chain, state(0.05, 1e8, 1e8), seen)[1]
    for rtt_s in (0.048, 0.053, 0.045, 0.055, 0.05):
        again = policy.choose(Auto(), chain, state(rtt_s, 1e8, 1e8), seen)[1]
        assert again.window == first.window
    changed = policy.choose(Auto(), chain, state(0.6, 1e8, 1e8), seen)[1]
    assert changed.window > first.window


def test_every_alternative_is_forecast() -> None:
    _, choice = PredictivePolicy().choose(Auto(), plans(), state(0.05), evidence(0.8))
    assert len(choice.forecasts) == len(WINDOWS) + 3  # `stream`, and `ahead` by whose hints
    costs = [forecast.token_s for forecast in choice.forecasts]
    assert costs == sorted(costs)


def test_whoever_gives_a_seed_gets_what_it_determines() -> None:
    seeded = alternatives(Auto(), Options(temperature=1.0, seed=3), offered=OFFERED)
    assert {item.protocol for item in seeded} == {"coupled", "ahead", STREAM}
    free = alternatives(Auto(), Options(temperature=1.0), offered=OFFERED)
    assert {item.protocol for item in free} == {*LOSSLESS, "ahead", STREAM} - {"greedy"}


def test_one_window_is_all_there_is_to_choose_if_one_is_given() -> None:
    windows = {len(item.expansion) for item in plans(window=3) if not item.streams}
    assert windows == {3}


def test_all_alternatives_share_a_seed() -> None:
    alike = alternatives(Auto(), Options(temperature=1.0), offered=OFFERED)
    assert len({item.sampling.seed for item in alike}) == 1


def test_what_the_edge_does_not_take_is_no_alternative() -> None:
    few = alternatives(Auto(), Options(), offered=["greedy"], most=5)
    assert {item.protocol for item in few} == {"greedy"}
    assert max(len(item.expansion) for item in few) == 5
    trees = alternatives(Auto(among=["tree"]), Options(temperature=1.0), offered=OFFERED, most=16)
    assert [nodes_at_most(item.expansion) for item in trees] == [2, 6, 10, 14]
    (values,) = alternatives(Auto(among=["greedy"]), Options(window=100), offered=OFFERED, most=16)
    assert len(values.expansion) == 16  # as many as the edge takes
    with pytest.raises(UnsupportedError, match="None of the protocols"):
        alternatives(Auto(among=["dsd"]), Options(), offered=["greedy"])


@pytest.mark.parametrize(
    ("auto", "options", "text"),
    [
        (Auto(), {"window": "auto"}, "chooses the window itself"),
        (Auto(), {"expansion": [2, 1]}, "chooses the window itself"),
        (Auto(among=["greedy"]), {"temperature": 1.0}, "greedy"),
        (Auto(), {"temperature": -1.0}, "temperature"),
        (Auto(among=["greedy", STREAM]), {"draft_temperature": 0.5}, "greedy"),
        (Auto(), {"window": 1000}, "window must be"),
    ],
)
def test_requests_that_leave_nothing_to_choose(auto: Auto, options: Options, text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        alternatives(auto, options, offered=OFFERED)


@pytest.mark.parametrize(
    ("among", "text"),
    [(["gredy"], "no protocol 'gredy'"), ("gredy", "'gredy'"), ([], "No protocol")],
)
def test_protocols_that_there_are_not(among: Sequence[str], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        Auto(among=among)


def test_one_protocol_may_be_named_as_it_is() -> None:
    assert {item.protocol for item in plans(Auto(among="greedy"))} == {"greedy"}


def test_an_edge_that_tells_no_times() -> None:
    silent = Evidence(DRAFTER, {}, PairSizes(VOCAB, 576))
    wanted = plan(protocol="greedy", window=4)
    assert 0.0 < silent.computing_s(wanted) < 1.0
    silent.add(wanted, rounds(wanted, [2] * 10, draft=0.04, verify=0.2))
    assert silent.computing_s(wanted) == pytest.approx(0.24, rel=0.01)


def test_a_machine_that_was_slow_once_is_tried_again() -> None:
    """Throttled while it drafted, the device streams; when it is cool it drafts again."""
    seen, policy = evidence(0.8), PredictivePolicy()
    known = plans(Auto(among=["greedy", STREAM]))
    hot = plan(protocol="greedy", window=8)
    for _ in range(4):
        seen.add(hot, rounds(hot, [6] * 10, draft=10 * 8 * DRAFTER[1], verify=SLOW_TARGET[8]))
    link = state(0.02, 1e8, 1e8)
    streamed, choice = policy.choose(Auto(), known, link, seen)
    assert streamed.protocol == STREAM
    answers = 0
    while choice.protocol == STREAM and answers < 100:
        seen.add(streamed, rounds(streamed, [0] * 40, verify=SLOW_TARGET[1]))
        _, choice = policy.choose(Auto(), known, link, seen)
        answers += 1
    assert 1 < answers < 40


def test_tokens_that_were_waiting_cost_a_pass_all_the_same() -> None:
    """Bursts: most tokens lie there already, and one has been waited for."""
    seen = evidence()
    wanted = plan(protocol=STREAM)
    burst = rounds(wanted, [0] * 8, verify=SLOW_TARGET[1])
    for waited_s, item in zip((9.0, 0.77, 0, 0, 0, 0, 0, 0), burst, strict=True):
        item.timings = Timings(downlink=waited_s)
    seen.add(wanted, burst)
    # 0.77 s for seven tokens: 0.1 s of a pass each, and 0.01 s in between
    assert streamed_s(seen) == pytest.approx(SLOW_TARGET[1] + 0.010, rel=0.01)
    seen.add(wanted, rounds(wanted, [0] * 8, downlink=0.0))  # no wait
    assert streamed_s(seen) > SLOW_TARGET[1] / 2


@pytest.mark.parametrize("seconds", [0.0, 1e12])
def test_an_edge_that_lies_about_its_times(seconds: float) -> None:
    seen = evidence()
    wanted = plan(protocol="greedy", window=4)
    seen.add(wanted, rounds(wanted, [2] * 10, draft=seconds, verify=seconds))
    _, choice = PredictivePolicy().choose(Auto(), plans(), state(0.05), seen)
    assert choice.token_s is not None
    assert choice.token_s >= 0.0
