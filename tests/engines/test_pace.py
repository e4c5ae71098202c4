"""Pass times are measured once and kept for life: what stops the process must not be in them."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from pilotfish.engines.engine import open_engine
from pilotfish.engines.pass_times import least_times, pass_times, time_interleaved

WIDTHS = (1, 2, 4, 8, 16, 32)
LINES = {  # seconds of a pass: a + b · tokens
    "quick": (0.001, 0.0001),
    "bound by memory": (0.05, 0.0002),
    "bound by arithmetic": (0.002, 0.04),
    "slow": (0.5, 0.03),
}


class Machine:
    """Passes whose seconds are known; one of them, by its number, meets a pause."""

    def __init__(self, line: tuple[float, float], paused: int | None, pause_s: float) -> None:
        self.line, self.paused, self.pause_s = line, paused, pause_s
        self.passes = 0
        self.known: set[int] = set()

    def alone_s(self, width: int) -> float:
        return self.line[0] + self.line[1] * width

    def pass_s(self, width: int) -> float:
        taken_s = self.alone_s(width) * (1.0 if width in self.known else 1.3)
        self.known.add(width)
        if self.passes == self.paused:
            taken_s += self.pause_s
        self.passes += 1
        return taken_s


@pytest.mark.parametrize("pause_s", [1.0, 5.0])
@pytest.mark.parametrize("line", LINES.values(), ids=[*LINES])
@pytest.mark.parametrize("widths", [(1,), WIDTHS[:3], WIDTHS], ids=len)
def test_a_pause_in_any_pass_is_not_in_the_times(widths, line, pause_s):
    quiet = Machine(line, None, 0.0)
    least_times(quiet.pass_s, widths, 512)
    for paused in range(quiet.passes):
        machine = Machine(line, paused, pause_s)
        for width, taken_s in least_times(machine.pass_s, widths, 512).items():
            assert taken_s <= 2.0 * machine.alone_s(width), (paused, width)
        assert machine.passes <= quiet.passes + 6  # it costs a few


def test_a_slow_model_is_timed_once():
    machine = Machine(LINES["slow"], None, 0.0)
    assert list(least_times(machine.pass_s, WIDTHS, 512)) == [*WIDTHS]
    assert machine.passes == len(WIDTHS)


def test_wider_passes_never_take_less():
    taken_s = dict(zip(WIDTHS, (0.2, 0.19, 0.21, 0.2, 0.22, 0.21), strict=True))
    info = least_times(taken_s.__getitem__, WIDTHS, 512)
    assert [*info.values()] == sorted(info.values())
    assert 64 not in least_times(lambda width: 0.1, (*WIDTHS, 64), 32)


@pytest.mark.parametrize("paused", [0, 1, 5, 20, 71])
def test_drafters_that_are_tried_in_turns_are_not_compared_by_a_pause(paused):
    made = 0

    def timer(taken_s: float):
        def timed() -> float:
            nonlocal made
            made += 1
            return taken_s + (5.0 if made - 1 == paused else 0.0)

        return timed

    assert time_interleaved([timer(0.01), timer(0.012)]) == pytest.approx([0.01, 0.012])


def test_passes_are_timed_by_the_clock_that_the_caller_names(pair):
    engine = open_engine(pair.target, threads=1)
    assert pass_times(engine, [1, 4], clock=itertools.count(0.0, 2.0).__next__) == {1: 2.0, 4: 2.0}


STOPPED = """
import os, signal, time
from pilotfish.engines.pass_times import least_times

stops = [{at}]

def pass_s(width, made=[0]):
    begun_s = time.perf_counter()
    made[0] += 1
    if made[0] in stops:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.004 + 0.0002 * width)
    return time.perf_counter() - begun_s

print(max(least_times(pass_s, (1, 2, 4, 8, 16, 32), 512).values()))
"""


@pytest.mark.parametrize("at", [1, 6, 9])
def test_a_process_that_is_stopped_while_it_measures_tells_the_times_of_one_that_is_not(at):
    command = [sys.executable, "-c", STOPPED.format(at=at)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as measuring:
        _, status = os.waitpid(measuring.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        time.sleep(1.2)
        measuring.send_signal(signal.SIGCONT)
        info, _ = measuring.communicate(timeout=60)
    assert float(info) < 0.5
