"""Strangers at the HTTP service: refused, counted, and memory stays where it was."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from pilotfish.device_runtime.service.connection import Connection
from tests.support import web
from tests.support.serving import Serving, chat

MEBIBYTE = 2**20
MOST = 175  # bytes of a slow client; each takes it 0.2 s, or more on a busy machine


@pytest.fixture(scope="module", autouse=True)
def bounded_memory(service: Serving) -> Iterator[None]:
    """Whatever is tried here, it is served afterwards as before, and is no larger."""
    chat(service.client())
    before = service.resident_bytes()
    yield
    assert chat(service.client()).choices
    assert service.resident_bytes() - before < 48 * MEBIBYTE


def raw(service: Serving, data: bytes, limit_s: float = 30.0) -> bytes:
    """What comes back until the service hangs up."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=limit_s) as connection:
        connection.sendall(data)
        received = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                received += part
        return received


def post(service: Serving, content: bytes, path: str = "/v1/chat/completions") -> httpx.Response:
    return web.post(service.url + path, content=content, timeout=60)


HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


def test_a_body_that_says_it_is_too_long_is_not_read(service: Serving) -> None:
    answer = raw(service, f"{HEAD}Content-Length: 100000000000\r\n\r\n{{".encode())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer


def test_a_body_that_never_ends_is_cut_off(service: Serving) -> None:
    sent = 0
    with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
        connection.sendall(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        with suppress(BrokenPipeError, ConnectionResetError):
            while sent < 1024 * MEBIBYTE:
                connection.sendall(chunk)
                sent += len(chunk)
    assert sent < 64 * MEBIBYTE


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe{}",
        b"{}" * 2,
        b'{"messages": NaN}',
        b'{"messages": [{"role": "user", "content": "x"}], "pilotfish": {"'
        + b"x" * 20_000
        + b'": 1}}',
        b"[" * 50_000,
        b'{"messages": ' + b"[" * 30_000 + b"]" * 30_000 + b"}",
        b'{"messages": [{"role": "user", "content": '
        + b'{"a":' * 9000
        + b"1"
        + b"}" * 9000
        + b"}]}",
        b'{"messages": [' + b"{}," * 10_000 + b"{}]}",
        b'{"max_tokens": 1e400, "messages": [{"role": "user", "content": "x"}]}',
        b'{"seed": ' + b"9" * 5000 + b', "messages": [{"role": "user", "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "n": 7}',
        json.dumps({"messages": [], **{f"field{i}": i for i in range(3000)}}).encode(),
    ],
    ids=lambda content: repr(content[:24]),
)
def test_bodies_that_make_no_sense(service: Serving, content: bytes) -> None:
    answer = post(service, content)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert len(answer.content) < 1000


def test_a_lone_surrogate_is_text(service: Serving) -> None:
    body = b'{"messages": [{"role": "user", "content": "\\ud800 x"}], "max_tokens": 2}'
    assert post(service, body).status_code in (200, 400)


def test_a_prompt_beyond_the_context_and_one_beyond_the_body(service: Serving) -> None:
    text = "x" * 40_000
    body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    answer = post(service, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    ids = json.dumps({"prompt": [1] * 20_000}).encode()
    answer = post(service, ids, "/v1/completions")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    body = json.dumps({"messages": [{"role": "user", "content": text * 10}]}).encode()
    assert post(service, body).status_code == 413
    assert service.metric('pilotfish_refusals_total{reason="too-long"') >= 3


def test_a_compressed_body_is_not_unpacked(service: Serving) -> None:
    headers = {"Content-Encoding": "gzip"}
    answer = web.post(f"{service.url}/v1/completions", content=b"\x1f\x8b", headers=headers)
    assert answer.status_code == 415


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/../../etc/passwd",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/page/../serve.py",
        "/page/..%2fserve.py",
        "/page/%2e%2e/serve.py",
        "/page//etc/passwd",
        "/page/page.js/../../app.py",
        "/static/index.html",
        "//etc/passwd",
        "/v1/models/%00",
        "/docs",
        "/openapi.json",
        "/v1/embeddings",
        "http://evil.example/",
        "/metrics/",
    ],
)
def test_path_tricks(service: Serving, path: str) -> None:
    head = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = raw(service, head.encode())
    assert answer.startswith(b"HTTP/1.1 404 "), answer[:200]
    assert b"root:" not in answer
    assert b"import" not in answer


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # TLS
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        f"{HEAD}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n".encode(),
        f"{HEAD}Content-Length: -1\r\n\r\n".encode(),
        f"{HEAD}Content-Length: 1\r\nContent-Length: 2\r\n\r\n".encode(),
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 600_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 600_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=lambda data: repr(data[:20]),
)
def test_what_is_no_request_ends_the_connection(service: Serving, data: bytes) -> None:
    answer = raw(service, data)
    assert not answer.startswith(b"HTTP/1.1 2")


def test_methods_that_are_not_there(service: Serving) -> None:
    for method in ("GET", "DELETE", "OPTIONS", "TRACE"):
        answer = web.request(method, f"{service.url}/v1/chat/completions")
        assert answer.status_code == 405
        assert answer.headers["allow"] == "POST"
        assert answer.json()["error"]["code"] == "method_not_allowed"


def test_slow_heads_and_slow_bodies_are_hung_up_on(service: Serving) -> None:
    """Both are sent a byte at a time; others are served meanwhile."""
    starts = ["GET /health HTTP/1.1\r\nX: ", f"{HEAD}Content-Length: 1000\r\n\r\n"]
    dribbled: dict[str, int] = {}

    def dribble(start: str) -> None:
        count = 0
        with socket.create_connection(("127.0.0.1", service.port), timeout=60) as connection:
            connection.sendall(start.encode())
            connection.settimeout(0.2)
            while count < 2 * MOST:
                count += 1
                try:
                    connection.sendall(b"x")
                    connection.recv(4096)  # an answer, or the end
                    break
                except TimeoutError:
                    continue
                except OSError:
                    break
        dribbled[start] = count

    threads = [threading.Thread(target=dribble, args=(start,)) for start in starts]
    for thread in threads:
        thread.start()
    for _ in range(5):
        assert chat(service.client()).choices
    for thread in threads:
        thread.join()
    assert max(dribbled.values()) < MOST


def test_idle_connections_keep_no_client_out(service: Serving) -> None:
    crowd: list[socket.socket] = []
    try:
        for _ in range(600):
            item = socket.create_connection(("127.0.0.1", service.port), timeout=10)
            item.sendall(b"GET / HTT")
            crowd.append(item)
            if len(crowd) % 200 == 0:
                assert service.get("/health").status_code == 200
        assert chat(service.client()).choices
        descriptors = len(list(_open_descriptors(service)))
        assert descriptors < 400
    finally:
        for item in crowd:
            item.close()


def _open_descriptors(service: Serving) -> Iterator[Path]:
    return Path(f"/proc/{service.process.pid}/fd").iterdir()


class Hasty(Connection):
    """One that hangs up soon after an answer."""

    head_s = 0.5


class Impatient(Connection):
    """One whose clients must take what is written soon."""

    stall_s = 0.5


@contextmanager
def connected(app: Any, http: type[Connection]) -> Iterator[socket.socket]:
    """Serve an application and ask it once; both ends have small buffers."""
    with socket.socket() as listener, socket.socket() as client:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(30)
        server = uvicorn.Server(uvicorn.Config(app, http=http, lifespan="off", log_config=None))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            client.connect(listener.getsockname())
            client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            yield client
        finally:
            server.should_exit = server.force_exit = True
            thread.join(30)


def test_a_slow_reader_gets_the_whole_answer() -> None:
    """Though it takes longer than the service waits for the next request."""
    content = b"x" * 60_000

    async def app(scope: Any, receive: Any, send: Any) -> None:
        length = (b"content-length", str(len(content)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [length]})
        await send({"type": "http.response.body", "body": content})

    with connected(app, Hasty) as client:
        received = b""
        while part := client.recv(1500):
            received += part
            time.sleep(0.04)
        assert received.endswith(b"\r\n\r\n" + content)


def test_an_answers_end_that_nobody_takes_holds_no_connection() -> None:
    """Too little for the service to stop writing: it is waited for as long all the same."""
    lost = threading.Event()

    class Abandoned(Hasty, Impatient):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost.set()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * 60_000})

    with connected(app, Abandoned):
        assert lost.wait(15)


@pytest.mark.parametrize("reads", [False, True])
def test_in_the_midst_of_an_answer_what_is_written_must_be_taken(reads: bool) -> None:
    """A client that reads nothing loses its connection; one that keeps up stays for the whole."""
    part, ended = b"x" * 100_000, threading.Event()
    rounds = 12 if reads else 10_000  # the rest comes to nothing once the connection is lost

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(rounds):
            await send({"type": "http.response.body", "body": part, "more_body": True})
            await asyncio.sleep(0.1 if reads else 0.0)
        await send({"type": "http.response.body", "body": b""})
        ended.set()

    with connected(app, Impatient) as client:
        received = 0
        while reads and received < rounds * len(part):
            came = client.recv(2**20)
            assert came, "it was hung up on"
            received += len(came)
        assert ended.wait(30), "the client that does not read is waited for"
