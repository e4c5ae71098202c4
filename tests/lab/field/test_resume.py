"""`field measure` that is interrupted, refused, killed, and goes on where it stopped."""

from __future__ import annotations

import json
import os
import random
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

from pilotfish import EdgeServer
from pilotfish.cli import main
from pilotfish.lab.field import matrix
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.writable_run_file import has_begun
from tests.support.commands import command
from tests.support.daemons import free_port
from tests.support.measuring import PROMPTS, QUICK, answers, assert_whole, measure, wait_for_answers

# Going on


def forget_the_last_answer(out):
    with sqlite3.connect(out) as database:
        for table in ("rounds", "rtts"):
            database.execute(f"DELETE FROM {table} WHERE answer = (SELECT max(id) FROM answers)")
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
    assert "was begun with the drafter" in capsys.readouterr().err
    assert out.read_bytes() == before
    with Recorder.resume(out):
        assert main(["field", "measure", "--resume", "--out", str(out)]) == 65
        assert "is writing" in capsys.readouterr().err
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
    assert "have changed since the run began: kernel" in capsys.readouterr().err
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
        options = ["--prompts", prompts, "--repeat", 12, "--max-tokens", 24, "--windows", 2]
        assert measure(pair, address, out, *options, "--protocols", "greedy") == 0
    finally:
        thread.join()
        server.stop()
    result = answers(out)
    assert len(result) == 12 * len(PROMPTS)
    for answer in result:
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
    options = ["--prompts", prompts, "--repeat", 8, "--max-tokens", 24, "--windows", 2]
    options += ["--protocols", "greedy,coupled", "--patience", 1.5]
    code = measure(pair, address, out, *options)
    thread.join()
    err = capsys.readouterr().err
    assert code == 69
    assert "Trying again in 1 s" in err
    assert f"pilotfish field measure --resume --out {out}" in err
    assert err.strip().splitlines()[-1].startswith("pilotfish: The edge did not come back")
    with Run.open(out) as run:
        broken = [a for a in run.answers(finished=False, warm_up=True) if not a.finished]
    # none, if the edge went between two answers
    assert all("edge" in a.error for a in broken)
    done = len(answers(out))
    assert 3 <= done < 48
    with server:
        assert main(["field", "measure", "--resume", "--out", str(out)]) == 0
    assert len(answers(out)) == 48


def test_interrupted_it_says_how_to_go_on(pair, edge, out, prompts):
    options = ["--draft", pair.draft, "--edge", edge.endpoint, "--prompts", prompts, "--out", out]
    process = subprocess.Popen(
        command("field", "measure", *options, "--repeat", 1000),
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    while not (has_begun(out) and answers(out)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, reply = process.communicate(timeout=30)
    assert process.returncode == 130
    lines = reply.strip().splitlines()
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
    result = answers(out)
    assert done < {answer.cell for answer in result}
    assert len(result) == 2 * 40 * len(PROMPTS)


# Killed

MORE_LIVES = 20  # until it is killed in the midst of an answer


@pytest.mark.parametrize(
    ("lives", "repeat", "longest_s"),
    [(3, 12, 0.3), pytest.param(20, 60, 1.0, marks=pytest.mark.slow)],
)
def test_killed_at_random_it_loses_a_round_at_most(
    pair, edge, out, prompts, lives, repeat, longest_s
):
    """Every fifth time at any moment of its life, else while it measures."""
    chance = random.Random(int(os.environ.get("PILOTFISH_TEST_SEED", time.time_ns())))
    again = ["field", "measure", "--resume", "--out", str(out)]
    first = [*again, "--draft", str(pair.draft), "--edge", edge.endpoint, "--threads", "1"]
    first += ["--protocols", "greedy,coupled,stream", "--windows", "2,4", "--repeat", str(repeat)]
    first += ["--max-tokens", "16", "--warm-up", "0", "--prompts", str(prompts)]
    with Killable() as killable:
        life = 0
        while life < lives or (not broken_answers(out) and life < lives + MORE_LIVES):
            longest_s = 1.0 if life % 5 == 0 else 0.25 if life < lives else 0.02
            seen = killable.rounds_until_killed(
                again if has_begun(out) else first,
                chance.uniform(0.0, longest_s / 4 if life % 5 else longest_s),
                measuring=bool(life % 5),
            )
            missing = len(seen - recorded(out))
            assert missing <= 1, f"life {life}: {missing} rounds lost"
            assert recorded(out) <= killable.seen
            life += 1
        assert killable.kills == life, "a life ended by itself"
    assert main(again if has_begun(out) else first) == 0
    with Run.open(out) as run:
        items = list(run.answers())
        every = list(run.answers(finished=False))
        assert len(run.facts.starts) > lives * 3 / 5
    assert Counter(a.cell for a in items) == Counter(matrix.cells(run.facts.settings))
    finished = {answer.cell: answer for answer in items}
    for answer in items:
        assert_whole(answer)
    broken = [answer for answer in every if not answer.finished]
    assert broken
    for answer in broken:  # greedy decoding: it had has_begun what was answered in the end
        begun_ids = [token for round_ in answer.rounds for token in round_.tokens]
        ids = [token for round_ in finished[answer.cell].rounds for token in round_.tokens]
        assert begun_ids == ids[: len(begun_ids)]


def broken_answers(out: Path) -> list[Answer]:
    """Answers in whose midst it was killed; by chance there may be none."""
    if not has_begun(out):
        return []
    with Run.open(out) as run:
        return [answer for answer in run.answers(finished=False) if not answer.finished]


def recorded(out: Path) -> set[tuple[int, int]]:
    """Answer and number of every round in the file."""
    if not has_begun(out):
        return set()
    with Run.open(out) as run:
        every = run.answers(finished=False, warm_up=True)
        return {(answer.id, number) for answer in every for number in range(len(answer.rounds))}


class Killable:
    """`tests/killable.py`; ``seen`` is what its witness has told so far."""

    def __enter__(self) -> Killable:
        self._witness, info = os.pipe()
        os.set_blocking(self._witness, False)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.killable", str(info)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            pass_fds=[info],
        )
        os.close(info)
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
