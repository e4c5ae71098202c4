"""The axes of `field measure`: options with several values, and an emulated link."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import suppress
from itertools import pairwise

import pytest

from pilotfish.base.settings import settings as settings_of
from pilotfish.cli import main
from pilotfish.emulation.emulator import Conditions
from pilotfish.lab.field import matrix
from pilotfish.lab.field.axes import all_axes, format_point
from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.writable_run_file import has_begun
from pilotfish.wire.protocols import option_types
from pilotfish.wire.request import Request
from tests.support.measuring import PROMPTS, answers, assert_whole, measure


def configured(**values):
    return [str(c) for c in matrix.configurations(MatrixSettings(prompts=PROMPTS, **values))]


def test_every_option_of_every_protocol_is_an_axis():
    axes = all_axes()
    for kind in option_types():
        for option in settings_of(kind):
            assert axes[option.name].kind == "protocol"
    papers = {"draft_top_k", "expansion", "top_k", "top_p", "temperature", "draft_temperature"}
    assert papers | {"draft_top_p", "tau", "lambdas", "hidden", "threshold"} <= axes.keys()
    assert {"rtt_s", "up_bps", "down_bps", "jitter_s"} <= axes.keys()
    owned = {option.name for kind in (Request, Conditions) for option in settings_of(kind)}
    assert {name for name, axis in axes.items() if axis.kind != "protocol"} <= owned


def test_an_axis_multiplies_the_protocols_that_have_it():
    listed = configured(
        protocols=("tslt", "adaptive", "stream"),
        windows=(4, 8),
        varied={"draft_top_k": (16, 320), "tau": (0.0, 0.4), "rtt_s": (0.0, 0.02)},
    )
    assert Counter(name.split()[0] for name in listed) == {"tslt": 8, "adaptive": 16, "stream": 2}
    assert "adaptive γ=8 draft-top-k 320 tau 0.4 rtt 20ms" in listed
    assert "stream rtt 0ms" in listed
    assert len(set(listed)) == len(listed)


@pytest.mark.parametrize("name", ["draft_top_k", "draft_top_p", "draft_temperature"])
def test_the_drafters_sampling_is_no_axis_of_protocols_without_sampling(name):
    axis = all_axes()[name]
    assert not any(axis.applies(protocol) for protocol in ("greedy", "wisv-full", "stream"))
    assert all(axis.applies(protocol) for protocol in ("tslt", "tree", "dssd", "coupled", "auto"))


def test_an_expansion_takes_the_place_of_windows():
    protocols = ("tslt", "tree")
    varied = configured(protocols=protocols, windows=(2, 4), varied={"expansion": ((2, 2), (4, 1))})
    assert varied == ["tslt γ=2", "tslt γ=4", "tree expansion 2,2", "tree expansion 4,1"]
    single = configured(protocols=protocols, windows=(2,), options={"expansion": [2, 2]})
    assert single == ["tslt γ=2", "tree"]


def test_links_are_measured_one_after_the_other_in_each_repeat():
    settings = MatrixSettings(
        prompts=PROMPTS,
        protocols=("greedy", "stream"),
        windows=(2,),
        repeat=3,
        varied={"rtt_s": (0.0, 0.01, 0.02)},
    )
    order = list(matrix.cells(settings))
    assert len(order) == len(set(order)) == 2 * 3 * len(PROMPTS) * 3
    links = [dict(cell.configuration.point)["rtt_s"] for cell in order]
    changes = sum(before != after for before, after in pairwise(links))
    assert changes <= 3 * 3 - 1
    assert {matrix.conditions(settings, cell.configuration).rtt_s for cell in order} == {*links}


def test_values_are_written_as_on_the_command_line():
    values = {"rtt_s": 0.0205, "up_bps": 10e6, "lambdas": (3.0, 0.3, 0.4), "hidden": "int8"}
    written = format_point(values.items())
    assert written == "rtt 20.5ms up 10mbit lambdas 3.0,0.3,0.4 hidden int8"


@pytest.fixture
def axes_run(prompts):
    """Options of a run with axes of each kind, over an emulated link."""
    options = ["--prompts", prompts, "--protocols", "tslt,adaptive,stream", "--windows", 2]
    options += ["--temperature", 1, "--draft-top-k", "2,5", "--tau", "0,0.5", "--rtt", "0,3"]
    return [*options, "--up", "50mbit", "--repeat", 1, "--max-tokens", 6, "--warm-up", 0]


def test_a_run_with_axes_is_measured_told_and_gone_on_with(
    pair, edge, out, axes_run, capsys, caplog
):
    assert measure(pair, edge.endpoint, out, *axes_run, "--json", "-") == 0
    # the run itself changes the link, which is no loss of it
    assert not [r for r in caplog.records if r.levelname == "WARNING" and "device" in r.name]
    captured = capsys.readouterr()
    table = " ".join(captured.err.split())
    for heading in ("× stream", "AAL", "B up", "B down", "T_comm", "rounds"):
        assert heading in table
    assert "The link was emulated: up 50mbit" in table
    rows = json.loads(captured.out)
    assert len(rows) == 2 * (2 + 4 + 1)
    k = {
        row["draft_top_k"]: row["up_bytes_per_round"]
        for row in rows
        if row["protocol"] == "tslt" and row["rtt_s"] == 0
    }
    assert k[2] < k[5]
    assert all(row["comm_ms"] > 2.5 for row in rows if row["rtt_s"] and row["window"])
    assert all(row["speedup"] == 1.0 for row in rows if row["protocol"] == "stream")
    assert all(row["speedup"] > 0 for row in rows)
    with Run.open(out) as run:
        facts, result = run.facts, list(run.answers())
    assert facts.edge == edge.endpoint
    assert facts.settings.link == {"up_bps": 50e6}
    assert facts.settings.varied["rtt_s"] == (0.0, 0.003)
    assert Counter(a.cell for a in result) == Counter(matrix.cells(facts.settings))
    for answer in result:
        assert_whole(answer)
        assert answer.link.rtt.value >= dict(answer.point)["rtt_s"]
    assert measure(pair, edge.endpoint, out, "--resume", *axes_run) == 0
    assert len(answers(out)) == len(result)
    assert main(["field", "measure", "--resume", "--out", str(out), "--rtt", "0,4"]) == 65
    assert "--rtt 0.0,0.003, not 0.0,0.004" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--protocols", "greedy,stream", "--tau", "0,0.5"], "--tau can only .* adaptive, but"),
        (["--protocols", "greedy", "--expansion", "2,2"], "--expansion can only .* tree, but"),
        (["--protocols", "stream,local", "--draft-top-k", "1,2"], "--draft-top-k can only"),
        (["--protocols", "local", "--rtt", "1,2"], "--rtt can only"),
        (["--protocols", "adaptive", "--temperature", "0,1"], "adaptive softens"),
        (["--protocols", "tree", "--expansion", "2,0"], "expansion must be"),
        (["--protocols", "coupled", "--loss", "0.1,1.5"], "100%"),
        (["--protocols", "wisv-full", "--hidden", "int8,int9"], "int9"),
        (["--temperature", "0,x"], "invalid number value: '0,x'"),
        (["--protocols", "tree", "--expansion", "2,x"], "invalid expansion value: '2,x'"),
    ],
)
def test_what_a_protocol_does_not_have_is_refused_by_name(pair, edge, out, capsys, options, words):
    with suppress(SystemExit):  # argparse refuses values that no option has
        assert measure(pair, edge.endpoint, out, *options) == 64
    assert re.search(words, capsys.readouterr().err)
    assert not has_begun(out)


def test_the_report_tells_axes_and_link(pair, edge, out, axes_run, tmp_path):
    assert measure(pair, edge.endpoint, out, *axes_run) == 0
    folder = tmp_path / "report"
    assert main(["field", "report", str(out), "--out", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "emulated link" in page
    assert "adaptive γ=2 draft-top-k 5 tau 0.5 rtt 3ms" in page
    assert "rtt 0ms rtt 3ms" in page
