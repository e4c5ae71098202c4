"""Services that fail in the middle of an answer: the answer fails, and is not lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pilotfish.lab.field.load.clients import ServiceClient

TOKEN = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
DONE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'


@contextmanager
def service(body: bytes) -> Iterator[str]:
    """A service that gives every question this answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # http.server's name
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (TOKEN + b'data: {"error": {"message": "no room"}}\n\n', "no room"),
        (TOKEN, "ended before"),
        (TOKEN + b"data: {broken\n\n", "no chat completion"),
        (TOKEN + b'data: {"choices": [{}]}\n\n', "no chat completion"),
        (TOKEN + b"data: []\n\n", "no chat completion"),
        (DONE, "no token"),
    ],
)
def test_an_answer_that_is_cut_or_faulty_has_failed(body: bytes, error: str) -> None:
    with service(body) as url:
        client = ServiceClient(url, ["Why?"], 2)
        answer = client.ask(0, 0, 0.0)
        client.close()
    assert error in answer.error
    assert not answer.arrivals


def test_a_whole_answer_has_not() -> None:
    with service(TOKEN + TOKEN + DONE) as url:
        client = ServiceClient(url, ["Why?"], 2)
        answer = client.ask(0, 0, 0.0)
        client.close()
    assert not answer.error
    assert answer.tokens == 2
