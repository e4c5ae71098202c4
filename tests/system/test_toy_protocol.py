"""A protocol is one file: what it declares is in every place where users meet a protocol.

Nothing here names the toy's options and counters but the file itself and these tests.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import ConfigError
from pilotfish.base.settings import setting
from pilotfish.cli import main
from pilotfish.device_runtime.plan import Auto
from pilotfish.lab.field.run import Run
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, ProtocolOptions, RoundCounter, register
from pilotfish.wire.protocols.greedy import Greedy
from pilotfish.wire.request import OPTION_NAMES, Options, Request
from tests.conftest import Pair
from tests.support import web
from tests.support.daemons import free_port
from tests.support.serving import Serving, serving

PROMPT = [60, 2, 33]  # the tiny drafter says for a while what the target does
TOY = {"PILOTFISH_PROTOCOLS": "tests.support.toy_protocol"}


def command(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pilotfish", *map(str, words)],
        env={**os.environ, **TOY, "COLUMNS": "200", **variables},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def metrics_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def toy_edge(pair: Pair, metrics_port: int) -> Iterator[EdgeServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*next(iter(TOY.items())))
        with EdgeServer(pair.target, threads=1, metrics=metrics_port) as edge:
            yield edge


@pytest.fixture(scope="module")
def toy_service(pair: Pair, toy_edge: EdgeServer) -> Iterator[Serving]:
    with serving(pair.draft, toy_edge.endpoint, **TOY) as service:
        yield service


def ask(service: Serving, **wanted: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "pilotfish": wanted}
    return web.post(f"{service.url}/v1/completions", json=body, timeout=60.0)


@pytest.mark.parametrize("action", [("device", "run"), ("device", "serve"), ("field", "measure")])
def test_help_has_the_option(action: tuple[str, str]) -> None:
    stdout = command(*action, "--help").stdout
    assert "--at-most" in stdout
    assert "toy: tokens of a window to accept at most (128)" in stdout


def test_http_takes_the_option_and_tells_the_counters(
    toy_service: Serving, metrics_port: int, edge: EdgeServer, pair: Pair
) -> None:
    free, held = (
        ask(toy_service, protocol="toy", window=6, **more).json() for more in ({}, {"at_most": 1})
    )
    assert held["choices"] == free["choices"]  # the law is the target's all the same
    assert held["pilotfish"]["accepted"] <= held["pilotfish"]["rounds"]
    assert free["pilotfish"]["accepted"] > held["pilotfish"]["accepted"]
    assert 0 < free["pilotfish"]["odd"] <= free["pilotfish"]["accepted"]
    assert free["pilotfish"]["haste"] == 0.5
    with Device(pair.draft, edge.endpoint, threads=1) as other:  # without the toy
        assert "odd" not in other.generate(PROMPT, protocol="greedy", max_tokens=4).notes
    odd = free["pilotfish"]["odd"] + held["pilotfish"]["odd"]
    assert toy_service.metric('pilotfish_spec_decode_num_odd_tokens_total{protocol="toy"}') == odd
    assert toy_service.metric('pilotfish_spec_decode_haste_total{protocol="toy"}') > 0
    info = toy_service.get("/status").json()
    assert (info["odd"], info["haste"]) == (odd, 0.5)
    text = web.get(f"http://127.0.0.1:{metrics_port}/metrics").text
    assert f'pilotfish_edge_odd_tokens_total{{protocol="toy"}} {odd:.1f}' in text
    assert 'pilotfish_edge_haste_total{protocol="toy"}' in text


@pytest.mark.parametrize(
    "wanted",
    [
        {"protocol": "toy", "at_most": 129},
        {"protocol": "toy", "at_most": "all"},
        {"protocol": "greedy", "at_most": 3},
    ],
)
def test_http_refuses_what_makes_no_sense(toy_service: Serving, wanted: dict[str, Any]) -> None:
    answer = ask(toy_service, **wanted)
    assert answer.status_code == 400
    assert "at_most" in answer.text


def test_a_run_file_and_its_report_have_the_counters(
    pair: Pair, toy_edge: EdgeServer, tmp_path: Path
) -> None:
    out = tmp_path / "toy.pilotfish"
    measured = command(
        *("field", "measure", "--draft", pair.draft, "--edge", toy_edge.endpoint, "--threads", 1),
        *("--protocols", "greedy,toy", "--windows", 6, "--repeat", 1, "--warm-up", 0),
        *("--max-tokens", 24, "--at-most", 2, "--out", out, "--json", "-"),
    )
    assert measured.returncode == 0, measured.stderr
    options = {load["protocol"]: load for load in json.loads(measured.stdout)}
    assert options["toy"]["haste"] == 0.5
    assert (options["greedy"]["odd"], options["greedy"]["haste"]) == (None, None)
    assert "odd" in measured.stderr
    with sqlite3.connect(out) as database:
        noted = database.execute("SELECT notes FROM rounds WHERE protocol = 'toy'").fetchall()
    assert all({*json.loads(text)} == {"odd", "haste"} for (text,) in noted)
    with Run.open(out) as run:  # by a process that does not know the toy
        assert run.facts.settings.options == {"at_most": 2}
        rounds = [r for a in run.answers() for r in a.rounds if r.protocol == "toy"]
    assert 0 < sum(r.accepted for r in rounds) <= 2 * len(rounds)
    odd = sum(r.notes["odd"] for r in rounds) / sum(r.accepted for r in rounds)
    assert options["toy"]["odd"] == pytest.approx(odd)
    reported = command("field", "report", out, "--out", tmp_path / "page")
    assert reported.returncode == 0, reported.stderr
    page = (tmp_path / "page" / "report.html").read_text()
    for heading in ("of accepted, %", "odd", "haste a position", "at_most"):
        assert heading in page


class Other(Greedy):
    name = "other"


class Clashing(ProtocolOptions, frozen=True):
    tau: float = 0.5


class Shared(ProtocolOptions, frozen=True):
    window: int = 4


class Flagged(ProtocolOptions, frozen=True):
    patience: Annotated[int, setting("third: tokens", flag="third-patience")] = 0


class Taken(ProtocolOptions, frozen=True):
    patience: Annotated[int, setting("third: tokens", flag="threads")] = 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "greedy"}, "protocol greedy"),
        ({"name": "stream"}, "protocol stream"),
        ({"Options": Clashing}, "option tau"),
        ({"Options": Shared}, "request already has an option window"),
        ({"counters": (RoundCounter(name="forgiven", help="Of others."),)}, "counter forgiven"),
    ],
)
def test_no_two_protocols_share_a_name(changes: dict[str, Any], words: str) -> None:
    before = dict(PROTOCOL_REGISTRY)
    with pytest.raises(ValueError, match=words):
        register(type("Third", (Other,), changes)())
    assert before == PROTOCOL_REGISTRY


def test_keywords_are_the_fields_of_a_request_and_no_protocol_may_have_their_names() -> None:
    fields = {*signature(Request).parameters}
    assert {*Options.__annotations__} == fields - {"auto"} | {"schema"}
    neighbour = {"owner"}  # of `Device.stream`
    assert fields | {"schema", *signature(Auto).parameters} | neighbour == OPTION_NAMES


def test_a_flag_that_a_command_has_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PROTOCOL_REGISTRY, "third", type("Third", (Other,), {"Options": Taken})())
    assert main(["device", "run", "--help"]) == ConfigError.exit_code
    assert "--threads: the command has this flag" in capsys.readouterr().err


def test_an_option_of_another_protocol_is_named_as_it_was_written(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PROTOCOL_REGISTRY, "third", type("Third", (Other,), {"Options": Flagged})())
    words = ["device", "run", "x", "--draft", str(pair.draft), "--edge", "tcp://127.0.0.1:1"]
    assert main([*words, "--protocol", "tslt", "--third-patience", "2"]) == 64
    err = capsys.readouterr().err
    assert "--third-patience can only be used with --protocol third, or with auto if it may" in err


def test_a_module_of_protocols_that_is_not_there_is_named() -> None:
    done = command("device", "run", "--help", PILOTFISH_PROTOCOLS="no_such_module")
    assert done.returncode == ConfigError.exit_code
    assert done.stderr == (
        "pilotfish: PILOTFISH_PROTOCOLS names the module no_such_module, which fails: "
        "No module named 'no_such_module'\n"
    )
