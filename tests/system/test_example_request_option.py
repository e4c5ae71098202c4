"""A small test of an option that every request has, at each place that takes it, to be copied.

The option is `min_p`: at its value 1 only the likeliest token is left, so that a sampled text is
the greedy one. For an option of a protocol copy `test_example_option.py`, which also describes the
fixtures.
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

PROMPT = [60, 2, 33]  # token ids


@pytest.mark.parametrize("protocol", ["stream", "coupled", "tslt", "local"])
def test_python_takes_the_option(device: Device, protocol: str) -> None:
    wanted: dict[str, Any] = {"protocol": protocol, "max_tokens": 24, "seed": 1}
    greedy = device.generate(PROMPT, **wanted)
    sampled, likeliest = (
        device.generate(PROMPT, temperature=1.0, min_p=min_p, **wanted) for min_p in (0.0, 1.0)
    )
    assert likeliest.tokens == greedy.tokens != sampled.tokens


def command(pair: Pair, edge: EdgeServer, *words: str) -> list[str]:
    ends = ["--draft", str(pair.draft), "--edge", edge.endpoint, "--threads", "1"]
    answer = ["--protocol", "stream", "--max-tokens", "12", "--seed", "3"]
    return ["device", "run", "abc", *ends, *answer, *words, "--json", "-"]


def test_the_command_has_the_flag(
    pair: Pair, edge: EdgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for words in ([], ["--temperature", "1"], ["--temperature", "1", "--min-p", "1"]):
        assert main(command(pair, edge, *words)) == 0
        texts.append(json.loads(capsys.readouterr().out)["answer"]["content"])
    assert texts[2] == texts[0] != texts[1]


def ask(service: Serving, **options: Any) -> str:
    body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "seed": 3, **options}
    body["pilotfish"] = {"protocol": "coupled"}
    answer = web.post(f"{service.url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def test_http_takes_the_option(service: Serving) -> None:
    greedy, sampled = (ask(service, temperature=value) for value in (0, 1))
    assert ask(service, temperature=1, min_p=1) == greedy != sampled


def test_a_service_takes_the_option_from_its_toml_file(
    pair: Pair, edge: EdgeServer, tmp_path: Path
) -> None:
    config = tmp_path / "device.toml"
    config.write_text("min-p = 1.0\n")
    with serving(pair.draft, edge.endpoint, "--config", str(config)) as service:
        assert ask(service, temperature=1) == ask(service, temperature=0)
        assert ask(service, temperature=1, min_p=0) != ask(service, temperature=0)


def test_a_value_out_of_bounds_is_refused(
    device: Device,
    service: Serving,
    pair: Pair,
    edge: EdgeServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(UnsupportedError, match="min_p"):
        device.generate(PROMPT, min_p=1.5)
    assert main(command(pair, edge, "--min-p", "1.5")) == UnsupportedError.exit_code
    assert "min_p must be between 0 and 1, not 1.5" in capsys.readouterr().err
    body = {"prompt": PROMPT, "min_p": 1.5}
    answer = web.post(f"{service.url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "min_p"
