"""A `pilotfish device serve` in a process of its own, and clients of it."""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

from pilotfish import EdgeServer
from tests.conftest import Pair
from tests.support import web
from tests.support.forking import popen

START_S = 60.0
END_S = 30.0


class Serving:
    """The process and its address."""

    def __init__(self, draft: Path, edge: str | None, *flags: object, **environment: str) -> None:
        command = [sys.executable, "-m", "pilotfish", "-v", "device", "serve"]
        command += ["--draft", str(draft), "--threads", "1"]
        command += ["--edge", edge] if edge else []
        if "--listen" not in flags:
            command += ["--listen", "127.0.0.1:0"]
        self.process = popen([*command, *map(str, flags)], {**os.environ, **environment})
        self.lines: list[str] = []
        self._news: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            self._news.put(line)
        self._news.put("")

    def until(self, words: str, limit_s: float = START_S) -> str:
        """Wait for the next line of the log with these words."""
        end_s = time.monotonic() + limit_s
        while line := self._news.get(timeout=max(0.01, end_s - time.monotonic())):
            if words in line:
                return line
        raise AssertionError(f"the service ended without {words!r}:\n{''.join(self.lines)}")

    def wait_until_it_serves(self) -> Serving:
        line = self.until("the device serves on")
        address = line.split()[-1]
        self.url = f"{address.partition(':')[0]}://127.0.0.1:{address.rpartition(':')[2]}"
        return self

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def client(self, key: str = "no key at all") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120.0)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return web.get(self.url + path, timeout=60.0, **options)

    def metric(self, name: str, **options: Any) -> float:
        """Read the sum of all samples of this name."""
        text = self.get("/metrics", **options).text
        rows = [line.rpartition(" ") for line in text.splitlines() if line.startswith(name)]
        return sum(float(value) for labels, _, value in rows)

    def resident_bytes(self) -> int:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def tell(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Stop it if it still runs; returns the exit code."""
        if self.process.poll() is None:
            self.tell(signal.SIGTERM)
            self.tell(signal.SIGTERM)  # at once
        try:
            return self.process.wait(END_S)
        finally:
            self.process.kill()


@contextmanager
def serving(draft: Path, edge: str | None, *flags: object, **environment: str) -> Iterator[Serving]:
    started = Serving(draft, edge, *flags, **environment)
    try:
        yield started.wait_until_it_serves()
    finally:
        started.end()


@contextmanager
def two_lanes(pair: Pair) -> Iterator[Serving]:
    """Serve with two lanes at an edge of its own."""
    with (
        EdgeServer(pair.target, threads=1) as edge,
        serving(pair.draft, edge.endpoint, "--lanes", 2) as started,
    ):
        yield started


def chat(client: openai.OpenAI, content: str = "hello", **options: Any) -> Any:
    """Send one user message; by default for a short greedy answer."""
    options = {"model": "pilotfish", "max_tokens": 12, "temperature": 0, **options}
    messages: Any = [{"role": "user", "content": content}]
    return client.chat.completions.create(messages=messages, **options)


def content_of(chunks: Any) -> str:
    """Join the text of a stream."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def eventually(claim: Any, limit_s: float = 30.0) -> None:
    """Wait until the claim holds."""
    end_s = time.monotonic() + limit_s
    while not claim():
        assert time.monotonic() < end_s, "it did not come true in time"
        time.sleep(0.05)
