"""A trial tells what a grammar does, and nothing of the machine; the clock gives no verdicts."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotfish.engines import grammar_trial as trial
from pilotfish.engines.engine_errors import GrammarBusyError, GrammarError
from pilotfish.engines.grammar import Grammars
from pilotfish.engines.grammar_trial import TOO_LONG, TRIAL, Trial
from pilotfish.speculation.logits_options import Grammar
from tests.support.bridged import vocabulary

FINE = Grammar("regex", "(ab|c){2}")
ENDLESS = Grammar("lark", "start: X0\n" + "".join(
    f"X{n}: X{n + 1}*\n" for n in range(3000)) + 'X3000: "a"')  # fmt: skip


@pytest.fixture
def tried() -> Iterator[Trial]:
    one = Trial()
    one.start()
    yield one
    one.end()


def stopped(one: Trial) -> int:
    """Let its process stand still, as in a suspended or an overloaded machine; returns its pid."""
    assert one._process is not None
    os.kill(one._process.pid, signal.SIGSTOP)
    return one._process.pid


def test_a_process_that_stands_still_says_nothing_of_the_grammar(tried: Trial) -> None:
    stopped(tried)
    tried.attempt(FINE)
    stopped(tried)
    tried.attempt(Grammar("json", '{"const": "' + "a" * 3000 + '"}'))


def test_one_that_stands_still_while_it_starts() -> None:
    one = Trial()
    try:
        with one._lock:
            one._running_process()
        stopped(one)
        begun_s = time.process_time()
        one.attempt(FINE)
        assert time.process_time() - begun_s < 1.0
        assert one._process is not None
    finally:
        one.end()


def test_one_that_stands_still_ends_with_its_parent() -> None:
    code = (
        "import os, signal\nfrom pilotfish.engines.grammar_trial import TRIAL\nTRIAL.start()\n"
        "os.kill(TRIAL._process.pid, signal.SIGSTOP)\n"
        "print(TRIAL._process.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
    )
    parent = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    left, until_s = Path(f"/proc/{int(parent.stdout)}/stat"), time.monotonic() + 30.0
    while left.exists() and left.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until_s, "it is left"
        time.sleep(0.02)


def test_a_long_grammar_for_a_process_that_does_not_read(tried: Trial) -> None:
    """It fills the pipe; nobody waits for that without end."""
    stopped(tried)
    with pytest.raises(GrammarError, match="begins with a text of more than"):
        tried.attempt(Grammar("regex", "a" * 60_000 + "b" * 5_000))


def test_a_process_that_somebody_ended(tried: Trial) -> None:
    for _ in range(2):
        assert tried._process is not None
        os.kill(tried._process.pid, signal.SIGKILL)
        tried.attempt(FINE)


def test_one_that_is_ended_in_the_middle(tried: Trial) -> None:
    pid = stopped(tried)
    threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()
    tried.attempt(FINE)


def test_a_machine_that_is_too_busy(tried: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is tried: nothing is kept of it."""
    monkeypatch.setattr(trial, "_STALLED_S", 0.0)  # no process computes as fast as that
    monkeypatch.setattr(trial, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(trial, "TRIAL", tried)
    with pytest.raises(GrammarBusyError, match="try again"):
        tried.attempt(FINE)
    monkeypatch.undo()
    tried.attempt(FINE)


def test_a_slow_machine_is_waited_for(tried: Trial) -> None:
    """As long as the process computes: here in turns of 20 ms, of which it stands still for 180."""
    assert tried._process is not None
    pid, over = tried._process.pid, threading.Event()

    def brake() -> None:
        while not over.is_set():
            for number, pause_s in ((signal.SIGSTOP, 0.18), (signal.SIGCONT, 0.02)):
                os.kill(pid, number)
                time.sleep(pause_s)

    braking = threading.Thread(target=brake)
    braking.start()
    try:
        tried.attempt(Grammar("json", '{"type": "array", "prefixItems": [' + ", ".join(
            f'{{"type": "integer", "minimum": {n}, "maximum": {10**9 + 7 * n}}}' for n in range(500)
        ) + "]}"))  # fmt: skip
        assert tried._process.pid == pid
    finally:
        over.set()
        braking.join()


@pytest.mark.parametrize("mib", [200, 300, 400])
def test_a_process_that_is_full_is_replaced(tried: Trial, mib: int) -> None:
    """Of earlier grammars, say: it has no room for a stack, or for what it makes."""
    assert tried._process is not None
    resource.prlimit(tried._process.pid, resource.RLIMIT_AS, (mib << 20, 1 << 30))
    tried.attempt(FINE)


@pytest.fixture
def small() -> Grammars:
    return vocabulary(["a", "b", "c"], "<end>").grammars


def test_what_a_grammar_does_itself_is_kept(small: Grammars) -> None:
    for grammar, said in ((ENDLESS, TOO_LONG), (Grammar("regex", "("), "cannot be used")):
        for _ in range(2):
            with pytest.raises(GrammarError, match=said):
                small.constraint(grammar)
        assert said in small.refusal(grammar)
    begun_s = TRIAL.cpu_s
    with pytest.raises(GrammarError):
        small.constraint(ENDLESS)
    assert begun_s == TRIAL.cpu_s  # not tried again


def test_what_the_machine_does_is_not(small: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "_STALLED_S", 0.0)
    monkeypatch.setattr(trial, "_PATIENCE_S", 0.0)
    with pytest.raises(GrammarBusyError):
        small.constraint(FINE)
    assert small.refusal(FINE) == ""
    monkeypatch.undo()
    small.constraint(FINE)


def test_a_process_that_cannot_start(small: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """No descriptors, say: `GrammarBusyError`, and nothing is kept."""
    TRIAL.end()
    monkeypatch.setattr(trial.sys, "executable", "/nonexistent")
    with pytest.raises(GrammarBusyError, match="cannot start"):
        small.constraint(Grammar("regex", "ab"))
    monkeypatch.undo()
    small.constraint(Grammar("regex", "ab"))


def test_no_room_for_a_deep_stack(small: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    small.constraint(FINE)
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == "grammar":
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(GrammarBusyError, match="no threads left"):
        small.constraint(FINE)
    monkeypatch.undo()
    small.constraint(FINE)
