"""How an edge's text and errors appear in logs, terminals, JSON and status."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from pilotfish.wire import messages as m
from tests.conftest import Pair
from tests.device_runtime.test_bad_edge import Answer, LyingEdge
from tests.support import web
from tests.support.serving import serving

FORGED = "2026-11-22 00:00:00,000 INFO pilotfish.service: key alice accepted"
EVIL = f"No.\n{FORGED}\x1b[2J\x1b]0;owned\x07\u202e\x9b"


@pytest.fixture
def evil(pair: Pair) -> Iterator[LyingEdge]:
    def script(request: m.DeviceMessage) -> list[Answer]:
        if isinstance(request, m.Hello):
            return [[msgspec.structs.replace(edge.welcome(), model=f"model\n{EVIL}")]]
        if isinstance(request, m.Window | m.Pull):
            about = {"session": request.session, "generation": request.generation}
            return [[m.Failure(code="internal", message=EVIL, **about)]]
        return []

    edge = LyingEdge(pair, script)
    edge.start()
    yield edge
    edge.stop()


def test_words_of_an_edge_forge_no_line_in_a_service(pair: Pair, evil: LyingEdge) -> None:
    ask = {"model": "pilotfish", "prompt": "abc", "max_tokens": 4, "temperature": 0}
    with serving(pair.draft, evil.endpoint, "--lanes", 1) as service:
        answer = web.post(f"{service.url}/v1/completions", json=ask, timeout=60)
        assert answer.status_code == 502
        reply = answer.json()["error"]["message"]
        assert reply.startswith("No. 2026")
        status = web.get(f"{service.url}/status", timeout=60).json()
    assert reply.isprintable()
    assert status["target"].startswith("model No. 2026")
    assert all(text.isprintable() for text in texts(status))
    log = [line.rstrip("\n") for line in service.lines]
    assert any(FORGED in line for line in log)  # it is told
    assert not any(line.startswith(FORGED) for line in log)
    assert all(line.isprintable() for line in log)


def texts(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)
    elif isinstance(value, str):
        yield value


def test_words_of_an_edge_reach_a_terminal_as_one_line(pair: Pair, evil: LyingEdge) -> None:
    command = [sys.executable, "-m", "pilotfish", "device", "run", "--draft", str(pair.draft)]
    done = subprocess.run(
        [*command, "--edge", evil.endpoint, "--threads", "1", "--protocol", "greedy", "abc"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 70
    (line,) = done.stderr.split("\n")[:-1]
    assert line.isprintable()
    assert line.startswith("pilotfish: No. 2026")
