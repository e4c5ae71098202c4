"""A small test of an option at each place that takes it, to be copied for a new option.

The option is `tau` of `adaptive`. The fixtures are in `tests/conftest.py`: `pair` (the folders of a
tiny drafter and its target), `edge` (an edge with the target, on loopback), `device` (a device on
this edge) and `service` (a `pilotfish device serve` on this edge).

An option without a counter shows in the number of accepted tokens: `each.accepted` of a round in
Python, "accepted_per_round" of `--json`, "accepted" of the object `pilotfish` over HTTP.

The values must differ from the option's default: a flag with the default's value is no option that
another protocol could refuse.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import UnsupportedError
from pilotfish.cli import main
from tests.conftest import Pair
from tests.support import web
from tests.support.serving import Serving, serving

PROMPT = [60, 2, 33]  # token ids; most of the drafts after this prompt are accepted
OPTIONS: dict[str, Any] = {"protocol": "adaptive", "temperature": 1.0, "seed": 3, "max_tokens": 40}


def command(pair: Pair, edge: EdgeServer, *words: str) -> list[str]:
    ends = ["--draft", str(pair.draft), "--edge", edge.endpoint, "--threads", "1"]
    sampling = ["--protocol", "adaptive", "--temperature", "1", "--max-tokens", "12"]
    return ["device", "run", "abc", *ends, *sampling, *words, "--json", "-"]


def test_python_takes_the_option(device: Device) -> None:
    strict, relaxed = (device.generate(PROMPT, tau=tau, **OPTIONS) for tau in (0.0, 1.0))
    assert sum(each.notes["deviation"] for each in strict.rounds) == pytest.approx(0.0, abs=1e-6)
    assert sum(each.notes["deviation"] for each in relaxed.rounds) > 0.1
    assert [each.accepted for each in strict.rounds] != [each.accepted for each in relaxed.rounds]


def test_the_command_has_the_flag(
    pair: Pair, edge: EdgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(pair, edge, "--tau", "0")) == 0
    assert json.loads(capsys.readouterr().out)["deviation"] == pytest.approx(0.0, abs=1e-6)


def ask(service: Serving, **options: Any) -> dict[str, Any]:
    """Return the object `pilotfish` of an answer."""
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1}
    body["pilotfish"] = options
    answer = web.post(f"{service.url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    figures: dict[str, Any] = answer.json()["pilotfish"]
    return figures


def test_http_takes_the_option(service: Serving) -> None:
    answer = ask(service, protocol="adaptive", tau=0)
    assert answer["deviation"] == pytest.approx(0.0, abs=1e-6)


def test_a_service_takes_the_option_from_its_toml_file(
    pair: Pair, edge: EdgeServer, tmp_path: Path
) -> None:
    config = tmp_path / "device.toml"
    config.write_text('protocol = "adaptive"\ntau = 0.0\n')
    with serving(pair.draft, edge.endpoint, "--config", str(config)) as service:
        answer = ask(service)
    assert answer["protocol"] == "adaptive"
    assert answer["deviation"] == pytest.approx(0.0, abs=1e-6)


def test_a_value_out_of_bounds_is_refused(
    device: Device, pair: Pair, edge: EdgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnsupportedError, match="tau"):
        device.generate(PROMPT, tau=1.5, **OPTIONS)
    with pytest.raises(SystemExit):
        main(command(pair, edge, "--tau", "1.5"))
    assert "--tau: 1.5 is not between" in capsys.readouterr().err


def test_the_command_refuses_the_flag_of_another_protocol(
    pair: Pair, edge: EdgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command(pair, edge, "--tau", "0")
    words[words.index("adaptive")] = "tslt"
    assert main(words) == 64
    assert "--tau can only be used with --protocol adaptive" in capsys.readouterr().err
