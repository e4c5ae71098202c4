"""Processes of devices that die, stop or hang: the load ends, and says which devices and why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from pilotfish.base.errors import EdgeLostError, InternalError, PairMismatchError
from pilotfish.lab.field.load.fleet import Fleet, Period, split_devices
from pilotfish.lab.field.load.record import Record, RecordedAnswer
from pilotfish.lab.field.load.worker import Devices
from tests.lab.field.load.answering import ANSWER, BUSY, TOKEN, answering

MINUTE = Period(warm_up_s=0.0, for_s=60.0, answers=1)


def clients(url: str, **changes: object) -> Devices:
    """Clients of a service, without their numbers."""
    usual = {"numbers": [], "seed": 0, "think_s": 0.01, "rate": None, "services": [url]}
    return Devices(**{**usual, "prompts": ["Why?", "How?"], "max_tokens": 8, **changes})


def children() -> list[int]:
    process = os.getpid()
    text = Path(f"/proc/{process}/task/{process}/children").read_text()
    commands = {int(each): Path(f"/proc/{each}/cmdline").read_bytes() for each in text.split()}
    return [each for each, command in commands.items() if b"load.worker" in command]


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGSTOP, "no sign of life")]
)
def test_a_process_that_is_killed_or_stopped_ends_the_load(number, words):
    with answering(ANSWER) as url, Fleet(split_devices(clients(url), 4, 2), silence_s=2.0) as fleet:
        second = children()[-1]
        threading.Timer(0.5, os.kill, (second, number)).start()
        began_s = time.monotonic()
        with pytest.raises(EdgeLostError, match=f"devices 2 to 3.*{words}"):
            fleet.measure(MINUTE)
        assert time.monotonic() - began_s < 10.0
    assert not children()


def test_a_device_that_fails_unforeseen_ends_the_load():
    """Without prompts, the order of the prompts raises an `IndexError` in the device's thread."""
    with (
        answering(ANSWER) as url,
        Fleet([clients(url, numbers=[7], prompts=[])]) as fleet,
        pytest.raises(InternalError, match=r"Device 7 has failed: IndexError"),
    ):
        fleet.measure(MINUTE)


def test_an_edge_with_another_target_than_the_recorded_ends_the_load(edge, tmp_path):
    ids, none = np.arange(8, dtype=np.uint32), np.empty((0, 8), np.uint32)
    answer = RecordedAnswer(ids, ids, none, none.astype(np.float32))
    Record([answer]).save(tmp_path / "drafts.npz")
    devices = Devices(
        numbers=[7],
        seed=0,
        think_s=0.01,
        rate=None,
        edge=edge.endpoint,
        digest="another",
        record=str(tmp_path / "drafts.npz"),
        options={"protocol": "stream"},
    )
    with Fleet([devices]) as fleet, pytest.raises(PairMismatchError, match="another target"):
        fleet.measure(MINUTE)


def test_a_device_that_waits_for_ever_ends_the_load():
    """The service sends comments, but no token, so its connection is never silent."""
    with (
        answering(b": wait\n\n" * 1000, pause_s=0.05) as url,
        Fleet([clients(url, numbers=[3], token_wait_s=1.0)]) as fleet,
        pytest.raises(EdgeLostError, match="device 3 got no token for 1 s"),
    ):
        fleet.measure(MINUTE)


def test_an_edge_that_refuses_everything_ends_the_load_with_the_first_reason():
    with (
        answering(BUSY, status=429) as url,
        Fleet(split_devices(clients(url), 8, 1)) as fleet,
        pytest.raises(EdgeLostError, match=r"429.*no room"),
    ):
        fleet.measure(Period(warm_up_s=1.0, for_s=0.1, answers=1))


def test_errors_of_the_warm_up_do_not_count():
    """The service refuses for a second, then answers."""
    with answering(ANSWER, refuse_s=1.2) as url, Fleet(split_devices(clients(url), 8, 1)) as fleet:
        measured = fleet.measure(Period(warm_up_s=2.5, for_s=0.5, answers=5))
    assert len(measured.answers) >= 5
    assert not any(answer.error for answer in measured.answers)
    assert measured.warm_up_errors >= 8
    assert "503" in measured.first_error


@pytest.mark.parametrize("for_s", [30.0, 1.4])
def test_an_edge_that_dies_ends_the_load_though_it_has_answered(for_s):
    """In the middle, or shortly before the measured time is over."""
    with (
        answering(ANSWER, serve_s=1.5) as url,
        Fleet(split_devices(clients(url), 8, 1), lost_s=2.0) as fleet,
        pytest.raises(EdgeLostError, match=r"none has ended well since.*503"),
    ):
        fleet.measure(Period(warm_up_s=0.0, for_s=for_s, answers=1))


def test_a_single_device_whose_answers_fail_slowly_ends_the_load():
    """Three answers, each of which ends before it is complete, and long before ten have failed."""
    with (
        answering(TOKEN, pause_s=0.5) as url,
        Fleet([clients(url, numbers=[0])], lost_s=0.25) as fleet,
        pytest.raises(EdgeLostError, match=r"^[34] answers have failed.*ended before"),
    ):
        fleet.measure(MINUTE)


def test_an_overloaded_edge_is_too_slow_and_not_lost():
    """It answers one question at a time, in 0.4 s, and refuses the seven others."""
    with (
        answering(ANSWER, pause_s=0.05, lanes=1) as url,
        Fleet(split_devices(clients(url), 8, 1), lost_s=1.0) as fleet,
    ):
        measured = fleet.measure(Period(warm_up_s=0.0, for_s=30.0, answers=1))
    assert sum(bool(answer.error) for answer in measured.answers) >= 7
    assert any(not answer.error for answer in measured.answers)


def test_a_load_whose_parent_is_gone_leaves_no_process():
    """The parent is killed while the devices wait for an answer that does not come."""
    with answering(b"", pause_s=60.0) as url:
        program = (
            "from tests.lab.field.load.test_fleet import *\n"
            f"with Fleet([clients({url!r}, numbers=[0])]) as fleet:\n"
            "    print(children()[0], flush=True)\n"
            "    fleet.measure(Period(warm_up_s=0.0, for_s=0.1, answers=0))\n"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(1.0)  # the measured time is over, and the process waits for the answer
        parent.kill()
        parent.wait()
        end_s = time.monotonic() + 10.0
        while Path(f"/proc/{child}").exists():
            assert time.monotonic() < end_s
            time.sleep(0.05)
        parent.stdout.close()
