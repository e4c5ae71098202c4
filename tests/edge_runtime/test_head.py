"""Decision heads: the rule against plain float64, and which pair a head is for."""

from __future__ import annotations

import logging
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pilotfish.base.errors import PairMismatchError
from pilotfish.edge_runtime.head import DecisionHead, token_buckets
from pilotfish.edge_runtime.head_file import LinkScale, ModelIdentity
from pilotfish.engines.manifest import Manifest, Source
from pilotfish.speculation.channel import Channel
from tests.engines.test_artifact import MANIFEST
from tests.support.small_heads import BUCKETS, LINK, Case, D, H, T, card, head, mismatches, weights
from tests.support.tiny import tiny_artifact

GOOD = Channel(rtt_s=0.005, up_bps=5e8, down_bps=4e8, loss=0.0)
POOR = Channel(rtt_s=0.09, up_bps=1.1e7, down_bps=2e7, loss=0.08)
MEAN = Channel(rtt_s=10**-1.7, up_bps=10**7.5, down_bps=1e8, loss=0.02)
UNKNOWN = Channel()


def plain_logits(
    of: DecisionHead, case: Case, channel: Channel
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(23)-(25) row by row in float64, and the sum of the magnitudes that were added up."""
    tensors = {name: array.astype(np.float64) for name, array in of.tensors.items()}
    result, sizes = [], []
    for h_d, h_t, (draft, wanted) in zip(*case, strict=True):
        if of.card.features == "states":
            raw = np.concatenate([h_d, h_t]).astype(np.float64)
            u = list((raw - tensors["mean"]) / tensors["std"])
            size = list((abs(raw) + abs(tensors["mean"])) / tensors["std"])
        else:
            u = [0.0] * (2 * BUCKETS)
            u[(int(draft) * 2654435761 % 2**32) * BUCKETS // 2**32] = 1.0
            u[(int(wanted) * 2654435761 % 2**32) * BUCKETS // 2**32 + BUCKETS] = 1.0
            size = list(u)
        if of.card.link is not None:
            link = of.card.link
            for value, mean, std in zip(channel.features(), link.mean, link.std, strict=True):
                c = 0.0 if math.isnan(value) else (value - mean) / std
                u.append(min(max(c, -link.clip), link.clip))
                size.append(abs(u[-1]))
        inner = np.maximum(tensors["w1"] @ u + tensors["b1"], 0.0)
        result.append(tensors["w2"] @ inner + tensors["b2"][0])
        inner = abs(tensors["w1"]) @ size + abs(tensors["b1"])
        sizes.append(abs(tensors["w2"]) @ inner + abs(tensors["b2"][0]))
    return np.array(result), np.array(sizes)


POSITIVE = st.floats(1e3, 1e10)
CHANNELS = st.builds(
    Channel,
    rtt_s=st.none() | st.floats(1e-5, 10.0),
    up_bps=st.none() | POSITIVE,
    down_bps=st.none() | POSITIVE,
    loss=st.none() | st.floats(0, 1),
)
SEEDS = st.integers(0, 2**32)


# The rule


@given(
    SEEDS,
    st.integers(0, 20),
    CHANNELS,
    st.sampled_from(["states", "tokens"]),
    st.sampled_from([LINK, None]),
    st.sampled_from(["f4", "f2"]),
    st.sampled_from([1e-3, 1.0, 1e3]),
)
@settings(max_examples=200)
def test_logits_are_those_of_plain_float64(
    seed: int,
    count: int,
    channel: Channel,
    features: str,
    link: LinkScale | None,
    dtype: str,
    scale: float,
) -> None:
    made = card(features=features, link=link)
    judging = DecisionHead(made, weights(made, seed, scale, dtype))
    case = mismatches(count, seed, scale)
    result = judging.logits(*case, channel)
    expected, size = plain_logits(judging, case, channel)
    assert result.dtype == np.float32
    assert result.shape == (count,)
    # at most 22 float32 roundings of 6e-8 in each of the sums
    assert (abs(result - expected) <= 5e-6 * size).all()


@pytest.mark.parametrize(("count", "widths"), [(1, 60_000), (64, 1536), (7000, T)])
def test_logits_of_wide_or_many_states_are_the_same(count: int, widths: int) -> None:
    """Products that are computed in pieces, and those that are too many for it."""
    made = card(target=ModelIdentity(model="m", origin="0" * 16, hidden=widths, precision="int4"))
    judging = DecisionHead(made, weights(made))
    drafter, _, tokens = mismatches(count)
    wide = np.random.default_rng(2).standard_normal((count, widths)).astype(np.float32)
    result = judging.logits(drafter, wide, tokens, GOOD)
    expected, size = plain_logits(judging, (drafter, wide, tokens), GOOD)
    assert (abs(result - expected) <= 1e-6 * size).all()
    assert (abs(result - expected) <= 1e-3 * abs(expected).max()).all()


@given(SEEDS, st.integers(0, 20), CHANNELS, st.floats(0, 1))
def test_judge_rejects_above_the_threshold(
    seed: int, count: int, channel: Channel, threshold: float
) -> None:
    judging, case = head(seed), mismatches(count, seed)
    rejected = judging.judge(channel, threshold)(*case)
    assert rejected.dtype == np.bool_
    expected, size = plain_logits(judging, case, channel)
    bound = (
        math.log(threshold / (1 - threshold)) if 0 < threshold < 1 else (threshold - 0.5) * math.inf
    )
    sure = abs(expected - bound) > 5e-6 * size + 1e-12
    assert (rejected == (expected > bound))[sure].all()


@given(SEEDS, CHANNELS, st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_higher_threshold_forgives_more(
    seed: int, channel: Channel, thresholds: list[float]
) -> None:
    judging, case = head(seed), mismatches(30, seed)
    rejected = [judging.judge(channel, at)(*case) for at in [0.0, *sorted(thresholds), 1.0]]
    assert rejected[0].all()
    assert not rejected[-1].any()
    for lower, higher in pairwise(rejected):
        assert (higher <= lower).all()


def test_judge_takes_the_recommended_threshold_unless_told() -> None:
    judging, case = head(), mismatches(40)
    recommended = judging.judge(POOR)
    assert recommended.bound == math.log(0.4 / 0.6)
    expected = judging.logits(*case, POOR) > math.log(0.4 / 0.6)
    assert recommended(*case).tolist() == expected.tolist()
    assert 0 < expected.sum() < 40
    assert (recommended.width, recommended.form) == (D, "int8")
    assert head(hidden="fp16").judge(POOR).form == "fp16"


@pytest.mark.parametrize(("logit", "threshold"), [(0.0, 0.5), (1.0, 1 / (1 + math.exp(-1)))])
def test_rho_at_the_threshold_is_not_above_it(logit: float, threshold: float) -> None:
    """And one that is above it by less than a float32 can tell is rejected."""
    silent = {"w2": np.zeros(H, np.float32), "b2": np.array([logit], np.float32)}
    judging, case = DecisionHead(card(), {**weights(card()), **silent}), mismatches(3)
    assert judging.logits(*case, GOOD).tolist() == [logit] * 3
    assert not judging.judge(GOOD, threshold + 1e-12)(*case).any()
    assert judging.judge(GOOD, threshold - 1e-12)(*case).all()


def test_equal_logits_are_not_rejected() -> None:
    silent = {"w2": np.zeros(H, np.float32), "b2": np.zeros(1, np.float32)}
    judging = DecisionHead(card(), {**weights(card()), **silent})
    assert not judging.judge(GOOD, 0.5)(*mismatches(3)).any()


@pytest.mark.parametrize("threshold", [-1e-9, 1.0000001, math.nan, math.inf, -math.inf])
def test_threshold_outside_0_and_1_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        head().judge(GOOD, threshold)


def test_logit_saturates_at_the_ends_only() -> None:
    """In float32 the logit of these would be infinite, or 16.6 for all above 1 − 6e-8."""
    bounds = [head().judge(GOOD, at).bound for at in (5e-324, 1e-300, 1 - 1e-12, 1 - 2**-53)]
    assert all(math.isfinite(bound) for bound in bounds)
    assert bounds == sorted(bounds)
    assert bounds[3] == pytest.approx(53 * math.log(2))


@pytest.mark.parametrize("huge", [3e38, -3e38, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("end", [0, 1])
def test_states_too_large_to_judge_are_rejected(huge: float, end: int) -> None:
    """Also where the overflow is below 0, of which ReLU would make a harmless 0."""
    judging = head()
    for at, rows in enumerate(np.array([huge, 1.0])[np.array([[0, 1], [1, 0]])]):
        case = mismatches(2)
        case[end][:] = rows[:, None]
        assert np.isnan(judging.logits(*case, GOOD)[at])
        assert not np.isnan(judging.logits(*case, GOOD)[1 - at])
        assert judging.judge(GOOD, 0.999999999)(*case)[at]
        assert judging.judge(GOOD, 0.0)(*case).all()
        assert not judging.judge(GOOD, 1.0)(*case).any()


def test_unknown_link_is_the_mean_of_training() -> None:
    judging, case = head(), mismatches(10)
    mean = judging.logits(*case, MEAN)
    assert np.allclose(judging.logits(*case, UNKNOWN), mean, atol=1e-5)
    assert not np.allclose(judging.logits(*case, GOOD), mean, atol=1e-2)
    half = Channel(rtt_s=0.09, up_bps=MEAN.up_bps, down_bps=1e8, loss=0.02)
    assert np.allclose(
        judging.logits(*case, Channel(rtt_s=0.09)), judging.logits(*case, half), atol=1e-5
    )


def test_link_is_clipped() -> None:
    """Beyond three deviations nothing changes; within, everything does."""
    judging, case = head(), mismatches(10)
    logits = [
        judging.logits(*case, Channel(up_bps=10 ** (7.5 + 0.6 * deviations)))
        for deviations in (0.0, 2.9, 3.1, 5.0)
    ]
    assert np.array_equal(logits[2], logits[3])
    assert np.allclose(logits[1], logits[2], atol=1.0)
    assert not np.allclose(logits[1], logits[2], atol=1e-3)
    assert not np.allclose(logits[0], logits[1], atol=1e-1)


def test_head_without_link_features_does_not_look_at_the_link() -> None:
    judging, case = head(link=None), mismatches(10)
    assert np.array_equal(judging.logits(*case, GOOD), judging.logits(*case, POOR))


def test_head_reads_states_or_tokens_and_not_the_other() -> None:
    drafter, target, tokens = mismatches(10)
    other = mismatches(10, seed=1)
    assert np.array_equal(
        head().logits(drafter, target, tokens, GOOD), head().logits(drafter, target, other[2], GOOD)
    )
    by_token = head(features="tokens")
    assert np.array_equal(
        by_token.logits(drafter, target, tokens, GOOD),
        by_token.logits(other[0], other[1], tokens, GOOD),
    )
    swapped = by_token.logits(drafter, target, tokens[:, ::-1], GOOD)
    assert not np.allclose(by_token.logits(drafter, target, tokens, GOOD), swapped)


def test_shapes_that_do_not_fit_are_refused() -> None:
    drafter, target, tokens = mismatches(3)
    for wrong in (
        (drafter[:, 1:], target, tokens),
        (drafter, target[:2], tokens),
        (drafter[:2], target[:2], tokens),
        (target, drafter, tokens),
    ):
        with pytest.raises(ValueError, match="reads states of shapes"):
            head().logits(*wrong, GOOD)
    with pytest.raises(ValueError, match="two token ids"):
        head(features="tokens").logits(drafter, target, tokens[:, :1], GOOD)


@pytest.mark.parametrize("buckets", [1, 7, 1024, 65_536])
def test_buckets_are_even(buckets: int) -> None:
    """Of a vocabulary's ids none has much more than its share."""
    result = token_buckets(np.arange(150_000), buckets)
    counts = np.bincount(result, minlength=buckets)
    assert len(counts) == buckets
    assert counts.max() <= math.ceil(150_000 / buckets) * 1.5 + 2
    assert token_buckets(np.array([[2**32 - 1, 0]]), buckets).shape == (1, 2)


# The pair


def manifest(**change: Any) -> Manifest:
    sizes = msgspec.structs.replace(MANIFEST.dimensions, hidden=change.pop("hidden", T))
    return msgspec.structs.replace(MANIFEST, dimensions=sizes, **change)


def test_head_is_refused_for_another_target() -> None:
    ours = manifest()
    end = ModelIdentity(model="large", origin=ours.origin, hidden=T, precision="fp32")
    made = head(target=end)
    made.check_target(ours)
    made.check_target(manifest(dialect="contrib"))
    other = manifest(model="stranger", source=Source(kind="random", location="seed 2"))
    for target in (other, manifest(hidden=T + 1)):
        with pytest.raises(PairMismatchError, match=f"target large.*not for {target.model}"):
            made.check_target(target)
    hashed = Source(kind="hub", location="l", sha256={"w": "1" * 64})
    end = ModelIdentity(
        model="large", origin=manifest(source=hashed).origin, hidden=T, precision="fp32"
    )
    with pytest.raises(PairMismatchError, match="hidden states of 10"):
        head(target=end).check_target(manifest(source=hashed, hidden=T + 1))


def test_another_precision_is_served_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    ours = manifest()
    made = head(target=ModelIdentity(model="large", origin=ours.origin, hidden=T, precision="int4"))
    with caplog.at_level(logging.WARNING, "pilotfish.edge"):
        made.check_target(manifest(precision="int4"))
        assert caplog.messages == []
        made.check_target(ours)
        made.check_target(ours)
    assert caplog.messages == [
        "the decision head tiny was trained on int4 states of large, but it will judge fp32 states"
    ]


def test_head_serves_its_drafter_only() -> None:
    made = head()
    assert made.supports("0" * 16, D)
    assert not made.supports("0" * 15 + "1", D)
    assert not made.supports("0" * 16, D + 1)
    assert not made.supports("", D)


def test_origin_is_the_weights_in_whatever_form(tmp_path: Path) -> None:
    first = tiny_artifact(tmp_path / "a", precision="fp32").manifest
    again = tiny_artifact(tmp_path / "b", precision="int4", dialect="opset24").manifest
    other = tiny_artifact(tmp_path / "c", seed=1).manifest
    assert first.digest != again.digest
    assert first.origin == again.origin
    assert len({first.origin, other.origin}) == 2
    assert len(first.origin) == 16
    assert set(first.origin) <= set("0123456789abcdef")


def test_origin_is_of_the_files_that_were_read() -> None:
    def origin(**change: Any) -> str:
        source = Source(**{"kind": "hub", "location": "a/b", "revision": "r", **change})
        return manifest(source=source).origin

    files = {"a": "1" * 64, "b": "2" * 64}
    known = origin(sha256=files)
    assert known == origin(sha256=dict(reversed(files.items())))
    assert known == origin(sha256=files, kind="directory", location="mine", revision=None)
    assert known == origin(sha256={"x": "1" * 64, "y": "2" * 64})
    others = [
        origin(sha256={"a": "2" * 64, "b": "1" * 64}),
        origin(sha256={"a": "1" * 64}),
        origin(),
        origin(revision="s"),
        origin(location="c"),
        origin(kind="random"),
        manifest(source=Source(kind="hub", location="a/b", revision="r"), hidden=T + 1).origin,
    ]
    assert len({known, *others}) == 8
