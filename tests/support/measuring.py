"""A run of `field measure`, as a user starts it, and what is in its file."""

from __future__ import annotations

import time

from pilotfish.cli import main
from pilotfish.field.recording import begun
from pilotfish.field.run import Run

PROMPTS = ("abc", "bcd ef", "c")
QUICK = ["--protocols", "greedy,stream", "--windows", "2", "--repeat", "2", "--max-tokens", "8"]


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


def wait_for_answers(out, count):
    """Until a run has so many answers that count; for a minute."""
    patience = time.monotonic() + 60
    while time.monotonic() < patience and not (begun(out) and len(answers(out)) >= count):
        time.sleep(0.01)
