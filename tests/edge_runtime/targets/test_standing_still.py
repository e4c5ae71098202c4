"""An edge that stood still itself holds that against none of its nodes: their answers lie there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish.edge_runtime.targets import remote
from pilotfish.edge_runtime.targets.remote import RemotePass, RemoteTarget, WakingClock
from pilotfish.engines.engine import Work
from tests.edge_runtime.targets.test_federation_average import tokens_of
from tests.support.federating import Cast, WorkerThread, write_list

LATE_S = 0.4
STOPPED_S = 0.75  # and no connection breaks

EDGE = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
from pilotfish.engines.engine import Work
from tests.support.federating import opened

with opened(Path(sys.argv[1]), Path(sys.argv[2])) as held:
    held.target.run(0, [Work(0, np.arange(2, 12, dtype=np.uint32), 1)])
    held.target.start(1, [Work(0, np.arange(2, 14, dtype=np.uint32), 1)])
    os.kill(os.getpid(), signal.SIGSTOP)
    found = []
    while not found:
        found = held.target.collect_scores()
        held.target.pause()
    print(json.dumps([str(found[0].error or ""), held.events("a"), held.events("b")]))
"""


@pytest.mark.parametrize("policy", ["wait", "drop", "fail"])
def test_no_worker_is_late_because_the_edge_was_stopped(
    cast: Cast, tmp_path: Path, policy: str
) -> None:
    settings = {"late": policy, "late_s": LATE_S, "give_up_s": LATE_S}
    with WorkerThread(cast.a) as a, WorkerThread(cast.b) as b:
        listed = [("a", a.endpoint), ("b", b.endpoint)]
        path = write_list(tmp_path / "w.toml", listed, **settings)
        command = [sys.executable, "-c", EDGE, path, cast.a]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as edge:
            _, status = os.waitpid(edge.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            time.sleep(STOPPED_S)
            edge.send_signal(signal.SIGCONT)
            info, _ = edge.communicate(timeout=60)
    assert info == '["", {}, {}]\n'


class Silent(RemoteTarget[RemotePass]):
    """A target whose nodes never answer."""

    def start(self, number: int, works: Sequence[Work]) -> None:
        self._passes[number] = RemotePass(number, list(works), self._clock.now_s)

    def cached(self, slot: int, tokens: NDArray[np.uint32], rows: int) -> int:
        raise AssertionError

    def clear(self, slot: int) -> None:
        raise AssertionError

    def _work(self, now_s: float) -> None:
        return

    def _deadlines(self) -> list[float]:
        return []

    def _timeout_at(self, remote_pass: RemotePass) -> float:
        return remote_pass.started_s + 10.0

    def _timeout_message(self, remote_pass: RemotePass, now_s: float) -> str:
        return "late"


class Hands:
    """Both clocks of a process, moved by hand."""

    def __init__(self) -> None:
        self.now_s, self.ran_s = 1e6, 0.0

    def monotonic(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return self.ran_s


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> Hands:
    result = Hands()
    monkeypatch.setattr(remote, "time", result)
    return result


@pytest.mark.parametrize("pause_s", [1.0, 5.0, 3600.0])
def test_a_pass_is_given_up_after_its_time_of_looking(hands: Hands, pause_s: float) -> None:
    target = Silent()
    target.start(1, [Work(0, tokens_of(1, 4), 1)])
    looked_s = 0.0
    while not target.collect_scores():
        if looked_s == 5.0:
            hands.now_s += pause_s  # suspended, paused with its machine, or starved
        hands.now_s += 0.25
        looked_s += 0.25
        due_s = target.due_s
        assert due_s is None or due_s <= 10.0
        assert looked_s < 11.0
    assert looked_s > 9.5


def test_an_edge_that_works_meanwhile_does_not_stand_still(hands: Hands) -> None:
    """What nodes say while stage 1 computes is read behind it: only their silence is late."""
    clock = WakingClock()
    begun_s = clock.update()
    for _ in range(5):
        hands.now_s += 2.0
        hands.ran_s += 1.9
        clock.update()
    assert clock.now_s == pytest.approx(begun_s + 10.0)
