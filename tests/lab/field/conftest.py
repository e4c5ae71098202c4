"""A run that was really measured, and its report; a run file made by hand."""

from __future__ import annotations

import json

import pytest

from pilotfish.cli import main
from pilotfish.lab.field.recording import Recorder
from tests.support.made_runs import FACTS, LINK, a_round, requests

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


@pytest.fixture
def path(tmp_path):
    return tmp_path / "walk.pilotfish"


@pytest.fixture
def written(path):
    """A run file with three finished answers and one that was cut off after its second round."""
    with Recorder.create(path, FACTS) as recorder:
        for repeat in range(4):
            number = recorder.begin(requests(repeat=repeat))
            for i in range(6 if repeat < 3 else 2):
                recorder.add_round(number, i, 0.1 * i, a_round(i))
            if repeat < 3:
                recorder.end(number, finished=True, tokens=18, total_s=0.6, link=LINK)
    return path
