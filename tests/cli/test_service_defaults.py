"""`device serve` refuses default options that no request could have, at the start and at SIGHUP."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pilotfish.cli import main
from tests.conftest import Pair
from tests.support import web
from tests.support.serving import chat, serving

ALONE = ["--protocol", "local"]
EDGE = ["--edge", "tcp://127.0.0.1:1"]


def serve(*words: str) -> int:
    return main(["device", "serve", "--draft", "nowhere", "--threads", "1", *words])


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([*ALONE, "--temperature", "500"], 64, "temperature must be"),
        ([*EDGE, "--temperature", "500"], 64, "temperature must be"),
        (["--top-p", "2"], 64, "top_p must be"),
        (["--seed=-1"], 64, "seed must be"),
        (["--max-tokens=-1"], 64, "max_tokens must be"),
        ([*EDGE, "--window", "auto"], 64, "chooses the window itself"),
        ([*EDGE, "--protocol", "greedy", "--temperature", "1"], 64, "decodes at temperature 0"),
        ([*EDGE, "--among", "greedy", "--temperature", "1"], 64, "decodes at temperature 0"),
        (
            [*EDGE, "--lossy", "--policy", "threshold", "--temperature", "0.6"],
            64,
            "work only at temperature 0",
        ),
        ([*(f"--stop=s{at}" for at in range(17)), *ALONE], 64, "at `stop`"),
        (["--regex", "("], 65, "The grammar cannot be used"),
        (["--regex", "\udcff"], 64, "The grammar is not valid Unicode"),
    ],
)
def test_it_does_not_start(
    words: list[str], code: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(*words) == code
    error = capsys.readouterr().err
    assert text in error
    assert "nowhere" not in error


@pytest.mark.parametrize(
    ("line", "code"), [("temperature = nan", 64), ("top-p = inf", 64), ("top_k = 'x'", 78)]
)
def test_nor_with_such_a_file(
    line: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "device.toml"
    file.write_text(line)
    assert serve("--config", str(file)) == code
    assert "nowhere" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ALONE,
        EDGE,
        [*EDGE, "--protocol", "adaptive"],  # refuses temperature 0
        [*EDGE, "--protocol", "wisv-full"],  # refuses every other temperature
        [*EDGE, "--among", "greedy"],
        [*EDGE, "--rtt-threshold", "0", "--policy", "threshold"],
        ["--regex", "[ab]+", "--max-tokens", "0"],
    ],
)
def test_usable_defaults_pass(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(*words) != 0
    assert "nowhere" in capsys.readouterr().err  # the next thing that is looked at


def test_a_reload_refuses_them_and_keeps_the_earlier_ones(pair: Pair, tmp_path: Path) -> None:
    file = tmp_path / "device.toml"
    file.write_text("max-tokens = 2\n")
    with serving(pair.draft, None, "--lanes", 1, "--config", file) as started:
        for line, text in (
            ("temperature = 500.0", "temperature must be"),
            ("top-p = 2.0", "top_p must be"),
            ("regex = '('", "The grammar cannot be used"),
        ):
            file.write_text(f"max-tokens = 3\n{line}\n")
            started.tell(signal.SIGHUP)
            assert text in started.until("nothing was reloaded")
        body = {"messages": [{"role": "user", "content": "ab"}]}
        answer = web.post(f"{started.url}/v1/chat/completions", json=body)
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] <= 2
        file.write_text("max-tokens = 3\n")
        started.tell(signal.SIGHUP)
        started.until("reloaded")
        assert chat(started.client(), max_tokens=3).usage.completion_tokens <= 3
