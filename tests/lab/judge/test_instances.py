"""Training instances: channels, labels under them, and what is kept out, all by question."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import UnsupportedError
from pilotfish.cli import main
from pilotfish.lab.judge.instances import (
    BPS,
    GOOD,
    LOSS,
    POOR,
    RTT_S,
    InstanceOptions,
    Relabelling,
    expected_share,
    instances,
    labels_by_quality,
    sample_channels,
    split,
)
from pilotfish.wire.codecs.hidden import HIDDEN_FORMATS, decode_hidden, encode_hidden
from tests.support.made_episodes import MINED, D, episode, episodes


@pytest.mark.parametrize("form", HIDDEN_FORMATS)
def test_only_the_drafters_states_have_been_on_the_wire(form: str) -> None:
    item = episode(1)
    result = instances(MINED, [item], InstanceOptions(form=form))
    assert np.array_equal(
        result.drafter, decode_hidden(encode_hidden(item.drafter, form), 20, D, form)
    )
    assert np.array_equal(result.drafter, item.drafter) == (form == "fp32")
    assert np.array_equal(result.target, item.target)
    assert np.array_equal(result.tokens, item.tokens)


def test_each_mismatch_is_there_once_under_k_channels() -> None:
    result = instances(MINED, episodes(6), InstanceOptions(channels=5))
    assert len(result) == 120
    assert result.rejected.shape == (120, 5)
    assert result.links.shape == (6, 5, 4)
    assert [len(some) for some in result.channels] == [5] * 6
    assert np.array_equal(result.links[2, 3], result.channels[2][3].features())
    assert np.array_equal(np.bincount(result.question), [20] * 6)


@given(seed=st.integers(0, 2**63 - 1), floor=st.floats(0, 1), temperature=st.floats(0.1, 10))
def test_only_critical_labels_are_relaxed(seed: int, floor: float, temperature: float) -> None:
    sampling = InstanceOptions(3, seed, relabelling=Relabelling(8.0, floor, temperature))
    result = instances(MINED, episodes(2), sampling)
    assert not result.rejected[~result.critical].any()
    if floor == 1.0:
        assert np.array_equal(result.rejected.all(axis=1), result.critical)


def test_the_poorer_the_channel_the_fewer_labels_stay() -> None:
    result = instances(MINED, episodes(60), InstanceOptions(channels=20))
    rows = labels_by_quality(result)
    assert sum(row.channels for row in rows) == 60 * 20
    assert sum(row.critical for row in rows) == 20 * result.critical.sum()
    assert sum(row.kept for row in rows) == result.rejected.sum()
    for row in rows[:4]:  # of nearly perfect channels hardly one is sampled
        middle = (row.low + row.high) / 2
        assert row.kept / row.critical == pytest.approx(0.8 + 0.2 * middle, abs=0.05)


def test_what_is_expected_of_the_poorest_and_the_best_channel() -> None:
    result = instances(MINED, episodes(5), InstanceOptions())
    assert expected_share(result, GOOD, Relabelling()) == 1.0
    assert expected_share(result, POOR, Relabelling(floor=0.3)) == pytest.approx(0.3)
    assert expected_share(result, POOR, None) == 1.0


def test_without_relabelling_all_channels_have_the_mined_labels() -> None:
    result = instances(MINED, episodes(5), InstanceOptions(relabelling=None))
    assert np.array_equal(result.rejected, np.repeat(result.critical[:, None], 8, axis=1))


def test_labels_under_several_channels_are_drawn_apart() -> None:
    """With one draw for all channels, alike ones would have the same labels."""
    sampling = InstanceOptions(channels=40, relabelling=Relabelling(floor=0.5, temperature=1e3))
    result = instances(MINED, [episode(1, count=60)], sampling)
    alike = result.qualities[0] < 0.5
    shares = result.rejected[result.critical][:, alike].mean(axis=1)
    assert ((shares > 0.2) & (shares < 0.95)).all()


def test_a_questions_draws_do_not_depend_on_its_neighbours() -> None:
    several, alone = (
        instances(MINED, some, InstanceOptions()) for some in (episodes(4), [episode(2)])
    )
    of_two = several.subset(["q-2"])
    assert of_two.keys == alone.keys == ["q-2"]
    assert of_two.channels == alone.channels
    assert np.array_equal(of_two.rejected, alone.rejected)
    assert np.array_equal(of_two.drafter, alone.drafter)
    assert np.array_equal(of_two.question, alone.question)


def test_channels_are_spread_over_the_stated_ranges() -> None:
    many = sample_channels(2000, 5, "q")
    assert many == sample_channels(2000, 5, "q")
    assert many != sample_channels(2000, 6, "q")
    assert many != sample_channels(2000, 5, "p")
    for name, (low, high), log in (
        ("up_bps", BPS, True),
        ("down_bps", BPS, True),
        ("rtt_s", RTT_S, True),
        ("loss", LOSS, False),
    ):
        values = np.array([getattr(channel, name) for channel in many])
        middle = (low * high) ** 0.5 if log else (low + high) / 2
        assert values.min() >= low * (1 - 1e-9)
        assert values.max() <= high * (1 + 1e-9)
        assert (values < middle).mean() == pytest.approx(0.5, abs=0.05)
    assert [channel.up_bps for channel in many] != [channel.down_bps for channel in many]


@pytest.mark.parametrize("count", [1, 2, 8, 33])
def test_no_question_has_the_better_channels(count: int) -> None:
    for key in ("a", "b", "c"):
        losses = [channel.loss for channel in sample_channels(count, 0, key)]
        parts = [int((loss - LOSS[0]) / (LOSS[1] - LOSS[0]) * count) for loss in losses]
        assert sorted(parts) == list(range(count))
    assert count < 8 or sorted(losses) != losses


@given(
    names=st.sets(st.text(min_size=1), min_size=2, max_size=40),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_question_is_either_learnt_from_or_kept_out(
    names: set[str], share: float, seed: int
) -> None:
    learnt, kept_out = split(sorted(names), share, seed)
    assert (learnt, kept_out) == split(sorted(names, reverse=True), share, seed)
    assert set(learnt) | set(kept_out) == names
    assert not set(learnt) & set(kept_out)
    assert 1 <= len(kept_out) <= len(names) - 1
    assert abs(len(kept_out) - share * len(names)) <= 1


def test_another_seed_keeps_others_out() -> None:
    names = [f"q-{number}" for number in range(100)]
    assert split(names, 0.2, 0)[1] != split(names, 0.2, 1)[1]


def test_parts_have_the_mismatches_of_their_questions() -> None:
    result = instances(MINED, episodes(7), InstanceOptions())
    part = result.subset(["q-5", "q-1"])
    assert part.keys == ["q-1", "q-5"]
    assert np.array_equal(part.target[:20], episode(1).target)
    assert np.array_equal(part.target[20:], episode(5).target)
    assert np.array_equal(part.links, result.links[[1, 5]])
    assert np.array_equal(part.question, [0] * 20 + [1] * 20)


def test_stalling_is_rejected_under_any_channel() -> None:
    item = replace(episode(1), stalling=~episode(1).critical & (np.arange(20) % 2 == 0))
    result = instances(MINED, [item], InstanceOptions(20, relabelling=Relabelling(floor=0.0)))
    assert item.stalling.any()
    assert result.rejected[item.stalling].all()
    assert not result.rejected[item.critical].all()
    assert not result.rejected[~result.harmful].any()
    assert np.array_equal(result.harmful, item.critical | item.stalling)


def test_what_cannot_be_learnt_from_is_told() -> None:
    with pytest.raises(UnsupportedError, match="no mismatch"):
        instances(MINED, [episode(0, count=0)], InstanceOptions())
    with pytest.raises(UnsupportedError, match="q-4 have widths 8 and 40, not 24 and 40"):
        instances(MINED, [episode(1), episode(4, width=8)], InstanceOptions())
    with pytest.raises(UnsupportedError, match="at least two questions"):
        split(["one"], 0.2, 0)
    with pytest.raises(UnsupportedError, match="seed"):
        sample_channels(1, -1, "q")


def test_the_command_shows_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with MINED.writing(tmp_path):
        for item in episodes(4):
            item.write(tmp_path)
    assert main(["judge", "relabel", str(tmp_path), "--channels", "3", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    payload = json.loads(out)
    assert "80.0% expected" in err
    assert (payload["questions"], payload["mismatches"]) == (4, 80)
    assert payload["expected"] == {"poorest": pytest.approx(0.8), "best": 1.0}
    result = instances(MINED, episodes(4), InstanceOptions(channels=3))
    labels = [
        [channel["labels"] for channel in item["channels"]] for item in payload["episodes"]
    ]  # [q][K][n]
    assert np.array_equal(np.concatenate(np.array(labels), axis=1).T, result.rejected)


def test_the_command_needs_what_was_mined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["judge", "relabel", str(tmp_path)]) == UnsupportedError.exit_code
    assert "judge mine" in capsys.readouterr().err
