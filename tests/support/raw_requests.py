"""Raw HTTP requests to a device service, and what comes back, without what differs each time."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

Answer = dict[str, Any]
PAUSE_S = 0.02  # between the parts of a request
PATIENCE_S = 60.0
CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"


# Fields of JSON that differ each time, or with the processor.
VARIABLE = re.compile(
    r'("(?:id|item_id|response_id|created|created_at|software|text|content|delta'
    r'|\w+_s|\w+_ms|\w+_per_second)": ?)'
    r'("(?:[^"\\]|\\.)*"|-?[\d.e-]+)'
)


class Raw(NamedTuple):
    """The bytes of a connection, in parts that are sent one after the other.

    ends: the client half-closes the connection. waits: the service ends it by a time-out.
    """

    parts: Sequence[bytes]
    ends: bool = False
    waits: bool = False


def head(
    method: str, path: str, *headers: str, host: str = "localhost", version: str = "1.1"
) -> bytes:
    """The head of a request, the last one of its connection unless a header says otherwise."""
    lines = [f"{method} {path} HTTP/{version}", *([f"Host: {host}"] if host else []), *headers]
    if not any(each.lower().startswith("connection:") for each in headers):
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def get(path: str, *headers: str, method: str = "GET", **options: str) -> Raw:
    return Raw([head(method, path, *headers, **options)])


def post(path: str, body: object, *headers: str, method: str = "POST") -> Raw:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Raw([head(method, path, f"Content-Length: {len(content)}", *headers) + content])


def chunked(path: str, *chunks: bytes, end: bytes = b"0\r\n\r\n") -> Raw:
    parts = [b"%x\r\n%b\r\n" % (len(each), each) for each in chunks]
    return Raw([head("POST", path, "Transfer-Encoding: chunked"), *parts, end])


MUCH = 32_800  # bytes, just more than a head may have
KEEP = "Connection: keep-alive"
SAY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2, "temperature": 0}
COMPLETE = {"prompt": "once", "max_tokens": 2, "temperature": 0}
RESPOND = {"input": "hello", "max_output_tokens": 2, "temperature": 0}
TOKENS = {"tokens": [1, 2, 3]}
UPGRADE = ("Connection: Upgrade, close", "Upgrade: websocket", "Sec-WebSocket-Version: 13")
FORM = "Content-Type: application/x-www-form-urlencoded"

TABLE: dict[str, Raw] = {
    # Every route.
    "page": get("/"),
    "page's icon": get("/page/icon.svg"),
    "page's icon, unchanged": get("/page/icon.svg", 'If-None-Match: "{icon}"'),
    "health": get("/health"),
    "status": get("/status"),
    "models": get("/v1/models"),
    "model": get("/v1/models/pilotfish"),
    "model that is not there": get("/v1/models/another"),
    "model with a slash": get("/v1/models/an/other"),
    "chat": post(CHAT, SAY),
    "chat, streamed": post(CHAT, {**SAY, "stream": True}),
    "completion": post(TEXT, COMPLETE),
    "completion, streamed": post(TEXT, {**COMPLETE, "stream": True}),
    "response": post(RESPONSES, {**RESPOND, "store": False}),
    "response, streamed": post(RESPONSES, {**RESPOND, "store": False, "stream": True}),
    "response that is not there": get(f"{RESPONSES}/resp_0"),
    "response, streamed again": get(f"{RESPONSES}/resp_0?stream=true"),
    "response to forget": get(f"{RESPONSES}/resp_0", method="DELETE"),
    "tokenize": post("/tokenize", {"prompt": "hello"}),
    "detokenize": post("/detokenize", TOKENS),
    "tokenizer": get("/tokenizer_info"),
    "several prompts": post(TEXT, {**COMPLETE, "prompt": ["once", [1, 2]]}),
    "embeddings": post("/v1/embeddings", {"input": "hello"}),
    "embeddings, got": get("/v1/embeddings"),
    # Methods.
    "HEAD of the page": get("/", method="HEAD"),
    "HEAD of health": get("/health", method="HEAD"),
    "HEAD of a POST route": get(CHAT, method="HEAD"),
    "HEAD of nothing": get("/nowhere", method="HEAD"),
    "OPTIONS of a GET route": get("/v1/models", method="OPTIONS"),
    "OPTIONS of a POST route": get(CHAT, "Access-Control-Request-Method: POST", method="OPTIONS"),
    "OPTIONS of all": get("*", method="OPTIONS"),
    "GET of chat": get(CHAT),
    "POST of health": post("/health", {}),
    "PUT of a model": post("/v1/models/pilotfish", {}, method="PUT"),
    "DELETE of models": get("/v1/models", method="DELETE"),
    "PATCH of a response": post(f"{RESPONSES}/resp_0", {}, method="PATCH"),
    "POST of the page": post("/", {}),
    "PUT of embeddings": post("/v1/embeddings", {}, method="PUT"),
    "a method of no one's": get("/health", method="BREW"),
    "a method in lower case": get("/health", method="get"),
    # Paths.
    "unknown": get("/nowhere"),
    "documentation": get("/docs"),
    "schema": get("/openapi.json"),
    "slash behind health": get("/health/"),
    "slash behind models": get("/v1/models/"),
    "slash behind chat": post(f"{CHAT}/", SAY),
    "two slashes": get("//health"),
    "no file of the page": get("/page/serve.py"),
    "slash behind a file": get("/page/icon.svg/"),
    "dots": get("/page/../status"),
    "percent-encoded letters": get("/h%65alth"),
    "percent-encoded slash": get("/v1%2Fmodels"),
    "percent-encoded dots": get("/page/%2e%2e%2fapp.py"),
    "percent-encoded name": get("/v1/models/pilot%66ish"),
    "percent-encoded UTF-8": get("/v1/models/%C3%A4"),
    "percent-encoded bytes": get("/v1/models/%FF%00"),
    "percent and no digits": get("/v1/models/%zz"),
    "query": get("/health?deep=1&deep=2#part"),
    "whole URL": get("http://localhost/health"),
    "letters' case": get("/Health"),
    # Bodies.
    "no body": post(CHAT, b""),
    "no JSON": post(CHAT, b"{"),
    "a list": post(CHAT, []),
    "bytes": post(TEXT, b"\xff\xfe"),
    "a form": post(CHAT, b"a=b", FORM),
    "JSON said to be a form": post(CHAT, SAY, FORM),
    "JSON said to be text": post("/tokenize", {"prompt": "x"}, "Content-Type: text/plain"),
    "a body that is encoded": post(TEXT, b"\x1f\x8b", "Content-Encoding: gzip"),
    "a body too long, as it says": get(CHAT, "Content-Length: 100000000000", method="POST"),
    "a field that is not known": post(CHAT, {**SAY, "nonsense": 1}),
    "a field of another type": post(TEXT, {"prompt": {"a": 1}}),
    "a protocol that needs an edge": post(CHAT, {**SAY, "pilotfish": {"protocol": "greedy"}}),
    "another model": post(CHAT, {**SAY, "model": "another"}),
    "a body with GET": post("/health", {"x": 1}, method="GET"),
    "chunks": chunked("/detokenize", b'{"tokens"', b": [1, 2]}"),
    "chunks, ended early": Raw(chunked("/detokenize", b"{", end=b"").parts, ends=True),
    "no chunks": chunked("/detokenize", end=b"zz\r\n"),
    "a body, ended early": Raw([head("POST", TEXT, "Content-Length: 9"), b"{"], ends=True),
    "a slow body": Raw([head("POST", TEXT, "Content-Length: 9"), b"{"], waits=True),
    "100-continue": Raw(
        [head("POST", "/detokenize", "Content-Length: 15", "Expect: 100-continue"),
         b'{"tokens": [1]}']
    ),
    # Hosts and origins.
    "another host": get("/health", host="evil.example"),
    "no host": get("/health", host=""),
    "two hosts": get("/health", "Host: evil.example"),
    "another origin": post(CHAT, SAY, "Origin: https://evil.example"),
    "the own origin": get("/v1/models", "Origin: http://localhost"),
    # Connections.
    "HTTP/1.0": get("/health", version="1.0"),
    "HTTP/1.0, kept alive": get("/health", KEEP, version="1.0"),
    "HTTP/2.0": get("/health", version="2.0"),
    "kept alive": Raw([head("GET", "/health", KEEP), head("GET", "/v1/models")]),
    "kept alive after an error": Raw([head("GET", "/x", KEEP), head("GET", "/health")]),
    "pipelined": Raw(
        [head("GET", "/health", KEEP) + head("PUT", "/health", KEEP) + head("GET", "/nowhere")]
    ),
    "half a head": Raw([b"GET /health HTTP/1.1\r\nHost: local"], ends=True),
    "a slow head": Raw([b"GET /health HTTP/1.1\r\nHost: local"], waits=True),
    "kept alive, and idle": get("/health", KEEP)._replace(waits=True),
    "a head without an end": Raw([head("GET", "/", "X: " + "x" * MUCH)[:-4]]),
    "a request line without an end": Raw([b"GET /" + b"x" * MUCH]),
    "a head in parts": Raw(
        [b"GET /health HT", b"TP/1.1\r\nHost: loc", b"alhost\r\nConnection: ", b"close\r\n\r\n"]
    ),
    "a long header": get("/health", "X: " + "x" * 20_000),
    "many headers": get("/health", *(f"X-{number}: x" for number in range(200))),
    "a long path": get("/" + "x" * 20_000),
    "no HTTP": Raw([b"hello\r\n\r\n"]),
    "WebSocket": get("/health", *UPGRADE, "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="),
    "WebSocket to nowhere": get("/x", *UPGRADE, "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="),
    "h2c": get("/health", "Connection: Upgrade, HTTP2-Settings, close", "Upgrade: h2c"),
}  # fmt: skip


def answers(port: int, raw: Raw, icon: str) -> list[Answer]:
    """Send a connection's bytes; returns all answers until the service hangs up.

    icon: the entity tag of the page's icon.
    """
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as connection:
        with suppress(ConnectionError):
            for part in raw.parts:
                connection.sendall(part.replace(b"{icon}", icon.encode()))
                time.sleep(PAUSE_S)
            if raw.ends:
                connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionError):
            while more := connection.recv(1 << 16):
                received += more
    begins = [match.start() for match in re.finditer(rb"HTTP/1\.\d \d{3} ", received)]
    assert begins[:1] == ([0] if received else [])
    return [_answer(received[begin:end]) for begin, end in pairwise([*begins, len(received)])]


def _answer(part: bytes) -> Answer:
    """Parse an answer, and leave out what differs each time."""
    top, _, body = part.partition(b"\r\n\r\n")
    status, *lines = top.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(headers) == len(lines)
    if headers.get("Transfer-Encoding") == "chunked":
        body = _joined(body)
    text = body.decode()
    if headers.get("content-type", "").startswith(("text/html", "image/svg")):
        steady = "…" if text else ""  # the page changes without the server
    else:
        steady = VARIABLE.sub(r"\1…", text)
    for name in ("date", "etag", *(() if steady == text else ("content-length",))):
        if name in headers:
            headers[name] = "…"
    if "allow" in headers:
        headers["allow"] = ", ".join(sorted(headers["allow"].split(", ")))  # a set has no order
    return {"status": status, "headers": headers, "body": steady}


def _joined(chunks: bytes) -> bytes:
    """Return the body of chunks: how a stream is cut differs each time."""
    body = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        length = int(size, 16)
        body, chunks = body + rest[:length], rest[length + 2 :]
    return body
