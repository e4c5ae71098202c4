"""A run that was really measured, and its report."""

from __future__ import annotations

import json

import pytest

from pilotfish.cli import main

HOSTILE = '<script>alert("x")</script> & <img src="http://evil.example/x.png"> $\\frac{'


@pytest.fixture(scope="session")
def walk(pair, edge, tmp_path_factory):
    """A run that was really measured, with every kind of protocol in it."""
    path = tmp_path_factory.mktemp("measured") / "walk.pilotfish"
    prompts = path.with_name("prompts.txt")
    prompts.write_text("abc\nbcd ef\n")
    options = ["--draft", pair.draft, "--edge", edge.endpoint, "--threads", 1, "--out", path]
    options += ["--prompts", prompts, "--protocols", "greedy,dssd,stream,local,auto"]
    options += ["--windows", "2,4", "--repeat", 2, "--max-tokens", 20, "--note", HOSTILE]
    assert main(["field", "measure", *map(str, options)]) == 0
    return path


@pytest.fixture(scope="session")
def report(walk, tmp_path_factory):
    """The folder of that run's report, and its figures."""
    folder = tmp_path_factory.mktemp("report")
    result = folder / "figures.json"
    assert main(["field", "report", str(walk), "--out", str(folder), "--json", str(result)]) == 0
    return folder, json.loads(result.read_text())
