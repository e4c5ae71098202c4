"""The file of answers, and the run's folder: kills, full disks, other settings."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pilotfish.base.errors import RunFileError
from pilotfish.base.files import partial_path
from pilotfish.lab.distill.answers import TrainingExample, TrainingExampleFile
from pilotfish.lab.distill.prompt_selection import DistillPrompt
from pilotfish.lab.distill.run_folder import RunFolder
from pilotfish.lab.distill.training_rows import TrainingRow


def answered(number: int) -> TrainingExample:
    row = TrainingRow([1, 2, number], 2, [1], [number], [[number, 4]], [[-0.5, -1.0]])
    prompting = DistillPrompt("kind", f"prompt {number}")
    return TrainingExample(
        prompting.key, prompting, number % 2 == 0, [5, 6], [number], "length", row
    )


def test_answers_are_there_when_the_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    first = TrainingExampleFile(path)
    for number in range(3):
        first.add(answered(number))
    assert TrainingExampleFile(path).answers == {item.key: item for item in map(answered, range(3))}


def test_a_line_that_was_cut_off_is_dropped_wherever_that_was(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    for number in range(2):
        TrainingExampleFile(path).add(answered(number))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        file = TrainingExampleFile(path)
        assert list(file.answers.values()) == [answered(0)]
        file.add(answered(1))
        assert path.read_bytes() == whole


def test_a_disk_that_is_full_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    file = TrainingExampleFile(path)
    file.add(answered(0))
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
    try:
        with pytest.raises(OSError, match=r"answers\.jsonl"):
            file.add(answered(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    assert list(file.answers.values()) == [answered(0)]
    file.add(answered(1))
    assert len(TrainingExampleFile(path).answers) == 2


def test_what_is_no_file_of_answers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    TrainingExampleFile(path).add(answered(0))
    whole = path.read_bytes()
    for damage in (b'{"key": 3}\n', b"\xff\xfe\n", b"\n"):
        path.write_bytes(whole + damage + whole)
        with pytest.raises(RunFileError, match="is not a file of answers, or its line 2 is damag"):
            TrainingExampleFile(path)


def test_a_run_goes_on_with_its_own_settings_only(tmp_path: Path) -> None:
    path = tmp_path / "run"
    with RunFolder.open(path) as folder:
        folder.expect({"rate": 0.1, "count": 3}, "settings")
    with RunFolder.open(path) as folder:
        folder.expect({"count": 3, "rate": 0.1}, "settings")
        with pytest.raises(RunFileError, match=r"was begun with --count 3, not 4: give the former"):
            folder.expect({"rate": 0.1, "count": 4}, "settings")
        folder.expect({"target": "a"}, "pair")
        with pytest.raises(RunFileError, match="was begun with the target a, not b"):
            folder.expect({"target": "b"}, "pair")


def test_one_process_at_a_time_has_a_run(tmp_path: Path) -> None:
    with (
        RunFolder.open(tmp_path / "run"),
        pytest.raises(RunFileError, match="Another process"),
        RunFolder.open(tmp_path / "run"),
    ):
        pass
    with RunFolder.open(tmp_path / "run"):
        pass


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("chapter 1")
    with (
        pytest.raises(RunFileError, match=r"contains thesis\.txt, but no run\.json"),
        RunFolder.open(tmp_path),
    ):
        pass


def test_the_learning_curve_ends_where_the_checkpoint_is(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path) as folder:
        for step in range(5):
            folder.add_to_curve({"step": step, "loss": 1.0 / (step + 1)})
        with (tmp_path / "learning.jsonl").open("ab") as file:
            file.write(b'{"step": 5, "lo')
        assert [line["step"] for line in folder.curve(2)] == [0, 1, 2]
        assert [line["step"] for line in folder.curve(9)] == [0, 1, 2]


def test_what_made_nothing_yet_binds_nobody(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run") as folder:
        folder.expect({"draft": "defualt"}, "settings", binding=folder.has_begun)
        folder.expect({"draft": "default"}, "settings", binding=folder.has_begun)
        folder.before.mkdir()
        with pytest.raises(RunFileError, match="with --draft default, not mine: give the former"):
            folder.expect({"draft": "mine"}, "settings", binding=folder.has_begun)


def test_other_prompts_are_called_so(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run") as folder:
        folder.expect({"prompts": "5ab"}, "settings")
        with pytest.raises(RunFileError, match="with other prompts"):
            folder.expect({"prompts": "92d"}, "settings")


def test_what_a_kill_left_half_written_is_removed(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run") as folder:
        folder.expect({}, "settings")
        left = partial_path(folder.checkpoint(7))
        left.write_bytes(b"half")
    with RunFolder.open(tmp_path / "run"):
        assert not left.exists()
