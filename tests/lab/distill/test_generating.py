"""Answers from a real edge: several sessions at once, edges that die, prompts without room."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pilotfish.base.errors import EdgeLostError, UnsupportedError
from pilotfish.device_runtime.device import Device
from pilotfish.edge_runtime.process import EdgeServer
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.lab.distill.answer_collector import AnswerCollector
from pilotfish.lab.distill.answers import TrainingExampleFile
from pilotfish.lab.distill.distill_settings import AnswerOptions
from pilotfish.lab.distill.measuring import ALL, Measurer, measure_agreement
from pilotfish.lab.distill.prompt_selection import DistillPrompt, Selection
from pilotfish.lab.distill.training_rows import TrainingRow
from tests.conftest import Pair

OPTIONS = AnswerOptions(tokens=12, top=4)
ASKED = [DistillPrompt("ab"[number % 2], f"say {number}") for number in range(12)]
SELECTION = Selection(ASKED[3:], ASKED[:3])


@pytest.fixture
def lanes(pair: Pair, edge: EdgeServer) -> Iterator[Device]:
    with Device(pair.draft, edge.endpoint, threads=1, lanes=3) as opened:
        yield opened


def test_all_are_answered_as_the_target_answers(lanes: Device, tmp_path: Path) -> None:
    training_example_file = TrainingExampleFile(tmp_path / "answers.jsonl")
    messages: list[tuple[int, int]] = []
    result, left_out = AnswerCollector(lanes, OPTIONS, 3).collect(
        SELECTION, training_example_file, lambda done, total: messages.append((done, total))
    )
    assert left_out == 0
    assert {item.key for item in result} == {item.key for item in ASKED}
    assert [item.held for item in result] == [item.prompting in SELECTION.held for item in result]
    assert messages == [(number, 12) for number in range(13)]
    for item in result:
        alone = lanes.generate(item.prompting.content, protocol="stream", max_tokens=12)
        assert item.answer == alone.tokens
        assert all(
            top[0] == label for top, label in zip(item.row.likely, item.row.labels, strict=True)
        )
    assert TrainingExampleFile(training_example_file.path).answers == training_example_file.answers


def test_what_is_answered_is_not_asked_again(lanes: Device, tmp_path: Path) -> None:
    training_example_file = TrainingExampleFile(tmp_path / "answers.jsonl")
    AnswerCollector(lanes, OPTIONS, 3).collect(
        Selection(ASKED[3:6], ASKED[:2]), training_example_file, lambda *_: None
    )
    before = training_example_file.path.read_bytes()
    result, _ = AnswerCollector(lanes, OPTIONS, 3).collect(
        SELECTION, TrainingExampleFile(training_example_file.path), lambda *_: None
    )
    assert len(result) == 12
    assert training_example_file.path.read_bytes().startswith(before)
    assert training_example_file.path.read_bytes().count(b"\n") == 12


def test_an_edge_that_dies_costs_no_answer(pair: Pair, tmp_path: Path) -> None:
    training_example_file = TrainingExampleFile(tmp_path / "answers.jsonl")
    many = Selection([DistillPrompt("a", f"say {number}") for number in range(200)], ASKED[:1])

    with (
        EdgeServer(pair.target, threads=1) as edge,
        Device(pair.draft, edge.endpoint, threads=1, lanes=3) as device,
    ):

        def kill(done: int, _: int) -> None:
            if done == 5:
                os.kill(edge.pid, signal.SIGKILL)

        with pytest.raises(EdgeLostError, match=r"answers are kept in .* the same command again"):
            AnswerCollector(device, OPTIONS, 3).collect(many, training_example_file, kill)
    there = TrainingExampleFile(training_example_file.path).answers
    assert 5 <= len(there) < 100
    assert there == training_example_file.answers


def test_prompts_without_room_are_left_out(lanes: Device, tmp_path: Path) -> None:
    training_example_file = TrainingExampleFile(tmp_path / "answers.jsonl")
    long = DistillPrompt("a", "say " * (lanes.context // 2))
    result, left_out = AnswerCollector(lanes, OPTIONS, 3).collect(
        Selection([long, *ASKED[3:5]], ASKED[:1]), training_example_file, lambda *_: None
    )
    assert (len(result), left_out) == (3, 1)
    options = AnswerOptions(tokens=lanes.context)
    with pytest.raises(UnsupportedError, match=r"no prompt fits .* lower --tokens"):
        AnswerCollector(lanes, options, 3).collect(
            SELECTION, training_example_file, lambda *_: None
        )


def test_a_drafter_agrees_at_the_places_where_its_drafts_are_accepted(
    pair: Pair, lanes: Device, tmp_path: Path
) -> None:
    result, _ = AnswerCollector(lanes, OPTIONS, 3).collect(
        SELECTION, TrainingExampleFile(tmp_path / "answers.jsonl"), lambda *_: None
    )
    engine = EngineSettings(threads=1)
    measurer = Measurer(pair.draft, lanes.context, engine, None)
    for item in result:
        agreed = item.row.compare_choices(measurer.choices(item.row)).tolist()
        # windows of one token: each round says whether one draft agreed, and then commits one more
        drafted = lanes.generate(item.prompting.content, protocol="greedy", window=1, max_tokens=12)
        at = 0
        for round_ in drafted.rounds:
            if round_.window and at < len(agreed):
                assert bool(round_.accepted) == agreed[at]
            at += len(round_.tokens)
    itself = measure_agreement(
        Measurer(pair.target, lanes.context, engine, None), result, lambda _: None
    )
    assert itself[ALL].alpha == 1.0
    assert set(itself) == {"a", "b", ALL}


def test_an_answer_too_long_for_the_drafter_is_left_out(lanes: Device, tmp_path: Path) -> None:
    training_example_file = TrainingExampleFile(tmp_path / "answers.jsonl")
    result, _ = AnswerCollector(lanes, OPTIONS, 3).collect(
        SELECTION, training_example_file, lambda *_: None
    )
    row = msgspec.structs.replace(result[0].row, ids=[1] * (lanes.context + 1))
    training_example_file.add(msgspec.structs.replace(result[0], row=row))
    again, left_out = AnswerCollector(lanes, OPTIONS, 3).collect(
        SELECTION, training_example_file, lambda *_: None
    )
    assert again == result[1:]
    assert left_out == 1


def test_of_an_answer_without_tokens_nothing_is_said(pair: Pair) -> None:
    measurer = Measurer(pair.draft, 32, EngineSettings(threads=1), None)
    row = TrainingRow([1, 2, 3], 3, [], [], [], [])
    assert row.compare_choices(measurer.choices(row)).dtype == np.bool_
    assert len(measurer.choices(row)) == len(row.learnable) == 0
