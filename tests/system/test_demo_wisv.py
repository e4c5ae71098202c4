"""`pilotfish demo wisv` and the names of the default models, with the real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.cli.default_models import SHORT, drafter_folder


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_shows_both_uploads_and_what_was_forgiven() -> None:
    words = ["--questions", "1", "--max-tokens", "12", "--rtts", "0,60", "--json", "-"]
    done = subprocess.run(
        [sys.executable, "-m", "pilotfish", "demo", "wisv", "--threshold", "1", *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    figures = json.loads(done.stdout)
    assert done.stderr.startswith("The head")
    assert figures["verdict"].startswith("The head")
    greedy, near, far = figures["runs"]
    assert (greedy["protocol"], far["protocol"]) == ("greedy", "wisv-full")
    assert far["pings"] >= 1
    assert greedy["measured_rtt_ms"] is None  # no ping came before it
    assert near["protocol"] == "wisv-selective"  # by name, if the machine is too busy for 10 ms
    assert greedy["forgiven"] == 0
    assert near["text"] == far["text"]  # both uploads decide alike
    for run in (near, far):
        assert run["forgiven"] == len(run["forgiven_at"]) > 0
        assert run["rounds"] < greedy["rounds"]


@pytest.mark.slow
def test_the_commands_take_the_names_of_the_defaults() -> None:
    drafter = drafter_folder(Path(SHORT))
    with (
        EdgeServer("default", head="default", context=128, sessions=1) as edge,
        Device(drafter, edge.endpoint, context=128) as device,
    ):
        answer = device.generate("Hello", protocol="wisv-full", threshold=1.0, max_tokens=8)
    assert answer.protocol == "wisv-full"
    assert all(each.accepted == each.window for each in answer.rounds)
