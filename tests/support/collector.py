"""A collector of traces: the receiving end of OTLP over HTTP, on loopback."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

WAIT_S = 60.0
CLOCKS_NS = 2_000_000  # two processes of one machine take the wall clock's offset separately


class Seen(NamedTuple):
    """A span as it arrived. service: name of the process that made it. id, parent: hex."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    begun_ns: int
    ended_ns: int
    kind: int
    failed: bool
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    resource: dict[str, Any]

    @property
    def took_s(self) -> float:
        return (self.ended_ns - self.begun_ns) * 1e-9

    def lies_in(self, other: Seen, tolerance_ns: int = 0) -> bool:
        return (
            self.begun_ns >= other.begun_ns - tolerance_ns
            and self.ended_ns <= other.ended_ns + tolerance_ns
        )


class Collector:
    """What arrived. answering: status of the answers; None: accept requests, but never answer."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.bodies: list[bytes] = []
        self.paths: list[str] = []
        self.answering: int | None = 200
        self.url = ""

    def named(self, name: str) -> list[Seen]:
        """List the spans whose name begins so, in the order of their beginnings."""
        spans = [span for span in list(self.spans) if span.name.startswith(name)]
        return sorted(spans, key=lambda span: span.begun_ns)

    def await_(self, claim: Callable[[], bool], within_s: float = WAIT_S) -> None:
        """Wait until the claim holds."""
        end_s = time.monotonic() + within_s
        while not claim():
            assert time.monotonic() < end_s, [span.name for span in self.spans]
            time.sleep(0.02)

    def await_span(self, name: str, service: str = "") -> Seen:
        """Wait for the span whose name begins so, of which there is one."""

        def matching() -> list[Seen]:
            return [each for each in self.named(name) if service in each.service]

        self.await_(lambda: bool(matching()))
        [span] = matching()
        return span

    def take(self, body: bytes) -> None:
        self.bodies.append(body)
        request = ExportTraceServiceRequest.FromString(body)
        for of_resource in request.resource_spans:
            resource = _values(of_resource.resource.attributes)
            for scope in of_resource.scope_spans:
                self.spans += [_seen(span, resource) for span in scope.spans]


def _seen(span: Any, resource: dict[str, Any]) -> Seen:
    return Seen(
        service=resource["service.name"],
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        begun_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        kind=span.kind,
        failed=span.status.code == 2,
        attributes=_values(span.attributes),
        events=[(each.name, each.time_unix_nano, _values(each.attributes)) for each in span.events],
        resource=resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        inner = getattr(value, kind)
        return [plain(each) for each in inner.values] if kind == "array_value" else inner

    return {each.key: plain(each.value) for each in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Run a collector."""
    collector, over = Collector(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.paths.append(self.path)
            if collector.answering is None:
                over.wait()
                return
            if collector.answering == 200:
                collector.take(body)
            self.send_response(collector.answering)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collector
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()
