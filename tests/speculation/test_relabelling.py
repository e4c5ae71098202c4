"""What a channel is told as, and which labels its budget relaxes (wisv §V-B)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.speculation.channel import FEATURES, Channel
from pilotfish.speculation.relabelling import budget, importance, relabel, repair_probabilities

CLOSE = 1e-9
RATES = st.floats(1e3, 1e11)
RTTS = st.floats(1e-5, 10.0)
SHARES = st.floats(0.0, 1.0)
POOR, GOOD = 20e6, 500e6

Episode = tuple[np.ndarray, np.ndarray]


def channel(rate: float, rtt_s: float, loss: float | None = None) -> Channel:
    return Channel(rtt_s=rtt_s, up_bps=rate, down_bps=rate, loss=loss)


@st.composite
def episodes(draw: st.DrawFn) -> Episode:
    """Labels and ascending positions of up to forty mismatches."""
    steps = draw(st.lists(st.integers(1, 40), max_size=40))
    labels = draw(st.lists(st.booleans(), min_size=len(steps), max_size=len(steps)))
    return np.array(labels, dtype=np.bool_), np.cumsum(np.array(steps, dtype=np.int64))


# κ, floor and T
SETTINGS = st.fixed_dictionaries(
    {"kappa": st.floats(0.1, 100.0), "floor": SHARES, "temperature": st.floats(0.01, 10.0)}
)


def test_features_in_their_order() -> None:
    result = Channel(rtt_s=0.01, up_bps=1e7, down_bps=1e8, loss=0.25).features()
    assert dict(zip(FEATURES, result, strict=True)) == pytest.approx(
        {"log10_up_bps": 7.0, "log10_down_bps": 8.0, "loss": 0.25, "log10_rtt_s": -2.0}
    )
    assert result.dtype == np.float64


@pytest.mark.parametrize("at", range(len(FEATURES)))
def test_what_is_unknown_is_not_a_number(at: int) -> None:
    values = {"up_bps": 1e7, "down_bps": 1e8, "loss": 0.0, "rtt_s": 1e-5}
    del values[list(values)[at]]
    assert np.flatnonzero(np.isnan(Channel(**values).features())).tolist() == [at]
    assert np.isnan(Channel().features()).all()


@pytest.mark.parametrize("name", ["rtt_s", "up_bps", "down_bps"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_channels_that_there_are_not(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be positive"):
        Channel(**{name: value})


@pytest.mark.parametrize("loss", [-1e-9, 1.0 + 1e-9, math.nan, math.inf])
def test_losses_that_there_are_not(loss: float) -> None:
    with pytest.raises(ValueError, match="loss"):
        Channel(loss=loss)


@given(st.none() | RATES, st.none() | RATES, st.none() | RTTS, st.none() | SHARES)
def test_every_channel_has_features_and_a_quality(
    up: float | None, down: float | None, rtt_s: float | None, loss: float | None
) -> None:
    some = Channel(rtt_s=rtt_s, up_bps=up, down_bps=down, loss=loss)
    assert 0.0 <= some.quality() <= 1.0
    known = [value is not None for value in (up, down, loss, rtt_s)]
    assert np.isfinite(some.features()).tolist() == known


@pytest.mark.parametrize("extreme", [5e-324, 1.7e308])
def test_the_ends_of_the_floats(extreme: float) -> None:
    ends = channel(extreme, extreme)
    assert np.isfinite(ends.features()[[0, 1, 3]]).all()
    assert ends.quality() == 0.5  # the best of rates and the worst of RTTs, or the reverse


@pytest.mark.parametrize(
    ("some", "quality"),
    [
        (Channel(), 1.0),
        (channel(500e6, 0.005), 1.0),
        (channel(10e9, 30e-6, 0.0), 1.0),  # loopback
        (channel(5e6, 0.100), 0.0),
        (channel(1e4, 3.0), 0.0),
        (channel(50e6, 0.100), 0.25),  # halfway in decades, and nowhere
        (Channel(up_bps=50e6), 0.5),
        (Channel(up_bps=50e6, down_bps=500e6), 0.5),  # the slower one
        (Channel(up_bps=500e6, down_bps=50e6), 0.5),
        (Channel(rtt_s=math.sqrt(0.1 * 0.005)), 0.5),
        (Channel(rtt_s=0.005, loss=0.2), 0.8),
        (Channel(loss=0.2), 0.8),
        (channel(500e6, 0.005, 1.0), 0.0),
    ],
)
def test_quality_at_known_points(some: Channel, quality: float) -> None:
    assert some.quality() == pytest.approx(quality, abs=1e-12)


@given(RATES, RATES, RTTS, SHARES, st.floats(1.0, 100.0), SHARES)
def test_a_better_link_is_of_no_lower_quality(
    up: float, down: float, rtt_s: float, loss: float, factor: float, share: float
) -> None:
    def quality(**better: float) -> float:
        values = {"rtt_s": rtt_s, "up_bps": up, "down_bps": down, "loss": loss}
        return Channel(**{**values, **better}).quality()

    assert quality(up_bps=up * factor) >= quality()
    assert quality(down_bps=down * factor) >= quality()
    assert quality(rtt_s=rtt_s / factor) >= quality()
    assert quality(loss=loss * share) >= quality()


def test_the_papers_channels_differ_in_quality() -> None:
    result = [channel(rate, rtt_s).quality() for rate in (POOR, GOOD) for rtt_s in (0.05, 0.005)]
    far_poor, near_poor, far_good, near_good = result
    assert far_poor < min(near_poor, far_good)
    assert max(near_poor, far_good) < near_good == 1.0
    # 172 and 498 Mbit/s, wisv §VII
    assert channel(172e6, 0.005).quality() < channel(498e6, 0.005).quality()


@given(episodes(), st.floats(0.1, 100.0))
def test_importance_is_the_sum_that_it_is_written_as(episode: Episode, kappa: float) -> None:
    labels, positions = episode
    by_hand = [
        math.fsum(
            math.exp(-abs(int(i) - int(j)) / kappa)
            for j, critical in zip(positions, labels, strict=True)
            if critical
        )
        for i in positions
    ]
    assert importance(labels, positions, kappa) == pytest.approx(by_hand)
    # neither the types that labels and positions came in nor where the answer starts matter
    moved = importance(labels.astype(np.int64), (positions + 1000).astype(np.uint32), kappa)
    assert moved == pytest.approx(by_hand)


@given(episodes(), SHARES, SETTINGS)
def test_only_critical_labels_are_relaxed_and_the_budget_is_met(
    episode: Episode, quality: float, settings: dict[str, float]
) -> None:
    labels, positions = episode
    result = repair_probabilities(labels, positions, quality, **settings)
    allowed = budget(labels, quality, settings["floor"])
    assert (result[~labels] == 0.0).all()
    assert ((result >= 0.0) & (result <= 1.0)).all()
    assert math.fsum(result) <= allowed * (1.0 + 1e-12)
    assert math.fsum(result) == pytest.approx(allowed, rel=CLOSE)


@given(episodes(), SETTINGS)
def test_the_repaired_are_a_logistic_function_of_importance(
    episode: Episode, settings: dict[str, float]
) -> None:
    """All critical mismatches have the same λ = s − T·logit π, as far as floats can tell."""
    labels, positions = episode
    result = repair_probabilities(labels, positions, 0.5, **settings)
    known = labels & (result > 1e-300) & (result < 1.0 - 1e-6)
    scores = importance(labels, positions, settings["kappa"])[known]
    some = result[known]
    multipliers = scores - settings["temperature"] * (np.log(some) - np.log1p(-some))
    if len(multipliers):
        assert np.ptp(multipliers) <= 1e-6 * (1.0 + np.abs(multipliers).max())


@given(episodes(), SHARES, SETTINGS)
def test_what_matters_more_is_repaired_no_less(
    episode: Episode, quality: float, settings: dict[str, float]
) -> None:
    labels, positions = episode
    scores = importance(labels, positions, settings["kappa"])[labels]
    result = repair_probabilities(labels, positions, quality, **settings)[labels]
    assert (np.diff(result[np.argsort(scores)]) >= -CLOSE).all()


@given(episodes(), st.lists(SHARES, min_size=2, max_size=2).map(sorted), SETTINGS)
def test_a_better_channel_repairs_no_less(
    episode: Episode, qualities: list[float], settings: dict[str, float]
) -> None:
    worse, better = (repair_probabilities(*episode, quality, **settings) for quality in qualities)
    assert (worse <= better + CLOSE).all()


@given(episodes(), SETTINGS, st.data())
def test_under_a_good_channel_labels_stay(
    episode: Episode, settings: dict[str, float], data: st.DataObject
) -> None:
    labels, positions = episode
    assert (repair_probabilities(labels, positions, 1.0, **settings) == labels).all()
    drawn = data.draw(
        st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=len(labels), max_size=len(labels))
    )
    assert (relabel(labels, positions, 1.0, np.array(drawn), **settings) == labels).all()


@given(episodes(), SETTINGS)
def test_labels_stay_whatever_the_channel_where_the_floor_is_1(
    episode: Episode, settings: dict[str, float]
) -> None:
    result = repair_probabilities(*episode, 0.0, **{**settings, "floor": 1.0})
    assert (result == episode[0]).all()


def test_without_a_budget_all_are_relaxed() -> None:
    labels, positions = np.array([True, False, True]), np.array([3, 5, 90])
    assert not repair_probabilities(labels, positions, 0.0, floor=0.0).any()
    assert not relabel(labels, positions, 0.0, np.zeros(3), floor=0.0).any()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("quality", [5e-324, 1e-12, 0.5, 1.0 - 2**-53])
@pytest.mark.parametrize("temperature", [1e-6, 0.5, 1e6])
@pytest.mark.parametrize("positions", [np.arange(100), 1000 * np.arange(100), np.arange(100) ** 2])
def test_budgets_at_the_ends_of_the_floats(
    quality: float, temperature: float, positions: np.ndarray
) -> None:
    labels = np.ones(100, dtype=np.bool_)
    result = repair_probabilities(labels, positions, quality, floor=0.0, temperature=temperature)
    assert math.fsum(result) <= budget(labels, quality, 0.0) * (1.0 + 1e-12)
    assert math.fsum(result) == pytest.approx(100 * quality, rel=1e-6)


def test_a_sharp_budget_goes_to_the_important() -> None:
    """Two critical mismatches side by side and one far away: there is repair for two."""
    labels, positions = np.array([True, True, True]), np.array([10, 11, 500])
    sharp = repair_probabilities(labels, positions, 0.0, floor=2 / 3, temperature=0.01)
    assert sharp == pytest.approx([1.0, 1.0, 0.0], abs=1e-6)
    blunt = repair_probabilities(labels, positions, 0.0, floor=2 / 3, temperature=1e3)
    assert blunt == pytest.approx([2 / 3] * 3, abs=1e-3)


def test_draws_have_the_probabilities() -> None:
    rng = np.random.default_rng(1)
    labels = np.array([True, False, True, True, False])
    positions = np.array([3, 4, 9, 60, 61])
    quality = channel(POOR, 0.05).quality()
    wanted = repair_probabilities(labels, positions, quality)
    draws = [relabel(labels, positions, quality, rng.random(5)) for _ in range(4000)]
    # five standard deviations of a mean of 4000
    assert np.mean(draws, axis=0) == pytest.approx(wanted, abs=5 * 0.5 / math.sqrt(4000))
    assert draws[0].dtype == np.bool_


def test_the_papers_worse_channel_relaxes_more() -> None:
    rng = np.random.default_rng(2)
    labels, positions = rng.random(300) < 0.3, np.sort(rng.choice(3000, 300, replace=False))
    uniforms = rng.random(300)
    poor, good = (
        relabel(labels, positions, channel(rate, 0.05).quality(), uniforms) for rate in (POOR, GOOD)
    )
    assert (poor <= good).all()
    assert (good <= labels).all()
    assert poor.sum() < good.sum() < labels.sum()


def test_an_episode_without_mismatches() -> None:
    nothing = np.array([], dtype=np.bool_), np.array([], dtype=np.int64)
    assert relabel(*nothing, 0.2, np.array([])).shape == (0,)
    assert importance(*nothing).shape == (0,)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"quality": -0.1}, "quality"),
        ({"quality": 1.1}, "quality"),
        ({"quality": math.nan}, "quality"),
        ({"floor": 2.0}, "floor"),
        ({"floor": math.nan}, "floor"),
        ({"kappa": 0.0}, "kappa"),
        ({"kappa": math.inf}, "kappa"),
        ({"temperature": 0.0}, "T must be"),
        ({"temperature": math.nan}, "T must be"),
        ({"temperature": math.inf}, "T must be"),
        ({"positions": np.arange(2)}, "positions"),
        ({"labels": np.ones((3, 1), dtype=np.bool_)}, "uniforms"),
        ({"uniforms": np.zeros(1)}, "uniforms"),
    ],
)
def test_what_cannot_be_relabelled(wrong: dict[str, object], text: str) -> None:
    arguments: dict[str, object] = {
        "labels": np.ones(3, dtype=np.bool_),
        "positions": np.arange(3),
        "quality": 0.5,
        "uniforms": np.zeros(3),
    }
    with pytest.raises(ValueError, match=text):
        relabel(**{**arguments, **wrong})
