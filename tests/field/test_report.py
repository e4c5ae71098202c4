"""`pilotfish field report`: the figures of a run, the page that shows them, and what it refuses."""

from __future__ import annotations

import base64
import json
import math
import re
import sqlite3
import statistics
import subprocess
import sys
from contextlib import closing
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.cli import main
from pilotfish.device_runtime.record import STAGES, Choice, Forecast, Round, Timings
from pilotfish.field.recording import Recorder
from pilotfish.field.report.figures import figures, lowest, steady_token_ms
from pilotfish.field.report.hindsight import hindsight
from pilotfish.field.report.measured import named_apart, read
from pilotfish.field.report.page import page
from pilotfish.field.report.pictures import draw
from pilotfish.field.report.statistics import median_interval, positions, share_interval, spread
from pilotfish.field.report.write import write
from pilotfish.field.run import Answer, Facts, Model, Run, Settings, Start
from pilotfish.wire.errors import RunFileError
from pilotfish.wire.link.state import LinkState, Reading

HOSTILE = '<script>alert("x")</script> & <img src="http://evil.example/x.png"> $\\frac{'


def chain(window, accepted, *, ms=10.0, protocol="greedy", up=50, down=60, **judged):
    """A round whose stages take ms in all."""
    timings = Timings(draft=ms * 0.4e-3, verify=ms * 0.5e-3, uplink=ms * 0.1e-3)
    return Round(
        protocol=protocol,
        start=0,
        window=window,
        nodes=window,
        accepted=accepted,
        tokens=[7] * (accepted + 1),
        uplink_bytes=up,
        downlink_bytes=down,
        timings=timings,
        **judged,
    )


def answer(rounds, *, protocol="greedy", window=4, **more):
    """A finished answer of these rounds."""
    total_s = sum(r.timings.total for r in rounds)
    values = {
        "id": 1,
        "protocol": protocol,
        "window": window,
        "prompt": 0,
        "repeat": 0,
        "warm_up": False,
        "temperature": 0.0,
        "seed": 0,
        "started_unix_s": 1.8e9,
        "finished": True,
        "tokens": sum(len(r.tokens) for r in rounds),
        "total_s": total_s,
        "first_token_s": rounds[0].timings.total,
        "rounds": rounds,
    }
    return Answer(**{**values, **more})


def facts(**more):
    """Of a run on a machine that tells little."""
    values = {
        "software": "pilotfish 0.0.0",
        "settings": Settings(prompts=("a",)),
        "starts": (Start(unix_s=1.8e9, host={"board": "a board", "memory_bytes": 2**31}),),
        "drafter": Model(name="small"),
        "target": Model(name="large"),
        "edge": "tcp://127.0.0.1:7077",
        "edge_software": "pilotfish 0.0.0",
        "draft_path": "drafter",
        "keys_path": None,
        "note": "",
        "energy": None,
    }
    return Facts(**{**values, **more})


def recorded(path, answers, **more):
    """A run file with these answers, by the store's own writer."""
    with Recorder.create(path, facts(**more)) as recorder:
        for one in answers:
            number = recorder.begin(one)
            for i, round_ in enumerate(one.rounds):
                recorder.round(number, i, 0.1 * i, round_)
            if one.finished:
                names = ("finished", "tokens", "total_s", "first_token_s", "energy_j")
                ends = {name: getattr(one, name) for name in names}
                recorder.end(number, **ends, link=one.link, choice=one.choice)
    return path


def linked(**readings):
    """A link state with these values."""
    return LinkState(**{k: Reading(value=v, age_s=0.0, samples=1) for k, v in readings.items()})


def chosen(protocol, window, token_s, forecasts, reason="cheapest"):
    return Choice(
        policy="predictive",
        protocol=protocol,
        window=window,
        token_s=token_s,
        reason=reason,
        forecasts=[Forecast(*each) for each in forecasts],
    )


@pytest.fixture(scope="module")
def walk(pair, edge, tmp_path_factory):
    """A run that was really measured, with every kind of protocol in it."""
    path = tmp_path_factory.mktemp("measured") / "walk.pilotfish"
    prompts = path.with_name("prompts.txt")
    prompts.write_text("abc\nbcd ef\n")
    options = ["--draft", pair.draft, "--edge", edge.endpoint, "--threads", 1, "--out", path]
    options += ["--prompts", prompts, "--protocols", "greedy,dssd,stream,local,auto"]
    options += ["--windows", "2,4", "--repeat", 2, "--max-tokens", 20, "--note", HOSTILE]
    assert main(["field", "measure", *map(str, options)]) == 0
    return path


@pytest.fixture(scope="module")
def report(walk, tmp_path_factory):
    """The folder of that run's report, and its figures."""
    folder = tmp_path_factory.mktemp("report")
    found = folder / "figures.json"
    assert main(["field", "report", str(walk), "--out", str(folder), "--json", str(found)]) == 0
    return folder, json.loads(found.read_text())


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


# Statistics


def test_a_spread_is_median_and_95th_percentile():
    values = [3.0, 1.0, 2.0, 10.0, 4.0]
    found = spread(values)
    assert found.n == 5
    assert found.median == statistics.median(values)
    assert found.p95 == pytest.approx(statistics.quantiles(values, n=20, method="inclusive")[-1])
    assert min(values) <= found.low <= found.median <= found.high <= max(values)


def test_too_few_values_have_no_interval():
    assert spread([]) is None
    assert spread([1.0, 2.0]).low is None


@given(st.lists(st.floats(0.1, 1e4), min_size=3, max_size=30))
def test_an_interval_holds_its_median_and_is_the_same_again(values):
    low, high = median_interval(values)
    assert min(values) <= low <= high <= max(values)
    assert low <= statistics.median(values) <= high
    assert (low, high) == median_interval(values)


def test_95_of_100_intervals_hold_the_true_median():
    random = np.random.default_rng(3)
    samples = random.lognormal(0.0, 0.5, (300, 15))  # median 1
    inside = [low <= 1.0 <= high for low, high in map(median_interval, samples.tolist())]
    assert 0.90 <= np.mean(inside) <= 0.99


def test_wilson_is_the_textbooks():
    low, high = share_interval(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert share_interval(10, 10)[1] == pytest.approx(1.0)
    assert share_interval(0, 10)[0] == pytest.approx(0.0)


def test_acceptance_by_position_of_rounds_made_by_hand():
    rounds = [chain(4, 4), chain(4, 0), chain(4, 2), chain(2, 2), chain(1, 0)]
    found = [(p.depth, p.drafted, p.reached, p.accepted) for p in positions(rounds)]
    assert found == [(1, 5, 5, 3), (2, 4, 3, 3), (3, 3, 2, 1), (4, 3, 1, 1)]


# Figures


def test_first_rounds_are_in_the_first_token_only():
    slow, quick = chain(4, 1, ms=500.0), chain(4, 4, ms=20.0)
    (found,) = figures([answer([slow, quick, quick])])
    assert found.token_ms.median == pytest.approx(4.0)
    assert found.round_ms.median == pytest.approx(20.0)
    assert found.first_token_ms.median == pytest.approx(500.0)
    assert found.tokens_per_s.median == pytest.approx(12 / 0.54)
    assert sum(found.stages_ms.values()) == pytest.approx(4.0)
    assert found.tokens_per_round == pytest.approx(12 / 3)
    assert found.up_bytes_per_token == pytest.approx(150 / 12)


def test_an_answer_of_one_round_has_no_steady_figures():
    (found,) = figures([answer([chain(4, 1)])])
    assert found.token_ms is None
    assert found.stages_ms == {}
    assert found.first_token_ms.n == 1
    assert lowest([found]) is None


def test_what_a_decision_head_did_is_told_where_there_was_one():
    judged = [
        chain(4, 4, protocol="wisv-selective", notes={"forgiven": 1}, inquired=2),
        chain(4, 4, protocol="wisv-selective", notes={"forgiven": 1}, inquired=1),
        chain(4, 0, protocol="wisv-selective", inquired=3),
        chain(4, 2, protocol="wisv-selective"),
    ]
    greedy, wisv = figures([answer([chain(4, 2)]), answer(judged, protocol="wisv-selective")])
    assert (greedy.notes["forgiven"], greedy.asked) == (None, None)
    assert wisv.notes["forgiven"] == pytest.approx(2 / 10)
    assert wisv.asked == pytest.approx(3 / 4)


def test_only_what_says_the_targets_text_is_the_lowest():
    found = figures(
        [
            answer([chain(2, 1), chain(2, 1, ms=30.0)], window=2),
            answer([chain(0, 0), chain(0, 0, ms=1.0)], protocol="local", window=None),
            answer([chain(2, 1), chain(2, 1, ms=2.0)], protocol="auto", window=None),
            answer([chain(2, 1), chain(2, 1, ms=3.0)], protocol="wisv-full", window=2),
        ]
    )
    assert str(lowest(found).configuration) == "greedy γ=2"


def test_energy_is_the_answers_own():
    (found,) = figures([answer([chain(4, 4)] * 2, energy_j=30.0), answer([chain(4, 4)] * 2)])
    assert (found.joules_per_token.n, found.joules_per_token.median) == (1, 3.0)


def test_the_figures_of_a_real_run_are_those_of_its_rounds(walk, report):
    """Everything in the JSON, computed again from the file by other means."""
    with Run.open(walk) as run:
        answers = list(run.answers())
    (shown,) = report[1]["runs"]
    assert shown["answers"] == len(answers) == 2 * 2 * 7
    assert shown["left_out"] == {"warm_up": 7, "unfinished": 0}
    for found in shown["figures"]:
        mine = [
            a for a in answers if (a.protocol, a.window) == (found["protocol"], found["window"])
        ]
        assert found["n"] == len(mine) == 4
        per_token = []
        for one in mine:
            rest = one.rounds[1:]
            seconds = math.fsum(getattr(r.timings, stage) for r in rest for stage in STAGES)
            per_token.append(1e3 * seconds / sum(len(r.tokens) for r in rest))
        assert found["token_ms"]["median"] == pytest.approx(statistics.median(per_token))
        assert found["token_ms"]["p95"] == pytest.approx(np.quantile(per_token, 0.95))
        rounds = [r for one in mine for r in one.rounds]
        tokens = sum(len(r.tokens) for r in rounds)
        assert found["up_bytes_per_token"] == sum(r.uplink_bytes for r in rounds) / tokens
        assert found["down_bytes_per_token"] == sum(r.downlink_bytes for r in rounds) / tokens
        assert found["joules_per_token"] is None
        for place in found["positions"]:
            depth = place["depth"]
            accepted = [r for r in rounds if r.accepted >= depth]
            assert place["accepted"] == len(accepted)


# What auto chose


def auto_answer(choice, ms):
    rounds = [chain(choice.window, 1, ms=99.0), chain(choice.window, 1, ms=2 * ms)]
    return answer(rounds, protocol="auto", window=None, choice=choice)


def test_hindsight_of_choices_made_by_hand():
    compared = [("greedy", 2, 0.010), ("greedy", 4, 0.012), ("stream", 0, 0.030)]
    fixed = [
        answer([chain(2, 1), chain(2, 1, ms=18.0)], window=2),  # 9 ms a token
        answer([chain(4, 1), chain(4, 1, ms=16.0)], window=4),  # 8
        answer([chain(0, 0), chain(0, 0, ms=1.0)], protocol="local", window=None),  # not compared
    ]
    seen = hindsight(
        [
            *fixed,
            auto_answer(chosen("greedy", 2, 0.010, compared), 10.0),
            auto_answer(chosen("greedy", 2, 0.010, compared, "later"), 12.0),
            auto_answer(chosen("greedy", 4, 0.012, compared), 8.0),
        ]
    )
    by_name = {str(each.configuration): each for each in seen.alternatives}
    assert list(by_name) == ["greedy γ=2", "greedy γ=4", "stream", "local"]
    assert [each.chosen for each in by_name.values()] == [2, 1, 0, 0]
    assert by_name["greedy γ=2"].measured.median == pytest.approx(11.0)
    assert by_name["greedy γ=2"].fixed.median == pytest.approx(9.0)
    assert by_name["greedy γ=2"].reason == "later"
    assert by_name["stream"].forecast_ms == pytest.approx(30.0)
    assert by_name["stream"].fixed is None
    assert str(seen.best.configuration) == "greedy γ=4"
    assert seen.auto.median == pytest.approx(10.0)
    assert seen.behind == pytest.approx(10.0 / 8.0 - 1.0)
    assert sorted(seen.predicted) == [
        (10.0, pytest.approx(10.0)),
        (10.0, pytest.approx(12.0)),
        (12.0, pytest.approx(8.0)),
    ]
    assert seen.error == pytest.approx(1 / 6)


def test_without_auto_there_is_no_hindsight():
    assert hindsight([answer([chain(2, 1)])]) is None


def test_choices_of_a_real_run_add_up(walk, report):
    auto = report[1]["runs"][0]["auto"]
    assert auto["n"] == sum(each["chosen"] for each in auto["alternatives"]) == 4
    with Run.open(walk) as run:
        answers = [one for one in run.answers() if one.protocol == "auto"]
    pairs = [[one.choice.token_s * 1e3, steady_token_ms(one)] for one in answers]
    assert auto["predicted"] == [pytest.approx(pair) for pair in pairs]


# The page


def test_the_page_needs_nothing_but_itself(report):
    found = page_of(report[0])
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(found.tags)
    assert all(link.startswith("data:image/png;base64,") for link in found.links)
    assert not re.search(r"url\(|@import|https?:", " ".join(found.styles))
    assert found.tags.count("img") == len(found.links) == 7


def test_the_pictures_beside_the_page_are_those_in_it(report):
    folder, _ = report
    embedded = {base64.b64decode(link.split(",", 1)[1]) for link in page_of(folder).links}
    beside = {path.read_bytes() for path in folder.glob("*.png")}
    assert embedded == beside
    assert all(png.startswith(b"\x89PNG") for png in beside)


def test_every_picture_says_its_unit_and_n(report):
    found = page_of(report[0])
    for alt in found.alts:
        assert re.search(r"\bms\b|%|\bbytes\b", alt), alt
        assert re.search(r"n = \d", alt), alt


def test_what_comes_from_the_file_is_text(report):
    found = page_of(report[0])
    assert HOSTILE in "".join(found.text)


def test_the_page_shows_what_was_measured(report):
    text = " ".join("".join(page_of(report[0]).text).split())
    for words in ("greedy γ=2", "dssd γ=4", "stream", "local", "auto took", "7 warm-up"):
        assert words in text
    assert "not measured: " in text  # a loopback has no radio


def test_names_that_could_be_formulas_or_paths(tmp_path):
    name = "a $x_{$ & <b> 回 ..%2f.pilotfish"
    path = recorded(tmp_path / name, [answer([chain(2, 1)] * 3, window=2)])
    folder = tmp_path / "out"
    write([read(path)], folder)
    assert {p.parent for p in folder.rglob("*")} == {folder}
    assert "b" not in page_of(folder).tags


def test_runs_of_one_name_are_told_apart(tmp_path):
    paths = []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        path = tmp_path / str(number) / "lan.pilotfish"
        paths.append(recorded(path, [answer([chain(2, 1, ms=10.0 * number)] * 3, window=2)]))
    runs = named_apart([read(path) for path in paths])
    assert [run.name for run in runs] == ["lan", "lan (2)"]
    write(runs, tmp_path / "out")
    found = page_of(tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.png"))) == len(found.links)
    assert any("lan, lan (2)" in alt for alt in found.alts)  # the runs side by side


def test_a_link_that_nobody_measured_is_said_not_drawn(tmp_path):
    path = recorded(tmp_path / "x.pilotfish", [answer([chain(2, 1)] * 3, window=2)])
    gallery = draw([read(path)], tmp_path)
    assert gallery.link == []
    text = page([read(path)], gallery)
    assert "not measured: RTT, jitter, goodput up, goodput down, retransmissions, signal." in text
    assert "no answer was asked for under protocol auto" in text


def test_the_link_over_time_has_what_was_measured(tmp_path):
    states = [linked(rtt=0.02 + i * 1e-3, signal=-60.0) for i in range(4)]
    answers = [
        answer([chain(2, 1)] * 2, window=2, repeat=i, link=link, started_unix_s=1.8e9 + 4000 * i)
        for i, link in enumerate(states)
    ]
    run = read(recorded(tmp_path / "x.pilotfish", answers))
    (picture,) = draw([run], tmp_path).link
    assert "RTT, signal" in picture.alt
    assert "RTT from 20 to 23 ms (n = 4 answers)" in picture.alt
    assert run.as_json()["not_measured"] == [
        "jitter",
        "goodput up",
        "goodput down",
        "retransmissions",
    ]


def test_answers_of_one_round_make_a_page_without_steady_plots(tmp_path):
    path = recorded(tmp_path / "x.pilotfish", [answer([chain(2, 1)], window=2)])
    write([read(path)], tmp_path / "out")
    assert "Latency against window" not in "".join(page_of(tmp_path / "out").text)


def test_unfinished_answers_and_warm_up_are_counted_and_left_out(tmp_path):
    answers = [
        answer([chain(2, 1)] * 3, window=2, warm_up=True),
        answer([chain(2, 1, ms=10.0)] * 3, window=2),
        answer([chain(2, 1, ms=1e6)] * 2, window=2, repeat=1, finished=False),
    ]
    run = read(recorded(tmp_path / "x.pilotfish", answers))
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
    assert "pip install 'pilotfish[field]'" in line
