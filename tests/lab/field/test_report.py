"""`pilotfish field report`: the page that shows the figures of a run, and what it refuses."""

from __future__ import annotations

import base64
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from html.parser import HTMLParser
from itertools import chain as chained

import pytest

from pilotfish.base.errors import RunFileError
from pilotfish.base.extras import install_command
from pilotfish.cli import main
from pilotfish.lab.field.report.canvas import MOST_ROWS, MOST_SERIES
from pilotfish.lab.field.report.figures import by_series
from pilotfish.lab.field.report.measured import read_run, with_unique_names
from pilotfish.lab.field.report.pictures import draw
from pilotfish.lab.field.report.report_page import page, write
from tests.lab.field.conftest import HOSTILE
from tests.support.made_answers import answer, chain, linked, recorded


class Page(HTMLParser):
    """Everything of a page that could reach out of it, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.alts, self.text, self.styles = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            assert not name.startswith("on")
            if name in ("src", "href", "srcset", "data", "action", "poster"):
                self.links.append(value)
            if name == "alt":
                self.alts.append(value)
            if name == "style":
                self.styles.append(value)

    def handle_data(self, data):
        (self.styles if self.tags[-1:] == ["style"] else self.text).append(data)


def page_of(folder):
    return Page((folder / "report.html").read_text(encoding="utf-8"))


# The page


def test_the_page_needs_nothing_but_itself(report):
    result = page_of(report[0])
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(result.tags)
    assert all(link.startswith("data:image/png;base64,") for link in result.links)
    assert not re.search(r"url\(|@import|https?:", " ".join(result.styles))
    # each picture has a wide and a narrow rendition; medians of 4 answers have no picture
    assert 2 * result.tags.count("img") == len(result.links) == 12
    assert result.tags.count("source") == result.tags.count("img")


def test_pictures_group_by_the_varied_options_and_have_few_groups(tmp_path):
    """A line for each protocol and K, and a part of the lines in each picture."""
    several = MOST_SERIES + 2
    varied = [
        answer([chain(w, 1)] * 2, window=w, protocol="tslt", point=(("draft_top_k", k),), repeat=i)
        for k in range(several)
        for w in (2, 4)
        for i in range(20)
    ]
    plain = [answer([chain(2, 1), chain(2, 2)], window=2, repeat=i) for i in range(20)]
    made = read_run(recorded(tmp_path / "run.pilotfish", [*plain, *varied]))
    labels = ["greedy", *(f"tslt draft-top-k {k}" for k in range(several))]
    assert [*by_series(made.figures)] == labels
    gallery = draw([made], tmp_path)
    for pictures in (gallery.latency.pictures, gallery.depths.pictures):
        alts = [re.search(r"for each of (.*?);", picture.alt)[1] for picture in pictures]
        parts = [alt.split(", ") for alt in alts]
        assert [len(part) for part in parts] == [MOST_SERIES, 3]
        assert [label for part in parts for label in part] == labels
        assert [p.alt.split(":")[0] for p in pictures] == ["run, 1 of 2", "run, 2 of 2"]
    for pictures in (gallery.stages.pictures, gallery.bytes_per_token.pictures):
        assert len(pictures) == -(-(2 * several + 1) // MOST_ROWS)
    kinds = (gallery.latency, gallery.depths, gallery.stages)
    drawn = [*chained.from_iterable(kind.pictures for kind in kinds)]
    assert len({p.path for p in drawn} | {p.narrow for p in drawn}) == 2 * 6
    assert not [p for p in tmp_path.glob("*.png") if not p.stat().st_size]


def test_the_pictures_beside_the_page_are_those_in_it(report):
    folder, _ = report
    embedded = {base64.b64decode(link.split(",", 1)[1]) for link in page_of(folder).links}
    neighbour = {path.read_bytes() for path in folder.glob("*.png")}
    assert embedded == neighbour
    assert all(png.startswith(b"\x89PNG") for png in neighbour)


def test_every_picture_says_its_unit_and_n(report):
    result = page_of(report[0])
    for alt in result.alts:
        assert re.search(r"\bms\b|%|\bbytes\b", alt), alt
        assert re.search(r"n = \d", alt), alt


def test_what_comes_from_the_file_is_text(report):
    result = page_of(report[0])
    assert HOSTILE in "".join(result.text)


def test_the_page_shows_what_was_measured(report):
    text = " ".join("".join(page_of(report[0]).text).split())
    for words in ("greedy γ=2", "dssd γ=4", "stream", "local", "auto took", "7 warm-up"):
        assert words in text
    assert "not measured: " in text  # a loopback has no radio


def test_names_that_could_be_formulas_or_paths(tmp_path):
    name = "a $x_{$ & <b> 回 ..%2f.pilotfish"
    path = recorded(tmp_path / name, [answer([chain(2, 1)] * 3, window=2)])
    folder = tmp_path / "out"
    write([read_run(path)], folder)
    assert {p.parent for p in folder.rglob("*")} == {folder}
    assert "b" not in page_of(folder).tags


def test_runs_of_one_name_are_told_apart(tmp_path):
    paths = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / "lan.pilotfish"
        rounds = [chain(2, 1, ms=10.0 * number)] * 3
        answers = [answer(rounds, window=2, repeat=i) for i in range(20)]
        paths.append(recorded(path, answers))
    runs = with_unique_names([read_run(path) for path in paths])
    assert [run.name for run in runs] == ["lan", "lan (2)"]
    write(runs, tmp_path / "out")
    result = page_of(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.png"))) == len(result.links)
    assert any("lan, lan (2)" in alt for alt in result.alts)  # the runs side by side


def test_an_unmeasured_link_is_said_not_drawn(tmp_path):
    path = recorded(tmp_path / "x.pilotfish", [answer([chain(2, 1)] * 3, window=2)])
    gallery = draw([read_run(path)], tmp_path)
    assert not gallery.link
    assert not gallery.rtt
    text = page([read_run(path)], gallery)
    rest = "goodput up, goodput down, retransmitted, retransmitted down, signal"
    assert f"not measured: RTT, jitter, {rest}." in text
    assert "the run has no answer under protocol auto" in text


def test_the_link_over_time_has_what_was_measured(tmp_path):
    states = [linked(rtt=0.02 + i * 1e-3, signal=-60.0) for i in range(20)]
    answers = [
        answer([chain(2, 1)] * 2, window=2, repeat=i, link=link, started_unix_s=1.8e9 + 4000 * i)
        for i, link in enumerate(states)
    ]
    run = read_run(recorded(tmp_path / "x.pilotfish", answers))
    gallery = draw([run], tmp_path)
    (rtt,), (signal,) = gallery.rtt.pictures, gallery.link.pictures
    assert "estimates at begins of answers" in rtt.alt
    assert "19 pauses" in rtt.alt  # the answers are 4,000 s apart
    assert "RTT p50 29.5, p90 37.1 ms (n = 20 RTT samples)" in rtt.alt
    assert "signal -60 dBm (n = 20 measurements a line)" in signal.alt
    assert run.as_json()["not_measured"] == [
        "jitter",
        "goodput up",
        "goodput down",
        "retransmitted",
        "retransmitted down",
    ]


def test_answers_of_one_round_make_a_page_without_steady_plots(tmp_path):
    path = recorded(tmp_path / "x.pilotfish", [answer([chain(2, 1)], window=2)])
    write([read_run(path)], tmp_path / "out")
    assert "Latency against window" not in "".join(page_of(tmp_path / "out").text)


def test_unfinished_answers_and_warm_up_are_counted_and_left_out(tmp_path):
    answers = [
        answer([chain(2, 1)] * 3, window=2, warm_up=True),
        answer([chain(2, 1, ms=10.0)] * 3, window=2),
        answer([chain(2, 1, ms=1e6)] * 2, window=2, repeat=1, finished=False),
    ]
    run = read_run(recorded(tmp_path / "x.pilotfish", answers))
    assert (run.warm_up, run.unfinished, len(run.answers)) == (1, 1, 1)
    assert run.figures[0].token_ms.p95 == pytest.approx(5.0)


# What goes wrong


def refused(capsys, *arguments):
    """The one line that a command ends with, and its exit code."""
    code = main(["field", "report", *map(str, arguments)])
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    return code, lines[0]


def test_files_that_are_no_runs(tmp_path, capsys):
    foreign = tmp_path / "foreign.pilotfish"
    foreign.write_bytes(b"PNG" * 100)
    for path in (foreign, tmp_path / "absent.pilotfish", tmp_path):
        code, line = refused(capsys, path, "--out", tmp_path / "out")
        assert code == RunFileError.exit_code
        assert str(path) in line
    assert not (tmp_path / "out").exists()


def test_a_run_without_a_finished_answer(tmp_path, capsys):
    answers = [answer([chain(2, 1)] * 2, window=2, finished=False)]
    path = recorded(tmp_path / "x.pilotfish", answers)
    code, line = refused(capsys, path, "--out", tmp_path / "out")
    assert code == RunFileError.exit_code
    assert "no finished answer" in line


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE rounds SET verify_s = 9e999", "inf as its verify time"),
        ("UPDATE rounds SET accepted = 3", "3 as its accepted tokens"),
        ("UPDATE rounds SET uplink_bytes = -1", "-1 as its bytes up"),
        ("UPDATE answers SET started_unix_s = 1e300", "1e+300 as its begin"),
    ],
)
def test_what_cannot_have_happened_is_damage(tmp_path, capsys, change, words):
    path = recorded(tmp_path / "x.pilotfish", [answer([chain(2, 1)] * 3, window=2)])
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(change)
    code, line = refused(capsys, path, "--out", tmp_path / "out")
    assert code == RunFileError.exit_code
    assert words in line


@pytest.mark.parametrize("place", ["report.html", "1-run.png", "run.json"])
def test_a_run_is_not_overwritten_by_its_report(tmp_path, capsys, place):
    made = recorded(tmp_path / place, [answer([chain(2, 1)] * 3, window=2)])
    before = made.read_bytes()
    arguments = [made, "--out", tmp_path]
    if place == "run.json":
        (tmp_path / "link.json").symlink_to(made)
        arguments += ["--json", tmp_path / "link.json"]
    code, line = refused(capsys, *arguments)
    assert code == 64
    assert "would overwrite" in line
    assert str(made) in line
    assert made.read_bytes() == before


def test_a_folder_that_cannot_be_written(walk, tmp_path, capsys):
    (tmp_path / "out").write_text("a file is in the way")
    code, line = refused(capsys, walk, "--out", tmp_path / "out")
    assert code == 74
    assert str(tmp_path / "out") in line


def test_without_matplotlib_a_line_says_what_to_install(walk, tmp_path):
    """In a process of its own: importing it must fail, and nothing else."""
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from pilotfish.cli import main\n"
        f"sys.exit(main(['field', 'report', {str(walk)!r}, '--out', {str(tmp_path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 64
    (line,) = done.stderr.strip().splitlines()
    assert install_command("field") in line
