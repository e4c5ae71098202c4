"""Spans to a collector that is away, slow or hostile; settings that no collector can have."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.tracing import Tracer
from tests.support.daemons import free_port

KEY = "collectors-own-key"


@pytest.fixture(autouse=True)
def quick_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"x-key={KEY}")


class Web(NamedTuple):
    """A server: its address, and the headers of each request."""

    url: str
    requests: list[str]
    connections: set[object]

    def await_request(self, count: int = 1) -> None:
        end_s = time.monotonic() + 10
        while len(self.requests) < count:
            assert time.monotonic() < end_s
            time.sleep(0.01)


@contextmanager
def web(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[Web]:
    """Run a server that answers each POST so; the requests are noted first."""
    seen: list[str] = []
    connections: set[object] = set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            connections.add(self.client_address)
            seen.append(str(self.headers))
            answer(self)

        def do_GET(self) -> None:  # a client that follows a redirection may ask by GET
            seen.append(str(self.headers))
            answer(self)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield Web(f"http://127.0.0.1:{server.server_port}", seen, connections)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answers(status: int, body: bytes = b"", **headers: str) -> Callable[..., None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def ours(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == "pilotfish.traces"]


def of_sdk(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name.startswith("opentelemetry")]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirection_is_not_followed(caplog: pytest.LogCaptureFixture, status: int) -> None:
    with web(answers(200)) as other, web(answers(status, Location=other.url + "/x")) as collector:
        tracer = Tracer.to_collector(collector.url, "test")
        tracer.start("work").end()
        collector.await_request()
        tracer.close()
    assert KEY in collector.requests[0]
    assert not other.requests
    [line] = ours(caplog)
    assert "does not take traces" in line
    assert not of_sdk(caplog)


def test_a_collector_keeps_its_connection(caplog: pytest.LogCaptureFixture) -> None:
    with web(answers(200, b"{}")) as collector:
        tracer = Tracer.to_collector(collector.url, "test")
        for count in range(1, 4):
            tracer.start("work").end()
            collector.await_request(count)
        tracer.close()
    assert len(collector.connections) == 1
    assert not ours(caplog)


@pytest.mark.parametrize("status", [200, 400, 500])
def test_a_huge_answer_is_not_read(caplog: pytest.LogCaptureFixture, status: int) -> None:
    chunk, sent = b"x" * (1 << 20), []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("Content-Length", str(100 << 20))
        handler.end_headers()
        try:
            for _ in range(100):
                handler.wfile.write(chunk)
                sent.append(len(chunk))
        except OSError:
            pass
        handler.close_connection = True

    with web(answer) as collector:
        tracer = Tracer.to_collector(collector.url, "test")
        tracer.start("work").end()
        collector.await_request()
        tracer.close()
        assert sum(sent) < 50 << 20
    assert len(ours(caplog)) == (status != 200)
    assert not of_sdk(caplog)


def test_an_answer_that_drips_does_not_delay_the_end(caplog: pytest.LogCaptureFixture) -> None:
    """It would take an hour; the limits are of a busy machine."""
    over = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(1 << 20))
        handler.end_headers()
        while not over.wait(0.05):
            handler.wfile.write(b"x")
        handler.close_connection = True

    with web(answer) as collector:
        tracer = Tracer.to_collector(collector.url, "test")
        tracer.start("work").end()
        collector.await_request()
        begun_s = time.monotonic()
        for _ in range(100):
            tracer.start("work").end()
        assert time.monotonic() - begun_s < 10.0
        begun_s = time.monotonic()
        tracer.close()
        assert time.monotonic() - begun_s < 20.0
        over.set()
    assert ours(caplog) == ["the last traces were not sent: the collector does not answer"]


def test_the_programs_own_exporter_keeps_its_log(caplog: pytest.LogCaptureFixture) -> None:
    """A program that embeds a device may export by OpenTelemetry, too."""
    names = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter")
    before = [logging.getLogger(name).level for name in names]
    with web(answers(400)) as collector:
        tracer = Tracer.to_collector(collector.url, "test")
        tracer.start("work").end()
        collector.await_request()
        tracer.close()
        assert len(ours(caplog)) == 1
        assert not of_sdk(caplog)
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(collector.url)))
        provider.get_tracer("program").start_span("mine").end()
        provider.shutdown()
    assert any("400" in line for line in of_sdk(caplog))
    assert [logging.getLogger(name).level for name in names] == before


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "ftp://host", "grpc://host:4317", "http://", "http://:4318", "",
        "http://host:99999", "http://host:0", "http://host:-1", "http://host:port", "host:4318",
        "http://[::1", "http://ho st", "http://host\n", "\thttp://host", "http://host/?a=b",
        "http://host#a", "//host", "http:host", "x" * 1_000_000,
    ],
)  # fmt: skip
def test_what_is_no_address_of_a_collector_is_refused(url: str) -> None:
    with pytest.raises(UnsupportedError, match="is not the address of a collector") as refused:
        Tracer.to_collector(url, "test")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "9999"), ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
    ],
)  # fmt: skip
def test_a_setting_that_the_sdk_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    before = threading.active_count()
    monkeypatch.setenv(name, value)
    with pytest.raises(UnsupportedError, match=r"variables OTEL_\*") as refused:
        Tracer.to_collector("http://127.0.0.1:4318", "test")
    assert str(refused.value).isprintable()
    assert threading.active_count() == before


def test_memory_does_not_grow_while_the_collector_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20,000 answers, each with a span and two children; the queue has 2,048 spans."""
    tracer = Tracer.to_collector(f"http://127.0.0.1:{free_port()}", "test")

    def answer(number: int) -> None:
        span = tracer.start("answer", "client", attributes={"number": number})
        for name in ("prompt", "round"):
            span.child(name, span.begun_ns, span.begun_ns, {"pilotfish.tokens": number})
        span.end()

    def resident_bytes() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    try:
        for number in range(4_000):
            answer(number)
        before = resident_bytes()
        for number in range(16_000):
            answer(number)
        assert resident_bytes() - before < 4 << 20
    finally:
        tracer.close()
