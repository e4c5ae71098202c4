"""The spans of a `Device`'s answers, in the program's own provider: parents, sums, and bounds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import error_attributes, http_attributes
from opentelemetry.trace import SpanKind, StatusCode

from pilotfish import AsyncDevice, Device, EdgeServer, EdgeUnreachableError, UnsupportedError
from pilotfish.base.errors import TokenOutOfRangeError
from pilotfish.base.tracing import Tracer
from pilotfish.device_runtime.answer_trace import _MOST_ROUNDS, AnswerTrace
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.record import Round
from pilotfish.wire import messages as m
from pilotfish.wire.request import Request
from tests.conftest import Pair
from tests.support.collector import collecting
from tests.support.spans import Spans

HOW = {"protocol": "greedy", "window": 3, "max_tokens": 12}


@pytest.fixture(scope="module")
def edge(pair: Pair) -> Iterator[EdgeServer]:
    with EdgeServer(pair.target, threads=1) as server:  # makes no traces itself
        yield server


@pytest.fixture
def spans() -> Spans:
    return Spans()


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_an_answer_goes_below_the_programs_span(pair: Pair, edge: EdgeServer, spans: Spans) -> None:
    ours = spans.provider.get_tracer("robot")
    with Device(pair.draft, edge.endpoint, traces=spans.provider, threads=1) as device:
        with ours.start_as_current_span("plan a path"):
            answer = device.generate([1, 2, 3], **HOW)
        alone = device.generate([1, 2, 3], **HOW)
        assert alone.tokens == answer.tokens
    first, second = spans.named("text_completion")
    mine = spans.single("plan a path")
    assert [span.name for span in spans.below(mine)] == [first.name]
    assert second.parent is None
    assert first.kind is SpanKind.CLIENT
    children = spans.below(first)
    assert sorted(span.name for span in children) == ["prompt", *["round"] * len(answer.rounds)]
    for span, record in zip(
        [span for span in children if span.name == "round"], answer.rounds, strict=True
    ):
        assert attributes_of(span).get("pilotfish.accepted_tokens", 0) == record.accepted
        assert attributes_of(span)["pilotfish.uplink_bytes"] == record.uplink_bytes


def test_beside_and_close_share_one_provider(pair: Pair, edge: EdgeServer, spans: Spans) -> None:
    first = Device(pair.draft, edge.endpoint, traces=spans.provider, threads=1, lanes=2)
    second = first.beside()
    first.close()
    second.generate([1, 2, 3], **HOW)
    second.close()
    assert len(spans.named("text_completion")) == 1


def test_an_async_devices_answers_keep_their_tasks_span(
    pair: Pair, edge: EdgeServer, spans: Spans
) -> None:
    ours = spans.provider.get_tracer("robot")

    async def two() -> None:
        async def answer(name: str) -> None:
            with ours.start_as_current_span(name):
                await device.generate([1, 2, 3], **HOW)

        async with AsyncDevice(
            pair.draft, edge.endpoint, traces=spans.provider, threads=1, lanes=2
        ) as device:
            await asyncio.gather(answer("task a"), answer("task b"))
            await device.generate([1, 2, 3], **HOW)

    asyncio.run(two())
    for name in ("task a", "task b"):
        below = sorted(span.name.split()[0] for span in spans.below(spans.single(name)))
        assert below == ["queue", "text_completion"]
    roots = [span for span in spans.all if span.parent is None]
    assert sorted(span.name.split()[0] for span in roots) == ["task", "task", "text_completion"]


def test_the_programs_own_provider_is_the_default(
    pair: Pair, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: spans.provider)
    with Device(pair.draft, threads=1) as device:
        device.generate([1, 2, 3], protocol="local", max_tokens=4)
    answer = spans.single("text_completion")
    [alone] = spans.named("drafter alone")
    assert (
        attributes_of(alone)["pilotfish.tokens"]
        == attributes_of(answer)["pilotfish.local_tokens"]
        == 4
    )


def test_an_answer_that_cannot_begin_has_failed(pair: Pair, spans: Spans) -> None:
    with Device(pair.draft, traces=spans.provider, threads=1) as device:
        with pytest.raises(UnsupportedError):
            device.generate([1, 2, 3], protocol="greedy", temperature=0.7)
        with pytest.raises(TokenOutOfRangeError):
            device.generate([10**6], protocol="local")
    failed = spans.named("text_completion")
    assert len(failed) == 2
    for span in failed:
        assert span.status.status_code is StatusCode.ERROR
        assert not span.status.description
        assert not span.events


def test_a_closed_stream_is_cancelled_and_not_failed(pair: Pair, spans: Spans) -> None:
    with (
        Device(pair.draft, traces=spans.provider, threads=1) as device,
        device.stream([1, 2, 3], protocol="local", max_tokens=9) as pieces,
    ):
        next(pieces)
    span = spans.single("text_completion")
    assert span.status.status_code is StatusCode.UNSET
    assert attributes_of(span)["gen_ai.response.finish_reasons"] == ("cancelled",)


@pytest.mark.parametrize("by", ["close", "deletion"])
def test_a_stream_closed_before_its_first_piece_is_cancelled_too(
    pair: Pair, spans: Spans, by: str
) -> None:
    with Device(pair.draft, traces=spans.provider, threads=1) as device:
        pieces = device.stream([1, 2, 3], protocol="local", max_tokens=9)
        if by == "close":
            pieces.close()
        del pieces
        span = spans.single("text_completion")
        assert span.status.status_code is StatusCode.UNSET
        assert attributes_of(span)["gen_ai.response.finish_reasons"] == ("cancelled",)
        device.generate([1, 2, 3], protocol="local", max_tokens=2)
    assert len(spans.named("text_completion")) == 2


@pytest.mark.parametrize("protocol", ["greedy", "stream", "ahead", "local"])
def test_spans_of_a_long_answer_are_bounded(protocol: str, spans: Spans) -> None:
    answer = AnswerTrace(Tracer(spans.provider), [1, 2], Request(protocol=protocol))
    count = 40 * _MOST_ROUNDS
    for start in range(count):
        answer.add(
            Round(protocol=protocol, start=start, window=1, accepted=0, tokens=[1], pass_s=0.25)
        )
        answer.add_loss(0, 1)

    def pieces() -> Iterator[None]:
        raise KeyError("a prompt")
        yield

    class Target:
        model = "target"

    with pytest.raises(KeyError):
        list(answer.follow(pieces(), lambda: (None, Target)))  # type: ignore[arg-type]
    whole = spans.single("text_completion target")
    assert len(spans.all) <= _MOST_ROUNDS + 20
    assert sum(len(span.events) for span in spans.all) <= _MOST_ROUNDS
    assert attributes_of(whole)["pilotfish.edge_losses"] == count
    assert attributes_of(whole)["gen_ai.usage.output_tokens"] == count
    assert attributes_of(whole)["error.type"] == "KeyError"
    if protocol == "local":
        assert attributes_of(whole)["pilotfish.local_tokens"] == count
    else:
        assert attributes_of(whole)["pilotfish.rounds"] == count
        assert attributes_of(whole)["pilotfish.pass_s"] == count / 4


def test_names_are_those_of_the_conventions(pair: Pair, edge: EdgeServer, spans: Spans) -> None:
    known = {
        value
        for module in (gen_ai_attributes, error_attributes, http_attributes)
        for name, value in vars(module).items()
        if name.isupper()
    }
    with Device(pair.draft, edge.endpoint, traces=spans.provider, threads=1) as device:
        for protocol in ("greedy", "ahead", "auto"):
            device.generate(
                [1, 2, 3], protocol=protocol, max_tokens=4, temperature=0.0, seed=1, top_k=3
            )
    used = {name for span in spans.all for name in attributes_of(span)}
    assert {name for name in used if not name.startswith("pilotfish.")} <= known
    assert {"gen_ai.request.seed", "gen_ai.request.top_k", "pilotfish.rtt_s"} <= used


def test_a_device_that_finds_no_edge_leaves_no_exporter(pair: Pair) -> None:
    def exporters() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name.startswith("Otel")}

    before = exporters()
    with pytest.raises(EdgeUnreachableError), collecting() as collector:
        Device(pair.draft, "tcp://127.0.0.1:1", traces=collector.url)
    assert exporters() <= before


def test_opentelemetry_without_its_sdk_sends_nothing_more(
    pair: Pair, edge: EdgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that has loaded the API alone, as libraries do: spans are no spans."""
    monkeypatch.setattr(trace, "get_tracer_provider", trace.NoOpTracerProvider)
    sent: list[m.DeviceMessage] = []
    try_send = EdgeLink.try_send

    def noting(link: EdgeLink, message: m.DeviceMessage, *frames: Any) -> Any:
        sent.append(message)
        return try_send(link, message, *frames)

    monkeypatch.setattr(EdgeLink, "try_send", noting)
    with Device(pair.draft, edge.endpoint, threads=1) as device:
        assert device.tracer is not None
        device.generate([1, 2, 3], **HOW)
    begins = [message for message in sent if isinstance(message, m.Begin)]
    assert [begin.traceparent for begin in begins] == [None]
    assert not any(isinstance(message, m.Cancel) for message in sent)
