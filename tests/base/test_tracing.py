"""A tracer's spans: ids, times, parents, and nothing that a stranger could put into a trace."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import NoOpTracerProvider, StatusCode

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.tracing import Event, Tracer, read_traceparent
from tests.support.collector import collecting
from tests.support.examples import examples
from tests.support.spans import Spans

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("values", "read"),
    [
        ([PARENT], PARENT),
        ([f"00-{TRACE}-{SPAN}-00"], f"00-{TRACE}-{SPAN}-00"),
        ([f"cc-{TRACE}-{SPAN}-01"], PARENT),  # a later version is read as far as we know it
        ([f"cc-{TRACE}-{SPAN}-01-what-comes-then"], PARENT),
        ([], None),
        ([PARENT, PARENT], None),
        ([""], None),
        ([f"ff-{TRACE}-{SPAN}-01"], None),
        ([f"{PARENT}-more"], None),
        ([f"{PARENT}0"], None),
        ([f" {PARENT}"], None),
        ([f"{PARENT}\n"], None),
        ([PARENT.upper()], None),
        ([f"00-{'0' * 32}-{SPAN}-01"], None),
        ([f"cc-{TRACE}-{'0' * 16}-01"], None),
        ([f"00-{TRACE[:-1]}\u0661-{SPAN}-01"], None),  # a digit, but not one of hex
    ],
)
def test_a_traceparent_is_read_as_w3c_says(values: list[str], read: str | None) -> None:
    assert read_traceparent(values) == read


@given(st.lists(st.text(max_size=60), max_size=2))
@examples(50)
def test_no_text_breaks_the_reading(values: list[str]) -> None:
    read = read_traceparent(values)
    assert read is None or len(read) == 55


def test_a_span_goes_below_its_remote_parent() -> None:
    spans = Spans()
    tracer = Tracer(spans.provider)
    span = tracer.start("work", "server", parent=PARENT, attributes={"pilotfish.rounds": 3})
    assert span.traceparent is not None
    assert span.traceparent.startswith(f"00-{TRACE}-")
    span.end()
    done = spans.single("work")
    assert done.parent is not None
    assert (f"{done.parent.span_id:016x}", done.parent.is_remote) == (SPAN, True)
    assert dict(done.attributes or {}) == {"pilotfish.rounds": 3}


def test_children_nest_though_the_wall_clock_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    spans = Spans()
    tracer = Tracer(spans.provider)
    wall_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns)
    begun_ns = time.monotonic_ns()
    span = tracer.start("answer", begun_ns=begun_ns)
    monkeypatch.setattr(time, "time_ns", lambda: wall_ns - 3600 * 10**9)
    event = Event("tokens", begun_ns + 60, {"pilotfish.tokens": 1})
    span.child("round", begun_ns + 50, begun_ns + 70, events=[event])
    span.child("early", begun_ns - 50, begun_ns - 70)  # an estimate that is too early
    span.end(begun_ns + 90)
    whole, part, early = spans.single("answer"), spans.single("round"), spans.single("early")
    begin = whole.start_time
    assert begin is not None
    assert (part.start_time, part.end_time) == (begin + 50, begin + 70)
    assert part.events[0].timestamp == begin + 60
    assert (early.start_time, early.end_time) == (begin, begin)
    assert whole.end_time == begin + 90


def test_an_error_is_recorded_by_its_code_alone() -> None:
    spans = Spans()
    tracer = Tracer(spans.provider)
    span = tracer.start("answer")
    with pytest.raises(KeyError), tracer.current(span):
        raise KeyError("a prompt")
    span.end(error="edge-lost")
    done = spans.single("answer")
    assert done.status.status_code is StatusCode.ERROR
    assert not done.status.description
    assert not done.events
    assert dict(done.attributes or {}) == {"error.type": "edge-lost"}


@pytest.mark.parametrize("provider", [NoOpTracerProvider(), "sampled out"])
def test_a_span_that_is_not_recorded_has_no_children(
    provider: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if provider == "sampled out":
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        provider = TracerProvider(shutdown_on_exit=False)
    span = Tracer(provider).start("answer")
    assert not span.recording
    span.child("round", 0, 1)
    span.end()
    parent = span.traceparent
    assert parent is None or not int(parent[-2:], 16) & 1


@pytest.mark.parametrize(
    "url",
    ["", "collector:4318", "grpc://a:4317", "http://", "http://:4318", "http://a:b", "http://[::1",
     "http://a:99999", "http://a:0", "file:///etc/passwd"],
)  # fmt: skip
def test_another_address_is_refused(url: str) -> None:
    with pytest.raises(UnsupportedError, match="not the address of a collector"):
        Tracer.to_collector(url, "test")


def test_a_full_queue_drops_spans_and_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "16")
    with collecting() as collector:
        collector.answering = None
        tracer = Tracer.to_collector(collector.url, "test")
        longest_s = 0.0
        for _ in range(3000):
            begun_s = time.monotonic()
            tracer.start("answer").end()
            longest_s = max(longest_s, time.monotonic() - begun_s)
        begun_s = time.monotonic()
        tracer.close()
        closing_s = time.monotonic() - begun_s
    assert longest_s < 1.0  # an attempt to send takes 10 s here
    assert closing_s < 4.0


def test_the_last_user_closes() -> None:
    closed: list[bool] = []
    tracer = Tracer(Spans().provider, lambda: closed.append(True))
    assert tracer.share() is tracer
    tracer.close()
    assert not closed
    tracer.close()
    assert closed
