"""`pilotfish judge sweep`: what is counted, what that costs by the model, and files that last."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import RunFileError, UnsupportedError
from pilotfish.edge_runtime.head import DecisionHead, HeadJudge
from pilotfish.lab.judge.costs import DSD, FULL, GREEDY, SELECTIVE, ModelPace, cost, mismatch_share
from pilotfish.lab.judge.figures import costs, curve, figures
from pilotfish.lab.judge.sweep_file import (
    LinkProfile,
    QuestionCounts,
    SweepFile,
    SweepHeader,
    SweepSetting,
)
from pilotfish.lab.judge.sweeping import settings_of, sweep
from pilotfish.lab.judge.tasks import Exact
from pilotfish.lab.judge.trajectories import CourseRound, Trajectory, WalkSettings
from pilotfish.speculation.channel import Channel
from pilotfish.speculation.latency import Link
from pilotfish.wire.codecs.hidden import encode_hidden
from pilotfish.wire.protocols.decision_head import JudgedDraft
from pilotfish.wire.protocols.protocol import VERDICT_BYTES, WINDOW_BYTES, PairSizes, StatesNeeded
from pilotfish.wire.protocols.wisv_full import WisvFull
from pilotfish.wire.protocols.wisv_selective import WisvSelective
from tests.lab.judge.test_trajectories import MOST, QUESTIONS, JudgedPair, models

SIZES = PairSizes(vocabulary=151_665, hidden=576)
PACE = ModelPace(draft_s=0.01, verify_s={1: 0.1, 11: 0.2, 65: 0.74})
LINK = Link(rtt_s=0.05, up_bps=2e7, down_bps=4e7)
FAST = LinkProfile(500.0, 5.0)
SLOW = LinkProfile(20.0, 50.0)

__all__ = ["models"]  # a fixture


def metrics(right: bool = True, *rounds: CourseRound, tokens: int = 0) -> QuestionCounts:
    reply = tokens or sum(item.accepted + 1 for item in rounds)
    return QuestionCounts.from_trajectory(Trajectory([0] * reply, list(rounds)), right)


# What is counted


def test_a_tally_adds_up_rounds() -> None:
    result = metrics(
        True,
        CourseRound(drafted=4, accepted=1, forgiven=1, decided=2, mismatched=3),
        CourseRound(drafted=4, accepted=4, forgiven=0, decided=0, mismatched=0),
        CourseRound(drafted=3, accepted=0, forgiven=0, decided=1, mismatched=None),
    )
    assert result == QuestionCounts(
        *(True, 8, 3),
        accepted=5,
        forgiven=1,
        decided=3,
        state_requests=2,
        after_rejection=4,
        checked_after_rejection=2,
        mismatched_after_rejection=1,
        drafted={4: 2, 3: 1},
    )
    assert msgspec.json.decode(msgspec.json.encode(result), type=QuestionCounts) == result


def test_mismatches_behind_rejections_are_told_from_windows_that_were_looked_at() -> None:
    seen = CourseRound(drafted=10, accepted=1, forgiven=0, decided=1, mismatched=5)
    unseen = CourseRound(drafted=10, accepted=4, forgiven=3, decided=4, mismatched=None)
    assert mismatch_share([metrics(True, seen), metrics(True, unseen)]) == 4 / 8
    assert mismatch_share([metrics(True, unseen)]) == 4 / 5  # of five that were verified
    assert mismatch_share([]) == 0.0


def test_sweeping_counts_what_is_walked(models: JudgedPair) -> None:
    heads = {
        form: DecisionHead(
            msgspec.structs.replace(models.head.card, hidden=form), models.head.tensors
        )
        for form in ("fp16", "int4")
    }
    wanted = settings_of([2, 5], {form: [0.2, 0.4, 0.6, 0.8] for form in heads}, [FAST, SLOW])
    info = plan(*wanted, most=MOST)
    tallies = dict(sweep(models.readers, models.pair, Exact(), QUESTIONS, info, heads))
    assert len({str(item) for line in tallies.values() for item in line}) > 15
    courses = [
        WalkSettings(
            item.window, item.head and heads[item.head].judge(item.profile.channel, item.threshold)
        )
        for item in wanted
    ]
    for question, some in zip(QUESTIONS, models.walks(courses), strict=True):
        assert tallies[question.key] == [
            QuestionCounts.from_trajectory(walk, False) for walk in some
        ]


def test_a_head_without_a_link_does_not_know_it(models: JudgedPair) -> None:
    values = (0.3, 0.4, 0.5, 0.6, 0.7)
    wanted = [SweepSetting(5, "head", value) for value in values]
    wanted += [SweepSetting(5, "head", value, SLOW) for value in values]
    info = plan(*wanted, most=MOST)
    tallies = dict(
        sweep(models.readers, models.pair, Exact(), QUESTIONS, info, {"head": models.head})
    )
    unknown = [WalkSettings(5, models.head.judge(Channel(), value)) for value in values]
    for question, walked in zip(QUESTIONS, models.walks(unknown), strict=True):
        expected = [QuestionCounts.from_trajectory(walk, False) for walk in walked]
        assert tallies[question.key][: len(values)] == expected
    assert any(row[: len(values)] != row[len(values) :] for row in tallies.values())


def test_all_windows_can_be_read_to_their_ends(models: JudgedPair) -> None:
    info = plan(SweepSetting(9), SweepSetting(9, "head", 0.5, SLOW), most=MOST)
    keys = [question.key for question in QUESTIONS]
    counted: dict[int, list[QuestionCounts]] = {}
    for windows in (1, 1000):
        rows = sweep(
            models.readers, models.pair, Exact(), QUESTIONS, info, {"head": models.head},
            keys, windows=windows,
        )  # fmt: skip
        counted[windows] = [counts for _, row in rows for counts in row]
    assert all(each.checked_after_rejection == each.after_rejection for each in counted[1000])
    assert any(each.checked_after_rejection < each.after_rejection for each in counted[1])


# What it costs


def test_greedy_costs_ids_and_a_round_trip() -> None:
    rounds = [CourseRound(10, 3, 0, 1, None)] * 7
    result = cost(
        [metrics(True, *rounds)], GREEDY, LINK, PACE, SIZES, form="int8", mismatch_share=0.5
    )
    up, down = WINDOW_BYTES + 3 * 10, VERDICT_BYTES
    assert (result.up, result.down, result.exchanges) == (7 * up, 7 * down, 7)
    assert result.seconds == pytest.approx(
        7 * (10 * 0.01 + 0.2 + 0.05 + 8 * up / 2e7 + 8 * down / 4e7)
    )


def test_passes_between_measured_widths_are_interpolated() -> None:
    assert PACE.verify_pass_s(1) == 0.1
    assert PACE.verify_pass_s(6) == pytest.approx(0.15)
    assert PACE.verify_pass_s(38) == pytest.approx(0.47)


def test_dsd_pays_for_its_distributions_and_full_for_all_states() -> None:
    item = [metrics(True, CourseRound(10, 3, 0, 1, None))]
    args: dict[str, Any] = {"form": "int4", "mismatch_share": 0.5}
    greedy, dsd, full = (
        cost(item, name, LINK, PACE, SIZES, **args) for name in (GREEDY, DSD, FULL)
    )
    assert dsd.up - greedy.up == 2 * 151_665 * 10  # fp16, as the papers charge it
    assert dsd.seconds - greedy.seconds == pytest.approx(8 * (dsd.up - greedy.up) / 2e7)
    states = len(encode_hidden(np.ones((10, 576), np.float32), "int4"))
    assert full.up - greedy.up == states
    assert full.seconds - greedy.seconds == pytest.approx(0.01 + 8 * states / 2e7)


def test_selective_asks_once_where_there_are_mismatches() -> None:
    clean = CourseRound(10, 10, 0, 0, None)
    dirty = CourseRound(10, 4, 1, 2, None)  # 5 tokens behind
    args: dict[str, Any] = {"form": "int8", "mismatch_share": 0.4}
    some = [metrics(True, *[clean] * 3, *[dirty] * 2)]
    greedy, result = (cost(some, name, LINK, PACE, SIZES, **args) for name in (GREEDY, SELECTIVE))
    states = 2 * (2 + 0.4 * 5)
    per_state = len(encode_hidden(np.ones((1, 576), np.float32), "int8"))
    assert result.exchanges == greedy.exchanges + 2
    assert result.up - greedy.up == pytest.approx(2 * WINDOW_BYTES + states * per_state)
    assert result.down - greedy.down == pytest.approx(2 * 50 + states)
    # the last token's pass is made while the window is with the edge
    assert result.seconds - greedy.seconds == pytest.approx(
        2 * 0.05 + 8 * (result.up - greedy.up) / 2e7 + 8 * (result.down - greedy.down) / 4e7
    )
    without = [metrics(True, clean)]
    assert cost(without, SELECTIVE, LINK, PACE, SIZES, **args) == cost(
        without, GREEDY, LINK, PACE, SIZES, **args
    )


@given(drafted=st.integers(1, 64), form=st.sampled_from(["int8", "fp16", "int4"]), data=st.data())
def test_bytes_are_those_of_the_protocols_frames(drafted: int, form: str, data: Any) -> None:
    at = data.draw(st.lists(st.integers(0, drafted - 1), min_size=1, unique=True).map(sorted))
    states = np.ones((drafted, SIZES.hidden), np.float32)
    draft = JudgedDraft(np.zeros(drafted, np.uint32), states=states)
    none = np.empty(0, np.uint32)
    # one round whose m mismatches were all decided on
    item = [metrics(True, CourseRound(drafted, drafted, len(at), len(at), len(at)))]
    full, selective = (
        cost(item, name, LINK, PACE, SIZES, form=form, mismatch_share=0.0)
        for name in (FULL, SELECTIVE)
    )
    frames = WisvFull(WisvFull.Options.from_mapping({"hidden": form})).encode_draft(
        draft, none, SIZES.vocabulary
    )
    assert full.up == WINDOW_BYTES + sum(map(len, frames))
    judge = HeadJudge(
        SIZES.hidden,
        form,
        bound=0.0,
        score=lambda *_: pytest.fail("no states yet"),
        bind=lambda _: pytest.fail("no link"),
    )
    exchange = WisvSelective(WisvSelective.Options.from_mapping({"hidden": form}))
    exchange = exchange.with_resource(judge)
    wanted = StatesNeeded(
        np.array(at), np.zeros(drafted + 1, np.int64), states[at], np.zeros(len(at), np.bool_)
    )
    result = exchange.decide(draft, wanted)
    items = list(result.frames)
    sent = [
        *exchange.encode_draft(draft, none, SIZES.vocabulary),
        *exchange.encode_states(draft, items),
    ]
    assert selective.up == 2 * WINDOW_BYTES + sum(map(len, sent))
    assert selective.down == VERDICT_BYTES + 50 + sum(map(len, items))


def test_at_thresholds_0_and_1_a_head_costs_what_greedy_costs() -> None:
    """The device sends no states there, and the edge asks for none."""
    counts = metrics(True, CourseRound(8, 3, 1, 2, 2))
    settings = [SweepSetting(8, "h", threshold, FAST) for threshold in (0.0, 0.5, 1.0)]
    greedy = SweepSetting(8)
    header = plan(*settings, greedy)
    results = costs(header, [[counts] * 4], PACE)
    wanted = results[3, FAST][GREEDY]
    for protocol in (FULL, SELECTIVE):
        assert results[0, FAST][protocol] == results[2, FAST][protocol] == wanted
        assert results[1, FAST][protocol].up > wanted.up
    assert results[1, FAST][SELECTIVE].exchanges == wanted.exchanges + 1


# What is shown


def plan(*settings: SweepSetting, **changes: Any) -> SweepHeader:
    end = {"model": "m", "origin": "0" * 16, "precision": "fp32", "hidden": 64, "vocabulary": 100}
    sweep_header = SweepHeader(
        task="exact",
        instruction="",
        most=9,
        whole=0,
        drafter=end,
        target=end,
        heads={"h": {"sha256": "", "form": "int8", "recommended": 0.5}},
        settings=list(settings) or settings_of([4, 8], {"h": [0.0, 0.5]}, [FAST, SLOW]),
        links=[FAST, SLOW],
    )
    return replace(sweep_header, **changes)


def test_settings_are_greedy_and_each_head_under_every_link() -> None:
    result = settings_of([4, 8], {"h": [0.0, 0.5], "i": [1.0]}, [FAST, SLOW])
    assert result[:2] == [SweepSetting(4), SweepSetting(8)]
    assert len(result) == len(set(result)) == 2 + 2 * 2 * 3
    assert plan(*result).windows == [4, 8]
    assert plan(*result).profiles == [FAST, SLOW]


def test_figures_are_differences_to_greedy_at_the_same_window() -> None:
    settings = [SweepSetting(4), SweepSetting(8), SweepSetting(8, "h", 0.5, FAST)]
    short, long = CourseRound(4, 1, 0, 1, None), CourseRound(8, 3, 1, 2, None)
    tallies = [
        [metrics(True, *[short] * 6), metrics(True, *[short] * 4), metrics(at % 4 > 0, *[long] * 2)]
        for at in range(40)
    ]
    plain, _, judged = figures(plan(*settings), tallies)
    assert (plain.gained, plain.aal_gained, plain.rounds_saved) == (0.0, 0.0, 0.0)
    assert plain.gained_within == (0.0, 0.0)
    assert (judged.n, judged.right, judged.accuracy) == (40, 30, 0.75)
    assert judged.gained == -0.25
    low, high = judged.gained_within
    assert -0.40 <= low < -0.32
    assert -0.18 < high <= -0.10  # ±1.96·√(0.25·0.75/40) = ±0.13
    assert (judged.aal, judged.aal_gained, judged.rounds_saved) == (4.0, 1.0, 0.5)
    assert judged.aal_within == (1.0, 1.0)  # every question's is the same
    assert judged.forgiven == 0.5


def test_a_curve_is_that_of_the_poorest_link() -> None:
    info = plan()
    line = [
        metrics(True, CourseRound(4, 1, 0, 1, None), tokens=at + 1)
        for at in range(len(info.settings))
    ]
    points = curve(info, figures(info, [line]), "h", 8)
    assert list(points) == [0.0, 0.5]
    assert all(point.setting.profile == SLOW for point in points.values())
    assert all(point.setting.window == 8 for point in points.values())


# Files


def test_a_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    path, info = tmp_path / "s.jsonl", plan()
    line = [metrics(True, CourseRound(4, 1, 0, 1, None))] * len(info.settings)
    sweep_file = SweepFile(path)
    with sweep_file.writing(info):
        sweep_file.add("q-1", line)
        sweep_file.set_pace({"draft_s": 0.1, "verify_s": {"1": 0.2}})
    with path.open("a") as file:
        file.write('{"question":"q-2","tal')  # stopped while it was written
    size = path.stat().st_size
    again = SweepFile(path)
    assert path.stat().st_size == size  # reading changes nothing
    assert (again.plan, again.tallies) == (info, {"q-1": line})
    assert again.pace == {"draft_s": 0.1, "verify_s": {"1": 0.2}}
    with again.writing(info):
        again.add("q-2", line)
    assert SweepFile(path).tallies == {"q-1": line, "q-2": line}


def test_a_sweep_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with SweepFile(path).writing(plan()):
        pass
    other_head = {"h": {"sha256": "1", "form": "int8", "recommended": 0.5}}
    with SweepFile(path).writing(plan(sampling={"seed": 0})):
        pass
    for other, options in (
        (plan(most=8), "most"),
        (plan(heads=other_head), "heads"),
        (plan(sampling={"seed": 1}), "sampling"),
    ):
        with (
            pytest.raises(UnsupportedError, match=rf"other options \({options}\)"),
            SweepFile(path).writing(other),
        ):
            pass


def test_one_process_at_a_time_writes_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    early, info = SweepFile(path), plan()
    line = [metrics(True, CourseRound(4, 1, 0, 1, None))] * len(info.settings)
    writer = SweepFile(path)
    with writer.writing(info):
        writer.add("q-1", line)
        with pytest.raises(RunFileError, match="Another process"), early.writing(info):
            pass
        assert SweepFile(path).tallies == {"q-1": line}  # a reader needs no lock
    with early.writing(info):
        assert early.tallies == {"q-1": line}  # it was written after `early` was opened


@pytest.mark.parametrize(
    "text",
    [
        '{"question": "q-1", "tallies": []}\n',
        '{"sweep": {"task": "exact"}}\n',
        '{"other": 1}\n',
        "[]\n",
        "3\n",
        "{\n",
        "\x00\n",
    ],
)
def test_what_is_no_sweep_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text(text)
    with pytest.raises(UnsupportedError, match="does not hold a sweep"):
        SweepFile(path)
