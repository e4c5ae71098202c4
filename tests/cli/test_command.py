"""``pilotfish device run``: every protocol and its options, as a user types them."""

import io
import json
import subprocess
import sys

import pytest

from pilotfish import EdgeServer
from pilotfish.cli import main
from pilotfish.wire.protocols import names
from tests.conftest import Pair
from tests.support.hostile import COLD
from tests.support.thinned import thinned


def device_run(pair: Pair, *arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "pilotfish", "device", "run", "abc", "--draft", pair.draft]
    return subprocess.run(
        [*map(str, [*command, *arguments])], capture_output=True, text=True, check=False
    )


def run_here(
    capsys: pytest.CaptureFixture[str], pair: Pair, *arguments: object
) -> tuple[int, str, str]:
    """The same in this process: the exit status, and what was written to stdout and stderr."""
    words = ["device", "run", "abc", "--draft", *map(str, [pair.draft, *arguments])]
    try:
        code = main(words)
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


@pytest.mark.parametrize(
    "protocol", thinned(names(), ["dssd", "wisv-selective", "stream", "local"])
)
def test_every_protocol_runs(pair: Pair, edge: EdgeServer, protocol: str) -> None:
    temperature = 0 if protocol in COLD else 1
    done = device_run(
        pair, "--edge", edge.endpoint, "--protocol", protocol, "--temperature", temperature,
        "--seed", 3, "--max-tokens", 12, "--json", "-",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["protocol"] == protocol
    assert figures["tokens"] <= 12


@pytest.mark.parametrize(
    "options",
    [
        ("--protocol", "coupled", "--window", "auto"),
        ("--protocol", "tslt", "--draft-top-k", "8", "--window", "6"),
        ("--protocol", "tslt", "--draft-top-p", "0.8", "--draft-temperature", "0.5"),
        ("--protocol", "tree", "--expansion", "3,2"),
    ],
)
def test_options_of_drafting(
    pair: Pair, edge: EdgeServer, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    more = ("--temperature", 1, "--max-tokens", 12, "--stats")
    code, _, reply = run_here(capsys, pair, "--edge", edge.endpoint, *options, *more)
    assert code == 0, reply
    assert "acceptance" in reply


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--protocol", "telepathy"), "coupled"),
        (("--protocol", "greedy", "--temperature", "1"), "use coupled"),
        (("--protocol", "tslt", "--expansion", "2,2"), "can only be used with tree"),
        (("--protocol", "tree", "--expansion", "2,x"), "2,x"),
        (("--protocol", "stream", "--draft-top-k", "3"), "nothing is drafted"),
        (("--window", "wide"), "wide"),
        (("--window", "1000"), "auto"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    pair: Pair,
    edge: EdgeServer,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    words: str,
) -> None:
    code, out, reply = run_here(capsys, pair, "--edge", edge.endpoint, *options)
    assert code in (2, 64)
    assert words in reply.splitlines()[-1]
    assert out == ""


@pytest.mark.parametrize("words", [[], ["-"]])
def test_a_prompt_is_read_from_stdin(
    pair: Pair,
    edge: EdgeServer,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
) -> None:
    flags = ["--edge", edge.endpoint, "--protocol", "greedy"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("abc\n"))
    assert main(["device", "run", *words, "--draft", str(pair.draft), *flags]) == 0
    assert capsys.readouterr().out == run_here(capsys, pair, *flags)[1]


def test_an_empty_stdin_is_no_prompt(
    pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(SystemExit, match="2"):
        main(["device", "run", "--draft", str(pair.draft), "--protocol", "local"])
    assert "give the prompt as an argument" in capsys.readouterr().err
