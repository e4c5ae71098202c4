"""Names with an address of either family, or of both, lead to an edge."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from pilotfish.wire.link import attempts
from pilotfish.wire.link.attempts import DualStack
from tests.support.set_clock import SetClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    clock = SetClock()
    monkeypatch.setattr(attempts, "time", clock)
    return clock


def test_families_take_turns_and_pause_after_both(clock: SetClock) -> None:
    stack, families, pauses = DualStack("tcp://edge.example:7077"), [], []
    families.append(stack.ipv6)
    for _ in range(9):
        stack.note_failed()
        began_s = clock.now_s
        while not stack.due:
            clock.now_s += 0.05
        pauses.append(round(clock.now_s - began_s, 2))
        families.append(stack.switch_family())
    assert families == [False, True] * 5
    assert pauses[::2] == [0.0] * 5
    assert pauses[1::2] == pytest.approx([0.1, 0.2, 0.4, 0.8], abs=0.06)
    for _ in range(9):
        stack.note_failed()
        began_s = clock.now_s
        while not stack.due:
            clock.now_s += 0.05
        assert clock.now_s - began_s < 1.1
        stack.switch_family()


def test_more_failures_of_one_family_do_not_put_off_the_other(clock: SetClock) -> None:
    stack = DualStack("tcp://edge.example:7077")
    stack.note_failed()
    stack.switch_family()
    stack.note_failed()
    clock.now_s += 0.09
    stack.note_failed()
    clock.now_s += 0.02
    assert stack.due


def test_a_family_that_led_somewhere_stays_until_it_fails(clock: SetClock) -> None:
    stack = DualStack("tcp://edge.example:7077")
    stack.note_failed()
    assert stack.switch_family()
    stack.note_connected()
    clock.now_s += 3600
    assert not stack.due
    assert stack.switch_family()
    stack.note_failed()
    assert stack.due
    assert not stack.switch_family()


@pytest.mark.parametrize(
    ("endpoint", "ipv6"),
    [
        ("tcp://127.0.0.1:7077", False),
        ("tcp://[::1]:7077", True),
        ("tcp://[fe80::1%eth0]:7077", True),
        ("ipc:///run/edge", False),
        ("inproc://edge", False),
    ],
)
def test_an_address_keeps_its_family(clock: SetClock, endpoint: str, ipv6: bool) -> None:
    stack = DualStack(endpoint)
    for _ in range(3):
        stack.note_failed()
        clock.now_s += 3600
        assert not stack.due
        assert stack.switch_family() is ipv6


_IN_A_NETWORK_OF_ITS_OWN = ["unshare", "--mount", "--net"]


def test_names_lead_to_edges_of_either_family() -> None:
    alone = subprocess.run([*_IN_A_NETWORK_OF_ITS_OWN, "true"], capture_output=True, check=False)
    if alone.returncode != 0 or shutil.which("ip") is None:
        pytest.skip("a network of one's own takes root, unshare and ip")
    command = [*_IN_A_NETWORK_OF_ITS_OWN, sys.executable, "-m", "tests.support.named_edges"]
    ran = subprocess.run(command, capture_output=True, check=True, timeout=60)
    for name, host, seconds in json.loads(ran.stdout):
        if name == "none.test":
            assert seconds is None
        elif name == "moves.test":
            assert seconds is not None
            assert seconds < 2.5
        else:
            assert seconds is not None, (name, host)
            assert seconds < 0.5, (name, host)
