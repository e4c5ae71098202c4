"""LiteLLM as a proxy in front, as docs/clients.md starts it; OpenAI's client asks it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.client_answers import FISH, expect_call, expect_chat
from tests.clients.conftest import skip_without
from tests.clients.documented import block
from tests.support import web
from tests.support.serving import Serving

START_S = 120.0
KEY = f"sk-{'0123456789abcdef' * 4}"


@pytest.fixture
def proxy(service: Serving, environment: dict[str, str], tmp_path: Path) -> Iterator[str]:
    skip_without(".py")
    (tmp_path / "litellm.yaml").write_text(block("LiteLLM", "yaml").at(service.url))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = block("LiteLLM", "sh").text.replace("--port 4000", f"--port {port}")
    command = command.replace("sk-$(openssl rand -hex 32)", KEY)
    command = command.replace("litellm --config", "exec litellm --config")
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["sh", "-c", command], cwd=tmp_path, env=environment, stdout=output, stderr=output
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end_s = time.monotonic() + START_S
        while not answers(f"{url}/health/liveliness"):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end_s, log.read_text()[-4000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def answers(url: str) -> bool:
    try:
        return web.get(url, timeout=5.0).status_code == 200
    except httpx.TransportError:
        return False


def test_litellm(proxy: str, answers_of: Callable[..., dict[str, Any]]) -> None:
    answers = answers_of("openai_python.py", f"{proxy}/v1", KEY)
    expect_chat(answers)
    expect_call(answers["call"])
    assert answers["structured"] in FISH
    assert answers["response"]
    assert answers["completion"]
    assert answers["models"] == ["pilotfish"]
