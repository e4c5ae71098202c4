"""Figures of the papers, measured by ``pilotfish field paper … --run`` and shipped with it."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pilotfish.base.errors import RunFileError
from pilotfish.cli import main
from pilotfish.engines.artifact import Artifact
from pilotfish.lab.field.papers.figure import Bench, Figure
from pilotfish.lab.field.papers.figure_file import read_figure
from pilotfish.lab.field.papers.figure_run import measure_figure, measured_before
from pilotfish.lab.field.papers.sheet import Sheet
from pilotfish.lab.pairs import OpenPair


@pytest.fixture
def bench(pair) -> Bench:
    return Bench(pair=OpenPair(*pair), prompts=("abc", "bcd"), threads=1)


class Squares:
    """A figure of squares; the measurement stops as a killed one does, after some rows."""

    def __init__(self) -> None:
        self.measured: list[int] = []
        self.stop_at: int | None = None

    def measure(self, bench, done):
        for number in range(4):
            if (number,) in done:
                continue
            if number == self.stop_at:
                raise KeyboardInterrupt
            self.measured.append(number)
            yield {"number": number, "square": number**2 / 3.0, "n": len(bench.prompts)}

    @property
    def figure(self) -> Figure:
        return Figure(
            key="squares",
            title="Squares",
            columns={"number": ("x", 0), "square": ("x²/3", 3), "square_printed": ("printed", 1)},
            identity=("number",),
            printed=lambda: [
                {"number": 2, "square_printed": 1.5},
                {"number": 9, "square_printed": 27.0},
            ],
            measure=self.measure,
            minutes=0.1,
        )


def interrupted(squares: Squares, bench: Bench, folder: Path) -> Path:
    """Measure two of the four rows; return the path of the unfinished file."""
    squares.stop_at = 2
    with pytest.raises(KeyboardInterrupt):
        measure_figure("test", squares.figure, bench, folder, "again")
    squares.stop_at = None
    return folder / "test_squares.unfinished"


def test_a_killed_measurement_continues_after_its_last_whole_row(bench, tmp_path):
    squares = Squares()
    unfinished = interrupted(squares, bench, tmp_path)
    assert not (tmp_path / "test_squares.json").exists()
    lines = unfinished.read_bytes().splitlines(keepends=True)
    unfinished.write_bytes(b"".join(lines)[:-9])  # the kill came while row 1 was written
    squares.measured.clear()
    result = measure_figure("test", squares.figure, bench, tmp_path, "again")
    assert squares.measured == [1, 2, 3]
    assert [row["number"] for row in result.rows] == [0, 1, 2, 3]
    assert result.rows[3]["square"] == 3.0
    assert result.rows[1]["square"] == 0.333333  # six digits
    assert not unfinished.exists()
    assert read_figure(tmp_path / "test_squares.json") == result
    assert result.facts.drafter.digest == bench.pair.drafter.digest
    assert result.facts.prompts == 2


def test_a_finished_figure_is_measured_again_as_a_whole(bench, tmp_path):
    squares = Squares()
    measure_figure("test", squares.figure, bench, tmp_path, "again")
    old = (tmp_path / "test_squares.json").read_bytes()
    squares.measured.clear()
    interrupted(squares, bench, tmp_path)
    assert squares.measured == [0, 1]
    assert (tmp_path / "test_squares.json").read_bytes() == old


@pytest.mark.parametrize(
    ("change", "named"), [({"seed": 5}, "seed was 0, not 5"), ({"prompts": ("abc",)}, "prompts")]
)
def test_other_facts_do_not_continue_an_interrupted_measurement(bench, tmp_path, change, named):
    squares = Squares()
    unfinished = interrupted(squares, bench, tmp_path)
    before = unfinished.read_bytes()
    other = dataclasses.replace(bench, **change)
    with pytest.raises(RunFileError, match=named):
        measure_figure("test", squares.figure, other, tmp_path, "again")
    assert unfinished.read_bytes() == before


def test_a_measurement_without_a_row_binds_no_later_one(bench, tmp_path):
    """For example one that was refused because an option was wrong."""
    squares = Squares()
    squares.stop_at = 0
    with pytest.raises(KeyboardInterrupt):
        measure_figure("test", squares.figure, bench, tmp_path, "wrong")
    squares.stop_at = None
    result = measure_figure("test", squares.figure, bench, tmp_path, "right")
    assert (result.facts.command, len(result.rows)) == ("right", 4)


def test_another_drafter_does_not_continue_an_interrupted_measurement(bench, pair, tmp_path):
    squares = Squares()
    interrupted(squares, bench, tmp_path)
    other = dataclasses.replace(bench, pair=OpenPair(pair.target, pair.target))
    with pytest.raises(RunFileError, match="drafter was"):
        measure_figure("test", squares.figure, other, tmp_path, "again")


def test_a_figure_counts_as_measured_only_with_the_same_facts(bench, tmp_path):
    figure = Squares().figure
    assert measured_before("test", figure, bench, tmp_path, "again") is None
    result = measure_figure("test", figure, bench, tmp_path, "again")
    assert measured_before("test", figure, bench, tmp_path, "again") == result
    other = dataclasses.replace(bench, seed=5)
    assert measured_before("test", figure, other, tmp_path, "again") is None


def test_measured_rows_stand_beside_the_printed_ones(bench, tmp_path):
    figure = Squares().figure
    sheet = figure.comparison(measure_figure("t", figure, bench, tmp_path, "again").rows, "here")
    assert [(row["number"], row["square"], row["square_printed"]) for row in sheet.rows] == [
        (0, 0.0, None), (1, 0.333333, None), (2, 1.33333, 1.5), (3, 3.0, None), (9, None, 27.0),
    ]  # fmt: skip
    assert sheet.note == "here"


@pytest.mark.parametrize("width", [80, 60])
def test_a_narrow_terminal_breaks_no_short_name_and_cuts_no_number(width):
    numbers = {f"x{at}": ("number" + "....." * (at == 7), 5) for at in range(8)}
    row = {"name": "dssd"} | dict.fromkeys(numbers, 1234.5)
    console = Console(width=width, file=io.StringIO())
    Sheet("s", "S", {"name": ("", None), **numbers}, [row]).print(console)
    text = console.file.getvalue()
    assert "dssd" in text
    assert text.count("1,234.50000") == 8


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "f.json").write_text('{"facts": {}')
    with pytest.raises(RunFileError, match=r"f\.json cannot be read"):
        read_figure(tmp_path / "f.json")


def run_here(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["field", "paper", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_a_figure_measured_by_the_command(pair, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("abc\nbcd\nc\n")
    command = ["tslt", "figure3", "--run", "--draft", pair.draft, "--target", pair.target]
    command += ["--prompts", tmp_path / "prompts.txt", "--save", tmp_path, "--threads", 1]
    code, text, _ = run_here(capsys, *command)
    assert code == 0
    result = read_figure(tmp_path / "tslt_figure3.json")
    assert result is not None
    vocabulary = Artifact.open(pair.target).manifest.vocab_size
    assert [row["kept"] for row in result.rows][-1] == vocabulary
    masses = [row["mass"] for row in result.rows]
    assert masses == sorted(masses)
    assert masses[-1] == pytest.approx(1.0)
    assert str(tmp_path) not in result.facts.command
    assert "--draft draft --target target --prompts prompts.txt --threads 1" in result.facts.command
    assert f"{masses[0]:.4f}" in text


def test_the_source_of_a_figure_names_the_prompts_of_its_rows(capsys):
    _, text, _ = run_here(capsys, "dssd", "table3")
    assert "32 prompts" in text
    assert "The rows are of the first 6 prompts." in " ".join(text.split())
    _, text, _ = run_here(capsys, "tslt", "figure3")
    assert "The rows are" not in text


def test_a_figure_alone_as_json(capsys):
    code, text, _ = run_here(capsys, "tslt", "figure5", "--json", "-")
    assert code == 0
    assert "figure5" in json.loads(text)
    assert "figure6" not in json.loads(text)


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        (["tslt", "figure9"], ["figure3", "figure5", "payloads"]),
        (["tslt", "payloads", "--run"], ["figure3", "figure4"]),
        (["wisv", "figure9"], ["table1", "figure4"]),
        (["tslt", "figure3", "--draft", "x"], ["--draft", "--run"]),
        (["tslt", "figure3", "--run", "--worker", "x"], ["--worker", "specfed"]),
    ],
)
def test_what_cannot_be_shown_or_measured_is_refused(capsys, words, listed):
    code, _, reply = run_here(capsys, *words)
    assert code == 64
    assert len(reply.splitlines()) == 1
    assert all(name in reply for name in listed)
