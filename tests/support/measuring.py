"""Run `field measure` as a user does, and read its file."""

from __future__ import annotations

import time

from pilotfish.cli import main
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.writable_run_file import has_begun

PROMPTS = ("abc", "bcd ef", "c")
QUICK = ["--protocols", "greedy,stream", "--windows", "2", "--repeat", "2", "--max-tokens", "8"]


def measure(pair, address, out, *more):
    """Run it on the tiny pair; returns the exit code."""
    options = ["--draft", pair.draft, "--edge", address, "--threads", 1, "--out", out, *more]
    return main(["field", "measure", *map(str, options)])


def answers(out, **kind):
    with Run.open(out) as run:
        return list(run.answers(**kind))


def assert_whole(answer):
    """Assert that a finished answer's rounds follow each other and add up to its tokens."""
    position = answer.prompt_tokens
    for round_ in answer.rounds:
        assert round_.start == position
        position += len(round_.tokens)
    assert position - answer.prompt_tokens == answer.tokens > 0
    assert answer.at_s == sorted(answer.at_s)


def wait_for_answers(out, count):
    """Wait until a run has so many answers that count, up to a minute."""
    patience = time.monotonic() + 60
    while time.monotonic() < patience and not (has_begun(out) and len(answers(out)) >= count):
        time.sleep(0.01)
