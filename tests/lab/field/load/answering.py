"""A service that gives every question one answer, or refuses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
DONE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\ndata: [DONE]\n\n'
ANSWER = TOKEN + TOKEN + DONE
BUSY = b'{"error": {"message": "no room"}}'


@contextmanager
def answering(
    body: bytes,
    *,
    status: int = 200,
    pause_s: float = 0.0,
    refuse_s: float = 0.0,
    serve_s: float = float("inf"),
    lanes: int = 1000,
) -> Iterator[str]:
    """Yield the address of a service that answers with this body.

    pause_s: time after each line. refuse_s, serve_s: the times, from its start, before which and
    after which it answers with status 503. lanes: number of questions at a time; others get
    status 429.
    """
    begin_s = time.monotonic()
    over = threading.Event()
    free = threading.Semaphore(lanes)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # http.server's name
            self.rfile.read(int(self.headers["Content-Length"]))
            since_s = time.monotonic() - begin_s
            if not free.acquire(blocking=False):
                self._send(429, BUSY)
                return
            try:
                self._send(status if refuse_s <= since_s < serve_s else 503, body)
            finally:
                free.release()

        def _send(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Connection", "close")
            self.end_headers()
            with suppress(OSError):  # the client may have given up
                if not pause_s:
                    self.wfile.write(content)
                    return
                for line in content.splitlines(keepends=True) or [b""]:
                    self.wfile.write(line)
                    if over.wait(pause_s):
                        return

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
