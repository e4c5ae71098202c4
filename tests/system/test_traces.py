"""Traces: one trace id over device, wire and edge, as a collector of other processes sees it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Device, EdgeLostError, EdgeServer
from tests.conftest import Pair
from tests.support import web
from tests.support.collector import CLOCKS_NS, Collector, Seen, collecting
from tests.support.daemons import Daemon, free_port
from tests.support.serving import Serving, serving

CALLER = "0af7651916cd43dd8448eb211c80319c"  # W3C's own example
CALLER_SPAN = "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{CALLER}-{CALLER_SPAN}-01"}
SECRET = "marzipan"  # of the prompt
API_KEY = "sk-of-alice-0123456789abcdef0123456789"


@pytest.fixture(scope="module", autouse=True)
def quick_export() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as opened:
        yield opened


@pytest.fixture(scope="module")
def service(pair: Pair, collector: Collector, quick_export: None) -> Iterator[Serving]:
    url = collector.url
    with (
        EdgeServer(pair.target, threads=1, traces=url) as edge,
        serving(pair.draft, edge.endpoint, "--lanes", 1, "--traces", url) as started,
    ):
        yield started


def ask(service: Serving, protocol: str, headers: dict[str, str], **options: Any) -> Any:
    """Request a short answer."""
    body = {
        "prompt": f"{protocol} {SECRET}", "max_tokens": 12, "temperature": 0, "user": "nougat",
        "pilotfish": {"protocol": protocol}, **options,
    }  # fmt: skip
    return web.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=60.0)


def below(collector: Collector, parent: Seen) -> list[Seen]:
    return [span for span in list(collector.spans) if span.parent == parent.id]


@pytest.mark.parametrize("protocol", ["greedy", "ahead", "stream", "dssd"])
def test_one_trace_from_the_client_to_the_edges_passes(
    service: Serving, collector: Collector, protocol: str
) -> None:
    collector.spans.clear()
    collector.bodies.clear()
    answer = ask(service, protocol, HEADERS)
    assert answer.status_code == 200, answer.text
    request = collector.await_span("POST")
    edge = collector.await_span(f"edge {protocol}")
    spans = list(collector.spans)

    assert {span.trace for span in spans} == {CALLER}
    assert request.parent == CALLER_SPAN
    assert request.name == "POST /v1/completions"
    assert request.attributes["http.response.status_code"] == 200
    device = collector.await_span("text_completion", "device")
    assert {span.name for span in below(collector, request)} == {"queue", device.name}
    assert edge.parent == device.id
    assert (request.service, device.service, edge.service) == (
        "pilotfish-device", "pilotfish-device", "pilotfish-edge",
    )  # fmt: skip
    expected = {"prompt", "tokens" if protocol in ("ahead", "stream") else "round"}
    assert {span.name for span in below(collector, device)} == {*expected, edge.name}
    assert {span.name for span in below(collector, edge)} == {"prompt", "passes"}

    by_id = {span.id: span for span in spans}
    for span in spans:
        assert span.ended_ns >= span.begun_ns
        assert not span.failed
        if span is not request:
            parent = by_id[span.parent]
            assert span.lies_in(parent, 0 if span.service == parent.service else CLOCKS_NS)
            assert all(span.begun_ns <= at <= span.ended_ns for _, at, _ in span.events)

    assert_counts(collector, device, edge, answer.json())
    assert_no_text(collector, answer.json())


def assert_counts(collector: Collector, device: Seen, edge: Seen, body: dict[str, Any]) -> None:
    """The spans of both ends say of tokens, bytes and passes what the answer says."""
    summary, usage = body["pilotfish"], body["usage"]
    attributes = device.attributes
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert attributes["gen_ai.response.finish_reasons"] == [body["choices"][0]["finish_reason"]]
    assert attributes["pilotfish.protocol"] == summary["protocol"]
    for name, value in (
        ("rounds", "rounds"), ("accepted_tokens", "accepted"), ("uplink_bytes", "uplink_bytes"),
        ("downlink_bytes", "downlink_bytes"),
    ):  # fmt: skip
        assert attributes[f"pilotfish.{name}"] == summary[value]
    assert edge.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    # the edge may have computed tokens that the answer no longer took
    assert edge.attributes["gen_ai.usage.output_tokens"] >= usage["completion_tokens"] - 1
    [passes] = [span for span in below(collector, edge) if span.name == "passes"]
    assert passes.attributes["pilotfish.passes"] >= summary["rounds"]
    assert passes.attributes["pilotfish.pass_s"] <= passes.took_s
    rounds = [span for span in below(collector, device) if span.name == "round"]
    if rounds:
        assert len(rounds) == summary["rounds"] == len(passes.events)
        assert passes.attributes["pilotfish.pass_s"] <= sum(span.took_s for span in rounds)
        events = [each["pilotfish.pass_s"] for _, _, each in passes.events]
        for span, pass_s in zip(sorted(rounds, key=lambda each: each.begun_ns), events):  # noqa: B905
            assert pass_s <= span.took_s
            assert span.attributes["pilotfish.pass_s"] == pytest.approx(pass_s, abs=1e-6)


def assert_no_text(collector: Collector, body: dict[str, Any]) -> None:
    """No prompt, no answer and no user of it crosses to the collector."""
    sent = b"".join(collector.bodies)
    assert b"text_completion" in sent  # bodies are not compressed
    for text in (SECRET, "nougat", body["choices"][0]["text"][:6]):
        assert text
        assert text.encode() not in sent


def test_a_request_without_a_parent_begins_a_trace(service: Serving, collector: Collector) -> None:
    collector.spans.clear()
    for headers in ({}, {"traceparent": f"00-{CALLER}-{'0' * 16}-01"}):
        assert ask(service, "greedy", headers).status_code == 200
    collector.await_(lambda: len(collector.named("edge")) == 2)
    collector.await_(lambda: len(collector.named("POST")) == 2)
    roots = collector.named("POST")
    assert [span.parent for span in roots] == ["", ""]
    traces = {span.trace for span in collector.spans}
    assert traces == {span.trace for span in roots}
    assert len(traces) == 2
    assert CALLER not in traces


def test_a_trace_that_its_caller_does_not_record_is_not_recorded(
    service: Serving, collector: Collector
) -> None:
    collector.spans.clear()
    unsampled = {"traceparent": f"00-{CALLER}-{CALLER_SPAN}-00"}
    assert ask(service, "greedy", unsampled).status_code == 200
    assert ask(service, "greedy", {}).status_code == 200
    collector.await_span("edge")
    collector.await_span("POST")
    assert CALLER not in {span.trace for span in collector.spans}


def test_a_refused_request_says_why_by_its_status(service: Serving, collector: Collector) -> None:
    collector.spans.clear()
    assert ask(service, "greedy", HEADERS, temperature="hot").status_code == 400
    assert service.get("/health").status_code == 200  # has no span
    span = collector.await_span("POST")
    assert span.attributes["http.response.status_code"] == 400
    assert not span.failed  # the client's fault, as the conventions say
    assert [each.name for each in collector.spans] == [span.name]


def test_a_request_without_a_key_has_no_span(
    pair: Pair, collector: Collector, tmp_path: Path
) -> None:
    """So strangers cannot fill the queue with spans; and no key is in the spans of others."""
    collector.spans.clear()
    collector.bodies.clear()
    keys = tmp_path / "api-keys"
    keys.write_text(f"alice:{API_KEY}\n")
    keys.chmod(0o600)
    flags = ("--api-keys", keys, "--traces", collector.url)
    with serving(pair.draft, None, *flags) as service:
        for wrong in ({}, {"Authorization": f"Bearer {API_KEY}x"}):
            assert ask(service, "local", {**HEADERS, **wrong}).status_code == 401
        known = {"Authorization": f"Bearer {API_KEY}"}
        assert ask(service, "local", {**HEADERS, **known}).status_code == 200
        collector.await_span("POST")
    [request] = collector.named("POST")
    assert request.attributes["http.response.status_code"] == 200
    sent = b"".join(collector.bodies)
    for secret in (API_KEY, "alice", SECRET):
        assert secret.encode() not in sent


HOSTILE = {
    "traceparent": (
        f"00-{CALLER}-{CALLER_SPAN}-0g", f"00-{CALLER.upper()}-{CALLER_SPAN}-01", "00-" + "0" * 52,
        f"ff-{CALLER}-{CALLER_SPAN}-01", f"00-{CALLER}-{CALLER_SPAN}-01-more", "-" * 60_000, "",
        f"00-{CALLER}-{CALLER_SPAN}-01, 00-{CALLER}-{CALLER_SPAN}-01", "\xff" * 55,
        f"00-{CALLER}-{CALLER_SPAN}-01\t", "٠٠-" + CALLER,
    ),
    "tracestate": ("a=" + "b" * 60_000,),
    "baggage": ("a=" + "b" * 60_000,),
}  # fmt: skip


def test_hostile_headers_begin_a_trace_or_are_refused(
    service: Serving, collector: Collector
) -> None:
    """And never an answer of 500, nor a word of them in a span."""
    collector.spans.clear()
    collector.bodies.clear()
    expected = 0
    for name, values in HOSTILE.items():
        for value in (*values, values[0] * 20):
            status = raw_post(service, [(name, value)])
            assert status in (200, 400, 431, None), (name, value[:80])
            expected += status == 200
    parent = ("traceparent", HEADERS["traceparent"])
    folded = (parent[0], parent[1] + "\r\n x: y")
    for headers in ([parent] * 2, [parent] * 5_000, [folded], []):
        status = raw_post(service, headers)
        assert status in (200, 400, 431, None)
        expected += status == 200
    assert expected >= 10
    collector.await_(lambda: len(collector.named("POST")) == expected)
    collector.await_(lambda: len(collector.named("text_completion")) == expected)
    sent = b"".join(collector.bodies)
    assert b"b" * 50 not in sent
    assert b"-" * 50 not in sent


def raw_post(service: Serving, headers: list[tuple[str, str]]) -> int | None:
    """Post a request whose headers no client would send; None: closed without an answer."""
    body = b'{"prompt": "a", "max_tokens": 1, "pilotfish": {"protocol": "local"}}'
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: localhost", b"Connection: close",
             b"Content-Type: application/json", b"Content-Length: %d" % len(body)]  # fmt: skip
    lines += [f"{name}: {value}".encode() for name, value in headers]
    with socket.create_connection(("127.0.0.1", service.port), timeout=30.0) as stream:
        answer = b""
        try:
            stream.sendall(b"\r\n".join([*lines, b"", body]))
            while part := stream.recv(65536):
                answer += part
        except ConnectionError:
            pass
    return int(answer.split()[1]) if answer else None


def test_the_trace_goes_on_at_a_restarted_edge(pair: Pair, collector: Collector) -> None:
    """The edge is killed within an answer: its loss is a failed span, and the next edge goes on."""
    collector.spans.clear()
    listen = f"tcp://127.0.0.1:{free_port()}"
    flags = ("--target", pair.target, "--threads", 1, "--listen", listen)
    flags = (*flags, "--traces", collector.url)
    first = Daemon(*flags)
    daemons = [first]
    try:
        with Device(
            pair.draft, listen, on_link_loss="wait", traces=collector.url, threads=1
        ) as device:
            options = {"protocol": "greedy", "window": 2, "max_tokens": 40}
            want = device.generate([1, 2, 3], **options).tokens
            collector.await_span("edge greedy")
            with device.stream([1, 2, 3], **options) as pieces:
                next(pieces)
                first.kill()
                starting = threading.Timer(0.5, lambda: daemons.append(Daemon(*flags)))
                starting.start()
                rest = [token for piece in pieces for token in piece.tokens]
                assert pieces.generation is not None
                assert pieces.generation.tokens == want
                assert rest
                starting.join()
        collector.await_(lambda: len(collector.named("text_completion")) == 2)
        answer = collector.named("text_completion")[-1]
        collector.await_(lambda: len(collector.named("edge greedy")) == 2)
        resumed = collector.named("edge greedy")[-1]
        assert (resumed.trace, resumed.parent) == (answer.trace, answer.id)
        [loss] = [span for span in below(collector, answer) if span.name == "edge away"]
        assert loss.failed
        assert loss.attributes["error.type"] == "edge-lost"
        assert loss.lies_in(answer)
        assert loss.took_s > 0.3
        assert not answer.failed  # it has all its tokens
        assert answer.attributes["pilotfish.edge_losses"] == 1
    finally:
        for daemon in daemons:
            daemon.kill()


def test_an_answer_that_ends_with_the_edge_has_failed(pair: Pair, collector: Collector) -> None:
    collector.spans.clear()
    with (
        EdgeServer(pair.target, threads=1) as edge,
        Device(pair.draft, edge.endpoint, traces=collector.url, threads=1) as device,
        device.stream([1, 2, 3], protocol="greedy", window=2, max_tokens=60) as pieces,
    ):
        next(pieces)
        os.kill(edge.pid, signal.SIGKILL)
        with pytest.raises(EdgeLostError):
            list(pieces)
    answer = collector.await_span("text_completion")
    assert answer.failed
    assert answer.attributes["error.type"] == "edge-lost"
    assert answer.attributes["gen_ai.response.finish_reasons"] == ["error"]


def test_an_edge_traces_devices_that_do_not(pair: Pair, collector: Collector) -> None:
    collector.spans.clear()
    with (
        EdgeServer(pair.target, threads=1, traces=collector.url) as edge,
        Device(pair.draft, edge.endpoint, threads=1) as device,
    ):
        device.generate([1, 2, 3], protocol="greedy", max_tokens=6)
    span = collector.await_span("edge greedy")  # at the latest when the edge stops
    assert span.parent == ""
    assert span.attributes["gen_ai.usage.output_tokens"] == 6


def test_the_environment_of_opentelemetry_holds(
    pair: Pair, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    collector.spans.clear()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "robot-7")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "site=dock,service.name=other")
    with Device(pair.draft, traces=collector.url + "/", threads=1) as device:
        device.generate([1, 2, 3], protocol="local", max_tokens=3)
    span = collector.await_span("text_completion")
    assert (span.service, span.resource["site"]) == ("robot-7", "dock")
    assert collector.paths[-1] == "/v1/traces"
    collector.spans.clear()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    with Device(pair.draft, traces=collector.url, threads=1) as device:
        device.generate([1, 2, 3], protocol="local", max_tokens=3)
    assert not collector.spans


@pytest.mark.parametrize("trouble", ["silent", "refusing", "nowhere"])
def test_a_collector_in_trouble_delays_neither_answers_nor_the_end(
    pair: Pair, caplog: pytest.LogCaptureFixture, trouble: str
) -> None:
    with collecting() as collector:
        collector.answering = {"silent": None, "refusing": 503, "nowhere": 200}[trouble]
        url = collector.url
        if trouble == "nowhere":
            url = f"http://127.0.0.1:{free_port()}"
        with (
            EdgeServer(pair.target, threads=1, traces=url) as edge,
            Device(pair.draft, edge.endpoint, traces=url, threads=1) as device,
        ):
            begun_s = time.monotonic()
            for _ in range(5):
                answer = device.generate([1, 2, 3], protocol="greedy", max_tokens=6)
                assert answer.total_s < 2
                time.sleep(0.1)
            answered_s = time.monotonic() - begun_s
            begun_s = time.monotonic()
        closing_s = time.monotonic() - begun_s
    assert answered_s < 8
    assert closing_s < 8  # two ends, each of which waits for 2 s at most
    chatter = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert not chatter
    ours = [record.getMessage() for record in caplog.records if record.name == "pilotfish.traces"]
    assert len(ours) <= 2, ours


def test_without_traces_nothing_of_opentelemetry_is_loaded(pair: Pair) -> None:
    """Neither by either end nor by the commands; in a process that nothing else has filled."""
    code = """
import sys
from pathlib import Path
from pilotfish import Device
from pilotfish.cli import main
import pilotfish.device_runtime.service.service_daemon, pilotfish.edge_runtime.edge_daemon
with Device(Path(sys.argv[1]), threads=1) as device:
    assert device.tracer is None
    device.generate([1, 2, 3], protocol="local", max_tokens=2)
print(*(name for name in sys.modules if name.startswith("opentelemetry")))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(pair.draft)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_the_commands_say_what_to_install_and_refuse_other_addresses(
    pair: Pair, tmp_path: Path
) -> None:
    (tmp_path / "opentelemetry").mkdir()
    (tmp_path / "opentelemetry" / "__init__.py").write_text("")  # hides the installed packages
    commands = (
        ["edge", "serve", "--target", str(pair.target), "--listen", "tcp://127.0.0.1:0"],
        ["device", "serve", "--draft", str(pair.draft), "--listen", "127.0.0.1:0"],
        ["device", "run", "hello", "--draft", str(pair.draft), "--protocol", "local"],
    )
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    for command in commands:
        for url, without, words in (
            ("http://127.0.0.1:4318", True, "traces"),
            ("grpc://127.0.0.1:4317", False, "not the address of a collector"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "pilotfish", *command, "--traces", url],
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
                env={**os.environ, "PYTHONPATH": path} if without else None,
            )
            assert done.returncode == 64, done.stderr
            assert words in done.stderr
            assert "Traceback" not in done.stderr
