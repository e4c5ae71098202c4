"""`pilotfish field measure`: the whole matrix, in mixed order, whatever happens on the way."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import select
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from device_runtime.session import Session
from engines.artifact import Artifact
from field import matrix
from field.prompts import BUILT_IN, read_prompts
from field.recording import Recorder, begun
from field.run import Run, Settings
from pilotfish import EdgeServer
from pilotfish.cli import main
from tests.test_processes import command, free_port
from wire.errors import UnsupportedError

PROMPTS = ("abc", "bcd ef", "c")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "walk.pilotfish"


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS) + "\n")
    return path


def measure(pair, address, out, *more):
    """The exit code of a run on the tiny pair."""
    options = ["--draft", pair.draft, "--edge", address, "--threads", 1, "--out", out, *more]
    return main(["field", "measure", *map(str, options)])


def answers(out, **which):
    with Run.open(out) as run:
        return list(run.answers(**which))


def assert_whole(answer):
    """The rounds of a finished answer follow each other and make up its tokens."""
    position = answer.prompt_tokens
    for round_ in answer.rounds:
        assert round_.start == position
        position += len(round_.tokens)
    assert position - answer.prompt_tokens == answer.tokens > 0
    assert answer.at_s == sorted(answer.at_s)


# A run that nothing disturbs


def test_every_cell_is_answered_once_and_its_rounds_add_up(pair, edge, out, prompts):
    options = ["--prompts", prompts, "--windows", "1,auto", "--repeat", 2, "--max-tokens", 12]
    options += ["--protocols", "dsd,coupled,stream,local", "--temperature", 0.8, "--seed", 5]
    assert measure(pair, edge.endpoint, out, *options, "--note", "in the lab") == 0
    with Run.open(out) as run:
        facts, found = run.facts, list(run.answers())
        every = list(run.answers(warm_up=True, finished=False))
    assert Counter(a.cell for a in found) == Counter(matrix.cells(facts.settings))
    assert len(found) == 6 * 3 * 2
    assert len(every) - len(found) == 6  # warm-up
    assert all(a.warm_up for a in every[:6])
    assert {a.seed for a in found} == {5, 6}
    for answer in found:
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


def wait_for_answers(out, count):
    """Until a run has so many answers that count; for a minute."""
    patience = time.monotonic() + 60
    while time.monotonic() < patience and not (begun(out) and len(answers(out)) >= count):
        time.sleep(0.01)


def test_figures_as_json(pair, edge, out, prompts, tmp_path):
    told = tmp_path / "figures.json"
    options = ["--prompts", prompts, "--protocols", "greedy,stream", "--windows", 2]
    assert measure(pair, edge.endpoint, out, *options, "--repeat", 1, "--json", told) == 0
    found = json.loads(told.read_text())
    assert [(one["protocol"], one["window"]) for one in found] == [("greedy", 2), ("stream", None)]
    assert all(one["token_ms"]["median"] > 0 for one in found)


def test_a_folder_is_no_run_file(pair, edge, tmp_path, capsys):
    for more in ([], ["--resume"]):
        assert measure(pair, edge.endpoint, tmp_path, *more) == 65
        assert "is a folder" in capsys.readouterr().err


def test_a_target_of_another_precision_is_another_target(pair, edge, out, prompts):
    assert measure(pair, edge.endpoint, out, *QUICK, "--prompts", prompts) == 0
    with Run.open(out) as run:
        assert run.facts.target.digest == Artifact.open(pair.target).manifest.digest


def test_what_recording_takes_is_in_no_figure(pair, edge, out, prompts, monkeypatch):
    """With a disk that needs 100 ms a round, stages and totals are what they were."""
    taken = Recorder.round

    def slow(*arguments):
        time.sleep(0.1)
        taken(*arguments)

    monkeypatch.setattr(Recorder, "round", slow)
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
    found = answers(out)
    assert len(found) == len(PROMPTS)  # auto has no windows to multiply by
    for answer in found:
        assert (answer.protocol, answer.window) == ("auto", None)
        assert answer.protocol_used == answer.choice.protocol
        assert answer.choice.forecasts
        assert answer.choice.reason


def test_local_alone_needs_no_edge(pair, out, prompts, capsys):
    options = ["--draft", pair.draft, "--protocols", "local", "--prompts", prompts, "--out", out]
    assert main(["field", "measure", *map(str, options), "--json", "-"]) == 0
    (figures,) = json.loads(capsys.readouterr().out)
    assert (figures["protocol"], figures["window"], figures["n"]) == ("local", None, 9)
    assert all(answer.link is None for answer in answers(out))


def test_each_block_has_each_configuration_once_in_an_order_of_its_own():
    settings = Settings(prompts=PROMPTS, repeat=4, protocols=("greedy", "dsd", "stream", "auto"))
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
    assert order != list(matrix.cells(Settings(**{**vars(settings), "seed": 1})))


def test_every_answer_starts_cold(pair, edge, out, prompts, monkeypatch):
    """Neither end holds anything of the prompt any more when it is asked again."""
    held = []
    begin = Session._begin

    def noted(session):
        if session._begun.protocol == "greedy":
            held.append((session._at_edge, session._drafter._decoder.length(0)))
        begin(session)

    monkeypatch.setattr(Session, "_begin", noted)
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
        (["--draft", "/nowhere"], 66, "not an artifact"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(pair, edge, out, capsys, options, code, words):
    assert measure(pair, edge.endpoint, out, *options) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("pilotfish: ")
    assert re.search(words, line), line
    assert not begun(out)


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
    with pytest.raises(UnsupportedError, match="line 1 is no text"):
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


# Going on


QUICK = ["--protocols", "greedy,stream", "--windows", "2", "--repeat", "2", "--max-tokens", "8"]


def forget_the_last_answer(out):
    with sqlite3.connect(out) as database:
        database.execute("DELETE FROM rounds WHERE answer = (SELECT max(id) FROM answers)")
        database.execute("DELETE FROM answers WHERE id = (SELECT max(id) FROM answers)")


def test_a_file_is_neither_overwritten_nor_mixed(pair, edge, out, prompts, capsys):
    options = [*QUICK, "--prompts", prompts]
    assert measure(pair, edge.endpoint, out, *options) == 0
    forget_the_last_answer(out)
    before = out.read_bytes()
    assert measure(pair, edge.endpoint, out, *options) == 65
    assert "--resume" in capsys.readouterr().err
    assert measure(pair, edge.endpoint, out, "--resume", "--repeat", 3) == 65
    assert "--repeat 2, not 3" in capsys.readouterr().err
    other = [str(part) for part in ("--draft", pair.target, "--resume", "--out", out)]
    assert main(["field", "measure", *other]) == 65
    assert "begun with the drafter" in capsys.readouterr().err
    assert out.read_bytes() == before
    with Recorder.resume(out):
        assert main(["field", "measure", "--resume", "--out", str(out)]) == 65
        assert "being written by another" in capsys.readouterr().err
    assert main(["field", "measure", "--resume", "--out", str(out), "--note", "x"]) == 65
    assert "--note" in capsys.readouterr().err


def test_a_run_that_is_complete_needs_no_edge_to_be_resumed(pair, out, prompts, capsys):
    with EdgeServer(pair.target, threads=1) as server:
        assert measure(pair, server.endpoint, out, *QUICK, "--prompts", prompts) == 0
    before = out.read_bytes()
    assert main(["field", "measure", "--resume", "--out", str(out)]) == 0
    assert "greedy γ=2" in capsys.readouterr().err
    assert out.read_bytes() == before


def test_a_host_that_has_changed_is_mentioned(pair, edge, out, prompts, capsys):
    options = [*QUICK, "--prompts", prompts]
    assert measure(pair, edge.endpoint, out, *options) == 0
    forget_the_last_answer(out)
    with sqlite3.connect(out) as database:
        database.execute("UPDATE facts SET value = replace(value, 'kernel\":\"', 'kernel\":\"9')")
    capsys.readouterr()
    assert main(["field", "measure", "--resume", "--out", str(out)]) == 0
    assert "Not as when the run began: kernel" in capsys.readouterr().err
    assert len(answers(out)) == 2 * 2 * len(PROMPTS)


def test_foreign_and_damaged_files_are_left_alone(pair, edge, out, capsys):
    for content in (b"my diary, page 1\n" * 50, b"SQLite format 3\0" + bytes(4000)):
        out.write_bytes(content)
        assert measure(pair, edge.endpoint, out, "--resume") == 65
        assert "not a run file" in capsys.readouterr().err
        assert measure(pair, edge.endpoint, out) == 65
        capsys.readouterr()
        assert out.read_bytes() == content


def test_an_edge_that_comes_back_is_waited_for(pair, out, prompts, capsys):
    """It is gone for two seconds in the middle: the answer that it broke off is repeated."""
    address = f"tcp://127.0.0.1:{free_port()}"
    server = EdgeServer(pair.target, listen=address, threads=1).start()

    def interrupt():
        wait_for_answers(out, 3)
        server.stop()
        time.sleep(2.0)
        server.start()

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    try:
        options = ["--prompts", prompts, "--repeat", 30, "--max-tokens", 24, "--windows", 2]
        assert measure(pair, address, out, *options, "--protocols", "greedy") == 0
    finally:
        thread.join()
        server.stop()
    found = answers(out)
    assert len(found) == 30 * len(PROMPTS)
    for answer in found:
        assert_whole(answer)
    capsys.readouterr()


def test_an_edge_that_stays_away_ends_the_run_which_goes_on_later(pair, out, prompts, capsys):
    address = f"tcp://127.0.0.1:{free_port()}"
    server = EdgeServer(pair.target, listen=address, threads=1).start()

    def interrupt():
        wait_for_answers(out, 3)
        server.stop()

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    options = ["--prompts", prompts, "--repeat", 20, "--max-tokens", 24, "--windows", 2]
    options += ["--protocols", "greedy,coupled", "--patience", 1.5]
    code = measure(pair, address, out, *options)
    thread.join()
    said = capsys.readouterr().err
    assert code == 69
    assert "Trying again in 1 s" in said
    assert f"pilotfish field measure --resume --out {out}" in said
    assert said.strip().splitlines()[-1].startswith("pilotfish: The edge at")
    with Run.open(out) as run:
        broken = [a for a in run.answers(finished=False, warm_up=True) if not a.finished]
    # none, if the edge went between two answers
    assert all("edge" in a.error for a in broken)
    done = len(answers(out))
    assert 3 <= done < 120
    with server:
        assert main(["field", "measure", "--resume", "--out", str(out)]) == 0
    assert len(answers(out)) == 120


def test_interrupted_it_says_how_to_go_on(pair, edge, out, prompts):
    options = ["--draft", pair.draft, "--edge", edge.endpoint, "--prompts", prompts, "--out", out]
    process = subprocess.Popen(
        command("field", "measure", *options, "--repeat", 1000),
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (begun(out) and answers(out)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    lines = said.strip().splitlines()
    assert lines[-1] == "pilotfish: interrupted"
    assert f"--resume --out {out}" in lines[-2]
    assert not list(out.parent.glob("*-wal"))


def test_a_full_disk_ends_the_run_which_goes_on_later(pair, edge, out, prompts, capsys):
    """No file may grow beyond 100 kB: what is in it stays, and the rest follows when it may."""
    options = [*QUICK, "--prompts", prompts, "--repeat", 40]
    options += ["--draft", pair.draft, "--edge", edge.endpoint, "--out", out]
    ended = subprocess.run(
        command("field", "measure", *options),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)),
    )
    assert ended.returncode == 74, ended.stderr
    assert ended.stderr.strip().splitlines()[-1].startswith(f"pilotfish: {out} cannot be written")
    assert "Traceback" not in ended.stderr
    done = {answer.cell for answer in answers(out)}
    assert done
    assert main(["field", "measure", "--resume", "--out", str(out)]) == 0
    capsys.readouterr()
    found = answers(out)
    assert done < {answer.cell for answer in found}
    assert len(found) == 2 * 40 * len(PROMPTS)


# Killed


LIVES = 20


def test_killed_twenty_times_at_random_it_loses_a_round_at_most(pair, edge, out, prompts):
    """Every fifth time at any moment of its life, else while it measures."""
    chance = random.Random(int(os.environ.get("PILOTFISH_TEST_SEED", time.time_ns())))
    again = ["field", "measure", "--resume", "--out", str(out)]
    first = [*again, "--draft", str(pair.draft), "--edge", edge.endpoint, "--threads", "1"]
    first += ["--protocols", "greedy,coupled,stream", "--windows", "2,4", "--repeat", "30"]
    first += ["--max-tokens", "16", "--warm-up", "0", "--prompts", str(prompts)]
    with Killable() as killable:
        for life in range(LIVES):
            seen = killable.rounds_until_killed(
                again if begun(out) else first,
                chance.uniform(0.0, 0.25 if life % 5 else 1.0),
                measuring=bool(life % 5),
            )
            missing = len(seen - recorded(out))
            assert missing <= 1, f"life {life}: {missing} rounds lost"
            assert recorded(out) <= killable.seen
        assert killable.kills == LIVES, "a life ended by itself"
    assert main(again if begun(out) else first) == 0
    with Run.open(out) as run:
        found = list(run.answers())
        every = list(run.answers(finished=False))
        assert len(run.facts.starts) > LIVES * 3 / 5
    assert Counter(a.cell for a in found) == Counter(matrix.cells(run.facts.settings))
    finished = {answer.cell: answer for answer in found}
    for answer in found:
        assert_whole(answer)
    broken = [answer for answer in every if not answer.finished]
    assert broken
    for answer in broken:  # greedy decoding: it had begun what was answered in the end
        begun_ids = [token for round_ in answer.rounds for token in round_.tokens]
        ids = [token for round_ in finished[answer.cell].rounds for token in round_.tokens]
        assert begun_ids == ids[: len(begun_ids)]


def recorded(out: Path) -> set[tuple[int, int]]:
    """Answer and number of every round in the file."""
    if not begun(out):
        return set()
    with Run.open(out) as run:
        every = run.answers(finished=False, warm_up=True)
        return {(answer.id, number) for answer in every for number in range(len(answer.rounds))}


class Killable:
    """`tests/killable.py`; ``seen`` is what its witness has told so far."""

    def __enter__(self) -> Killable:
        self._witness, told = os.pipe()
        os.set_blocking(self._witness, False)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.killable", str(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            pass_fds=[told],
        )
        os.close(told)
        self.seen: set[tuple[int, int]] = set()
        self.kills = 0
        return self

    def rounds_until_killed(
        self, arguments: list[str], after_s: float, *, measuring: bool
    ) -> set[tuple[int, int]]:
        """What a command told before it was killed, so long after it began, or began to measure."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin
        assert stdout
        stdin.write(json.dumps(arguments) + "\n")
        stdin.flush()
        child = int(stdout.readline())
        if measuring:
            assert select.select([self._witness], [], [], 60)[0], "it does not measure"
        time.sleep(after_s)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        self.kills += int(stdout.readline()) == signal.SIGKILL
        try:
            lines = os.read(self._witness, 1 << 20).decode().splitlines()
        except BlockingIOError:
            lines = []
        new = {(int(answer), int(number)) for answer, number in map(str.split, lines)}
        self.seen |= new
        return new

    def __exit__(self, *error: object) -> None:
        self._process.communicate(timeout=30)
        os.close(self._witness)
