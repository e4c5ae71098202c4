"""What "auto" makes of the protocols with a decision head, on links and pairs that are made up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.choice import POLICIES, Evidence
from pilotfish.device_runtime.choice.costs import predicted_round_s
from pilotfish.device_runtime.choice.predictive import PredictivePolicy
from pilotfish.device_runtime.choice.threshold import ThresholdPolicy
from pilotfish.device_runtime.plan import Auto, Plan
from pilotfish.device_runtime.record import Choice, Round, Timings
from pilotfish.speculation.latency import Link, communication_s
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import PROTOCOL_REGISTRY
from pilotfish.wire.protocols.protocol import PairSizes
from pilotfish.wire.request import Options
from tests.device_runtime.test_choice import (
    DRAFTER,
    OFFERED,
    SLOW_TARGET,
    VOCAB,
    evidence,
    plans,
    state,
)
from tests.support.plans import alternatives, plan

FULL, SELECTIVE = "wisv-full", "wisv-selective"
BOTH = Auto(among=[FULL, SELECTIVE], policy="threshold")
LOSSY = Auto(lossy=True, policy="threshold")
SIZES = PairSizes(VOCAB, 576)
HEADLESS = [name for name in OFFERED if name not in (FULL, SELECTIVE)]


def fresh() -> Evidence:
    return Evidence(DRAFTER, SLOW_TARGET, SIZES)


def rounds(
    wanted: Plan, accepted: int, forgiven: int = 0, *, inquired: int = 0, count: int = 40
) -> list[Round]:
    """Rounds of this plan, all alike, that took as long as both ends said at start."""
    levels = len(wanted.expansion)
    expected = wanted.exchange.estimate_bytes(
        wanted.expansion, wanted.drafting.sampling, 0.0, SIZES
    )
    return [
        Round(
            protocol=wanted.protocol,
            start=10,
            window=levels,
            nodes=levels,
            accepted=accepted,
            tokens=[0] * (accepted + 1),
            uplink_bytes=round(expected.up),
            downlink_bytes=round(expected.down),
            timings=Timings(draft=levels * DRAFTER[1], verify=SLOW_TARGET[8]),
            notes={"forgiven": forgiven},
            inquired=inquired,
            pass_s=SLOW_TARGET[8],
        )
        for _ in range(count)
    ]


def chosen(
    auto: Auto, link: LinkState, seen: Evidence | None = None, **options
) -> tuple[Plan, Choice]:
    result = alternatives(auto, Options(**options), offered=OFFERED)
    return POLICIES[auto.policy]().choose(auto, result, link, seen or fresh())


# The paper's rule


@pytest.mark.parametrize("auto", [BOTH, LOSSY])
@pytest.mark.parametrize(
    ("rtt_s", "wanted"), [(0.0, SELECTIVE), (0.010, SELECTIVE), (0.0101, FULL), (0.5, FULL)]
)
def test_full_above_ten_milliseconds_else_selective(auto: Auto, rtt_s: float, wanted: str) -> None:
    picked, choice = chosen(auto, state(rtt_s, 1e8, 1e8))
    assert picked.protocol == choice.protocol == wanted
    assert choice.policy == "threshold"
    assert "10 ms" in choice.reason
    assert {forecast.protocol for forecast in choice.forecasts} == {wanted}


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_the_threshold_is_the_requests(rtt_s: float, threshold_s: float) -> None:
    auto = Auto(lossy=True, policy="threshold", rtt_threshold_s=threshold_s)
    picked, _ = chosen(auto, state(rtt_s), window=4)
    assert picked.protocol == (FULL if rtt_s > threshold_s else SELECTIVE)


def test_an_unknown_rtt_counts_as_a_long_one() -> None:
    assert chosen(LOSSY, LinkState())[0].protocol == FULL


def test_the_window_is_the_requests_or_the_one_that_the_cost_model_finds_cheapest() -> None:
    assert len(chosen(LOSSY, state(0.05), window=7)[0].expansion) == 7
    link, ours = state(0.05, 1e8, 1e8), Auto(among=[FULL])
    picked, choice = chosen(LOSSY, link)
    by_model, modelled = PredictivePolicy().choose(ours, plans(ours), link, fresh())
    assert len(picked.expansion) == len(by_model.expansion)
    assert choice.token_s == modelled.token_s
    # where hardly anything is accepted a long window does not pay
    poor = fresh()
    poor.add(plan(protocol=FULL, window=8), rounds(plan(protocol=FULL, window=8), 0, count=300))
    assert chosen(LOSSY, link, poor)[1].window < choice.window


@pytest.mark.parametrize(
    ("auto", "options", "offered", "text"),
    [
        (Auto(policy="threshold"), {}, OFFERED, "allow lossy protocols"),
        (Auto(policy="threshold", among=[FULL]), {}, OFFERED, "wisv-selective, .*name both"),
        (Auto(policy="threshold", among=["greedy"]), {}, OFFERED, "wisv-selective, .*name both"),
        (LOSSY, {"temperature": 0.5}, OFFERED, "work only at temperature 0"),
        (LOSSY, {}, HEADLESS, "decision head for this drafter"),
        (BOTH, {}, HEADLESS, "wisv-full and wisv-selective the edge needs a decision head"),
        (BOTH, {"temperature": 0.5}, OFFERED, "wisv-full decodes at temperature 0, not 0.5"),
    ],
)
def test_a_threshold_with_nothing_to_choose_from_says_what_to_do(
    auto: Auto, options: Options, offered: list[str], text: str
) -> None:
    def choose() -> None:
        result = alternatives(auto, options, offered=offered)
        ThresholdPolicy().choose(auto, result, state(0.001), fresh())

    with pytest.raises(UnsupportedError, match=text):
        choose()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rtt_threshold_s": 0.02}, "only be used with policy threshold"),
        ({"rtt_threshold_s": -0.02, "policy": "threshold"}, "between 0 and 3600, not -0.02"),
        ({"rtt_threshold_s": float("inf"), "policy": "threshold"}, "between 0 and 3600, not inf"),
        ({"rtt_threshold_s": float("nan"), "policy": "threshold"}, "between 0 and 3600, not nan"),
        ({"rtt_threshold_s": 1e9, "policy": "threshold"}, "between 0 and 3600, not 1000000000.0"),
    ],
)
def test_rtt_thresholds_that_make_no_sense(options: dict[str, float], text: str) -> None:
    with pytest.raises(UnsupportedError, match=text):
        Auto(lossy=True, **options)


# What there is to choose from


def test_judged_protocols_only_where_lossy_ones_are_allowed_offered_and_temperature_is_0() -> None:
    def judged(auto: Auto, offered: list[str], **options) -> set[str]:
        result = alternatives(auto, Options(**options), offered=offered)
        return {item.protocol for item in result if item.requires}

    lossy = Auto(lossy=True)
    assert judged(lossy, OFFERED) == {FULL, SELECTIVE}
    assert judged(Auto(), OFFERED) == set()
    assert judged(lossy, HEADLESS) == set()
    assert judged(lossy, OFFERED, temperature=0.7) == set()


def test_a_complaint_is_the_first_protocols() -> None:
    with pytest.raises(UnsupportedError, match="greedy decodes"):
        alternatives(
            Auto(lossy=True), {"temperature": 0.7}, offered=["greedy", FULL, SELECTIVE, "stream"]
        )


def test_threshold_and_format_reach_every_judged_plan() -> None:
    result = alternatives(BOTH, {"threshold": 0.25, "hidden": "fp16"}, offered=OFFERED)
    info = [item.exchange.options.to_dict() for item in result if item.exchange]
    assert info
    assert all(item == {"threshold": 0.25, "hidden": "fp16"} for item in info)


# What is expected of them


def test_an_untried_head_is_expected_to_accept_a_little_more() -> None:
    seen = evidence(0.6)  # under greedy
    tokens = {name: seen.tokens(plan(protocol=name, window=8)) for name in ("greedy", FULL)}
    assert tokens["greedy"] < tokens[FULL] < 1.5 * tokens["greedy"]


def test_what_both_protocols_with_a_head_accept_is_the_same() -> None:
    seen, full = fresh(), plan(protocol=FULL, window=8)
    seen.add(full, rounds(full, 7, 3))
    selective = plan(protocol=SELECTIVE, window=8)
    assert seen.tokens(selective) == seen.tokens(full)


@pytest.mark.parametrize("accepted", [4, 8])
def test_what_was_forgiven_makes_no_other_protocol_look_better(accepted: int) -> None:
    """Half of what a head accepted the target would have said otherwise."""
    full, greedy = plan(protocol=FULL, window=8), plan(protocol="greedy", window=8)
    strict, forgiving = fresh(), fresh()
    strict.add(full, rounds(full, accepted, 0, count=300))
    forgiving.add(full, rounds(full, accepted, accepted // 2, count=300))
    assert forgiving.tokens(full) == pytest.approx(strict.tokens(full), rel=0.1)
    assert forgiving.acceptance_by_depth(greedy)[0] == pytest.approx(0.5, abs=0.05)
    assert strict.acceptance_by_depth(greedy)[0] > 0.9


@given(st.integers(1, 16), st.data())
def test_no_acceptance_is_beyond_certain(window: int, data: st.DataObject) -> None:
    seen, full = fresh(), plan(protocol=FULL, window=window)
    accepted = data.draw(st.integers(0, window))
    seen.add(full, rounds(full, accepted, data.draw(st.integers(0, accepted))))
    for name in ("greedy", FULL, SELECTIVE):
        hazards = seen.acceptance_by_depth(plan(protocol=name, window=16))
        assert ((hazards >= 0.0) & (hazards <= 1.0)).all()


# The second exchange


def at(rtt_s: float) -> Link:
    return Link(rtt_s=rtt_s, up_bps=1e9, down_bps=1e9)


def trips(seen: Evidence, wanted: Plan) -> float:
    """RTTs in what is predicted of a round."""
    near, far = (predicted_round_s(wanted, at(rtt_s), seen) for rtt_s in (0.0, 1.0))
    return far - near


def test_an_untried_second_exchange_costs_what_its_protocol_says() -> None:
    for name in PROTOCOL_REGISTRY:
        sampled = (
            {} if name == "greedy" or PROTOCOL_REGISTRY[name].requires else {"temperature": 1.0}
        )
        wanted = plan(protocol=name, window=8, seed=1, **sampled)
        expected = wanted.exchange.estimate_round_trips(wanted.expansion, 0.5)
        assert trips(fresh(), wanted) == pytest.approx(expected)
    assert trips(fresh(), plan(protocol=SELECTIVE, window=8)) > 1.9
    assert trips(fresh(), plan(protocol=SELECTIVE, window=0)) == 1.0


@pytest.mark.parametrize("threshold", [0.0, 1.0])
def test_no_second_exchange_is_expected_where_the_outcome_is_known(threshold: float) -> None:
    full, selective, greedy = (
        plan(protocol=name, window=8, **options)
        for name, options in (
            (FULL, {"threshold": threshold}),
            (SELECTIVE, {"threshold": threshold}),
            ("greedy", {}),
        )
    )
    assert trips(fresh(), selective) == trips(fresh(), full) == 1.0
    assert fresh().round_bytes(selective) == fresh().round_bytes(greedy)


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_how_often_the_edge_asks_is_learnt(share: float) -> None:
    seen, wanted = fresh(), plan(protocol=SELECTIVE, window=8)
    wanted_value = round(4 * share)
    seen.add(
        wanted,
        6
        * [
            *rounds(wanted, 8, inquired=2, count=wanted_value),
            *rounds(wanted, 8, count=4 - wanted_value),
        ],
    )
    assert trips(seen, wanted) == pytest.approx(1 + share, abs=0.15)
    assert trips(seen, plan(protocol=FULL, window=8)) == 1.0


def test_bytes_of_rounds_with_and_without_a_second_exchange_are_averaged() -> None:
    seen, wanted = fresh(), plan(protocol=SELECTIVE, window=8)
    with_states, without = rounds(wanted, 8, inquired=2, count=2)
    with_states.uplink_bytes, without.uplink_bytes = 1300, 60
    seen.add(wanted, [without] + 6 * [with_states, without, without])
    assert seen.round_bytes(wanted).up == pytest.approx((1300 + 2 * 60) / 3)


def test_a_short_way_and_a_thin_link_are_selectives_a_long_one_is_fulls() -> None:
    """With the policy that asks for no threshold."""
    auto = Auto(among=[FULL, SELECTIVE])
    thin, far = state(0.001, 1e6, 1e6), state(0.2, 1e9, 1e9)
    assert chosen(auto, thin)[0].protocol == SELECTIVE
    assert chosen(auto, far)[0].protocol == FULL


def test_the_last_tokens_state_costs_a_pass_where_it_goes_with_the_window() -> None:
    seen = fresh()
    pass_s = seen.computing_s(plan(protocol=FULL, window=8)) - seen.computing_s(
        plan(protocol=SELECTIVE, window=8)
    )
    assert pass_s == pytest.approx(DRAFTER[1])
    # nine passes in nine passes' time say that the machine is as quick as it was
    full = plan(protocol=FULL, window=8)
    recorded = rounds(full, 8)
    for item in recorded:
        item.timings.draft = 9 * DRAFTER[1]
    seen.add(full, recorded)
    assert seen.computing_s(plan(protocol="greedy", window=8)) == pytest.approx(
        8 * DRAFTER[1] + SLOW_TARGET[8], rel=0.02
    )


@given(st.floats(0.0, 1.0), st.floats(1.0, 2.0), st.integers(0, 10**6))
def test_an_exchange_costs_an_rtt_and_no_bytes(rtt_s: float, exchanges: float, size: int) -> None:
    link = Link(rtt_s=rtt_s, up_bps=1e6, down_bps=2e6)
    item, more = (communication_s(size, size, link, count) for count in (1.0, exchanges))
    assert more - item == pytest.approx((exchanges - 1.0) * rtt_s, abs=1e-9)
