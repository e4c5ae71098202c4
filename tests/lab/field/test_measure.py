"""`pilotfish field measure`: the whole matrix, in mixed order, whatever happens on the way."""

from __future__ import annotations

import json
import re
import time
from collections import Counter

import pytest
from msgspec import structs

from pilotfish import EdgeServer
from pilotfish.base.errors import UnsupportedError
from pilotfish.cli import main
from pilotfish.device_runtime.session import Session
from pilotfish.engines.artifact import Artifact
from pilotfish.lab.field import matrix
from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.writable_run_file import has_begun
from pilotfish.lab.prompts import BUILT_IN, read_prompts
from tests.support.daemons import free_port
from tests.support.measuring import PROMPTS, QUICK, answers, assert_whole, measure

# A run that nothing disturbs


def test_every_cell_is_answered_once_and_its_rounds_add_up(pair, edge, out, prompts):
    options = ["--prompts", prompts, "--windows", "1,auto", "--repeat", 2, "--max-tokens", 12]
    options += ["--protocols", "dsd,coupled,stream,local", "--temperature", 0.8, "--seed", 5]
    assert measure(pair, edge.endpoint, out, *options, "--note", "in the lab") == 0
    with Run.open(out) as run:
        facts, result = run.facts, list(run.answers())
        every = list(run.answers(warm_up=True, finished=False))
    assert Counter(a.cell for a in result) == Counter(matrix.cells(facts.settings))
    assert len(result) == 6 * 3 * 2
    assert len(every) - len(result) == 6  # warm-up
    assert all(a.warm_up for a in every[:6])
    assert {a.seed for a in result} == {5, 6}
    for answer in result:
        assert_whole(answer)
        assert 0 < answer.first_token_s <= answer.at_s[-1] <= answer.total_s
        assert answer.first_token_s == pytest.approx(answer.at_s[0])
        assert sum(r.timings.total for r in answer.rounds) <= answer.total_s
        assert answer.protocol_used == answer.protocol
        assert answer.link is not None
        assert answer.energy_j is None or answer.energy_j > 0
    assert facts.note == "in the lab"
    assert facts.edge == edge.endpoint
    assert facts.target.name == Artifact.open(pair.target).manifest.model
    assert facts.host["cpus"] >= 1


def test_figures_as_json(pair, edge, out, prompts, tmp_path):
    info = tmp_path / "figures.json"
    options = ["--prompts", prompts, "--protocols", "greedy,stream", "--windows", 2]
    assert measure(pair, edge.endpoint, out, *options, "--repeat", 1, "--json", info) == 0
    payload = json.loads(info.read_text())
    assert [(item["protocol"], item["window"]) for item in payload] == [
        ("greedy", 2),
        ("stream", None),
    ]
    assert all(item["token_ms"]["median"] > 0 for item in payload)


def test_a_folder_is_no_run_file(pair, edge, tmp_path, capsys):
    for more in ([], ["--resume"]):
        assert measure(pair, edge.endpoint, tmp_path, *more) == 65
        assert "is a folder" in capsys.readouterr().err


def test_a_target_of_another_precision_is_another_target(pair, edge, out, prompts):
    assert measure(pair, edge.endpoint, out, *QUICK, "--prompts", prompts) == 0
    with Run.open(out) as run:
        assert run.facts.target.digest == Artifact.open(pair.target).manifest.digest


@pytest.mark.timing
def test_what_recording_takes_is_in_no_figure(pair, edge, out, prompts, monkeypatch):
    """With a disk that needs 100 ms a round, stages and totals are what they were."""
    taken = Recorder.add_round

    def slow(*arguments):
        time.sleep(0.1)
        taken(*arguments)

    monkeypatch.setattr(Recorder, "add_round", slow)
    options = ["--prompts", prompts, "--protocols", "greedy", "--windows", 1, "--repeat", 1]
    assert measure(pair, edge.endpoint, out, *options, "--warm-up", 0, "--max-tokens", 8) == 0
    for answer in answers(out):
        count = len(answer.rounds)
        assert answer.recording_s > 0.1 * count
        spent = sum(round_.timings.total for round_ in answer.rounds)
        slow_rounds = sum(round_.timings.total > 0.1 for round_ in answer.rounds)
        assert slow_rounds <= count / 2  # a loaded machine may hold up one
        assert answer.total_s - spent < 0.1 * count
        assert answer.at_s[-1] <= answer.total_s


def test_two_ends_that_share_randomness_answer_as_the_target_alone(pair, edge, out, prompts):
    options = ["--prompts", prompts, "--windows", 3, "--protocols", "coupled,stream"]
    assert measure(pair, edge.endpoint, out, *options, "--temperature", 1, "--repeat", 1) == 0
    texts: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for answer in answers(out):
        tokens = tuple(token for round_ in answer.rounds for token in round_.tokens)
        texts.setdefault((answer.prompt, answer.repeat), set()).add(tokens)
    assert len(texts) == len(PROMPTS)
    assert all(len(same) == 1 for same in texts.values())


def test_auto_says_what_it_chose(pair, edge, out, prompts):
    options = ["--prompts", prompts, "--protocols", "auto", "--repeat", 1, "--max-tokens", 8]
    assert measure(pair, edge.endpoint, out, *options) == 0
    result = answers(out)
    assert len(result) == len(PROMPTS)  # auto has no windows to multiply by
    for answer in result:
        assert (answer.protocol, answer.window) == ("auto", None)
        assert answer.protocol_used == answer.choice.protocol
        assert answer.choice.forecasts
        assert answer.choice.reason


def test_the_default_matrix_has_every_way_to_answer_once(pair, edge, out, tmp_path):
    """Also `ahead`, whatever the windows, and ``auto``."""
    info = tmp_path / "figures.json"
    options = ["--repeat", 1, "--warm-up", 0, "--max-tokens", 4, "--json", info]
    assert measure(pair, edge.endpoint, out, *options) == 0
    windows = [("greedy", n) for n in (2, 4, 8)] + [("coupled", n) for n in (2, 4, 8)]
    alone = [("stream", None), ("ahead", None), ("auto", None)]
    rows = json.loads(info.read_text())
    assert Counter((row["protocol"], row["window"]) for row in rows) == Counter(windows + alone)
    result = answers(out)
    assert len(result) == 9 * 5
    assert {a.window_used for a in result if a.protocol_used == "ahead"} == {None}


def test_an_edge_without_a_default_protocol(pair, out, prompts, tmp_path, capsys, monkeypatch):
    """The run is measured without it and says so; a protocol that was named is refused."""
    monkeypatch.setenv("PILOTFISH_PROTOCOLS", "tests.support.without_ahead")
    with EdgeServer(pair.target, threads=1) as edge:
        monkeypatch.delenv("PILOTFISH_PROTOCOLS")
        options = ["--prompts", prompts, "--repeat", 1, "--warm-up", 0, "--max-tokens", 4]
        assert measure(pair, edge.endpoint, out, *options) == 0
        notice = capsys.readouterr().err
        named = tmp_path / "named.pilotfish"
        assert measure(pair, edge.endpoint, named, *options, "--protocols", "ahead,stream") == 64
    left = "greedy, coupled, stream, auto"
    assert f"The edge does not offer ahead: measuring {left}." in notice
    assert "does not offer protocol ahead" in capsys.readouterr().err
    with Run.open(out) as run:
        assert run.facts.settings.protocols == tuple(left.split(", "))
    assert not has_begun(named)


def test_local_alone_needs_no_edge(pair, out, prompts, capsys):
    options = ["--draft", pair.draft, "--protocols", "local", "--prompts", prompts, "--out", out]
    assert main(["field", "measure", *map(str, options), "--json", "-"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert (figures["protocol"], figures["window"], figures["n"]) == ("local", None, 12)
    assert all(answer.link is None for answer in answers(out))


def test_each_block_has_each_configuration_once_in_an_order_of_its_own():
    settings = MatrixSettings(
        prompts=PROMPTS, repeat=4, protocols=("greedy", "dsd", "stream", "auto")
    )
    wanted = matrix.configurations(settings)
    assert len(wanted) == 2 * 3 + 2
    order = list(matrix.cells(settings))
    blocks = [order[at : at + 8] for at in range(0, len(order), 8)]
    assert len(blocks) == 12
    for block in blocks:
        assert len({(cell.prompt, cell.repeat) for cell in block}) == 1
        assert {cell.configuration for cell in block} == set(wanted)
    assert len({tuple(cell.configuration for cell in block) for block in blocks}) > 8
    assert order == list(matrix.cells(settings))
    assert order != list(matrix.cells(structs.replace(settings, seed=1)))


def test_every_answer_starts_cold(pair, edge, out, prompts, monkeypatch):
    """Neither end holds anything of the prompt any more when it is asked again."""
    held = []
    join = Session.join

    def noted(session):
        if session._plan.protocol == "greedy":
            held.append(
                (session.edge._edge_length, session._drafter._shared_model.engine.model.length(0))
            )
        join(session)

    monkeypatch.setattr(Session, "join", noted)
    options = ["--prompts", prompts, "--protocols", "greedy", "--windows", "2,3", "--repeat", 2]
    assert measure(pair, edge.endpoint, out, *options, "--warm-up", 0, "--max-tokens", 6) == 0
    assert held == [(0, 0)] * (2 * 2 * len(PROMPTS))


# What is refused, in a line


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--protocols", "telepathy"], 64, "telepathy"),
        (["--windows", "2,1000"], 64, "window must be"),
        (["--windows", "2,100"], 65, "smaller --windows"),
        (["--protocols", "tree", "--windows", "40"], 65, "tree has .* draft tokens"),
        (["--temperature", "1"], 64, "use coupled"),
        (["--prompts", "/nowhere/prompts"], 64, "cannot be read"),
        (["--keys", "/nowhere"], 77, "nowhere"),
        (["--out", "/nowhere/run"], 74, "nowhere"),
        (["--draft", "/nowhere"], 66, "does not exist as a file or folder"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(pair, edge, out, capsys, options, code, words):
    assert measure(pair, edge.endpoint, out, *options) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("pilotfish: ")
    assert re.search(words, line), line
    assert not has_begun(out)


def test_what_is_missing_is_asked_for(pair, out, capsys):
    assert main(["field", "measure", "--out", str(out)]) == 64
    assert "--draft" in capsys.readouterr().err
    assert main(["field", "measure", "--draft", str(pair.draft), "--out", str(out)]) == 64
    assert "--edge" in capsys.readouterr().err


def test_an_edge_that_is_not_there_leaves_no_file(pair, out, capsys):
    assert measure(pair, f"tcp://127.0.0.1:{free_port()}", out) == 69
    assert "No edge answers" in capsys.readouterr().err
    assert not out.exists()


def test_a_prompt_that_does_not_fit_is_named(pair, edge, out, tmp_path, capsys):
    path = tmp_path / "long.txt"
    path.write_text("abc\n" + "abc " * 200 + "\n")
    assert measure(pair, edge.endpoint, out, "--prompts", path) == 65
    assert "Prompt 2 has" in capsys.readouterr().err


def test_prompts_with_odd_letters(tmp_path):
    file = tmp_path / "prompts"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "a\xe2\x80\xa8b"}\r\n{"question": "c"}\r\n')
    assert read_prompts(file) == ("a\u2028b", "c")
    file.write_text("one\n\x85two\n", encoding="utf-8")
    assert read_prompts(file) == ("one", "two")
    file.write_text('{"prompt": "\\ud800"}')
    with pytest.raises(UnsupportedError, match="line 1 is not valid text"):
        read_prompts(file)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no prompt"),
        (b"\n \n\t\n", "no prompt"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b'{"prompt": "a"}\n{"answer": "b"}\n', "line 2"),
        (b'{"prompt": "a"}\n\n{"prompt"\n', "line 3 is not JSON"),
        (b'{"prompt": "  "}\n', "line 1"),
        (b'{"prompt": 3}\n', "line 1"),
        (b'{"prompt": "a"}\n[1]\n', "line 2"),
    ],
)
def test_prompts_that_are_none_are_refused(tmp_path, content, words):
    path = tmp_path / "prompts"
    path.write_bytes(content)
    with pytest.raises(UnsupportedError, match=words):
        read_prompts(path)


def test_prompts_are_lines_or_json_lines(tmp_path):
    path = tmp_path / "prompts"
    path.write_text("Why?\n\n  How?  \n")
    assert read_prompts(path) == ("Why?", "How?")
    path.write_text('{"question": "Wh\\ny?", "answer": "42"}\n\n{"prompt": "How?"}\n')
    assert read_prompts(path) == ("Wh\ny?", "How?")
    with pytest.raises(UnsupportedError, match="cannot be read"):
        read_prompts(tmp_path)
    assert len(set(BUILT_IN)) == len(BUILT_IN) > 1
