"""The edge's spans of a generation: whatever ends it ends them, and their number is bounded."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import StatusCode

from pilotfish.base.tracing import Tracer
from pilotfish.edge_runtime.answer_trace import _MOST_EVENTS
from pilotfish.wire import messages as m
from tests.conftest import Pair
from tests.support.hostile import RawSession
from tests.support.socketless import SocketlessEdge
from tests.support.spans import Spans

PROMPT = [3, 1, 4, 1, 5]
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def edge(pair: Pair, spans: Spans) -> Iterator[SocketlessEdge]:
    with SocketlessEdge(pair.target, tracer=Tracer(spans.provider)) as opened:
        opened.start()
        yield opened


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def cancel(session: RawSession) -> list[bytes]:
    return [m.encode(m.Cancel(session=session.id, generation=session.generation))]


def stream(edge: SocketlessEdge, session: RawSession, count: int) -> None:
    """Let the edge generate this many tokens."""
    edge.deliver(session.begin(PROMPT, "stream", traceparent=PARENT))
    edge.deliver(session.pull(count))
    seen = 0
    while seen < count:
        reply, _ = edge.reply_all()
        assert isinstance(reply, m.Tokens), reply
        seen += 1


def test_spans_of_a_long_generation_are_bounded(edge: SocketlessEdge, spans: Spans) -> None:
    session, count = RawSession(), 2 * _MOST_EVENTS
    stream(edge, session, count)
    assert not spans.all  # all spans are made at the end
    edge.deliver(cancel(session))
    edge.turn()
    whole, prompt, passes = (
        spans.single("edge stream"),
        spans.single("prompt"),
        spans.single("passes"),
    )
    assert len(spans.all) == 3
    assert whole.parent is not None
    assert f"{whole.parent.trace_id:032x}" in PARENT
    assert attributes_of(whole)["gen_ai.usage.output_tokens"] == count
    assert attributes_of(passes)["pilotfish.passes"] == count
    assert len(passes.events) == _MOST_EVENTS
    assert prompt.end_time is not None
    assert passes.start_time is not None
    assert prompt.end_time <= passes.start_time
    assert whole.end_time == passes.end_time
    edge.deliver(cancel(session))  # again
    edge.turn()
    assert len(spans.all) == 3


@pytest.mark.parametrize("by", ["cancel", "begin", "close", "stop"])
def test_whatever_ends_a_generation_ends_its_spans(
    edge: SocketlessEdge, spans: Spans, by: str
) -> None:
    session = RawSession()
    stream(edge, session, 2)
    if by == "stop":
        edge.service.end_traces()
    elif by == "begin":
        edge.deliver(session.begin(PROMPT, "stream"))
    else:
        edge.deliver(cancel(session) if by == "cancel" else [m.encode(m.Close(session=session.id))])
    edge.turn()
    assert len(spans.named("edge stream")) == 1


def test_a_failed_pass_fails_the_span(
    edge: SocketlessEdge, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = RawSession()
    stream(edge, session, 2)

    def broken(*_: object) -> None:
        raise RuntimeError("the prompt was marzipan")

    monkeypatch.setattr("pilotfish.edge_runtime.streams.choose", broken)
    edge.deliver(session.pull(3))
    edge.reply()  # repeats the first two tokens
    edge.fails("internal")
    edge.deliver(cancel(session))
    edge.turn()
    span = spans.single("edge stream")
    assert span.status.status_code is StatusCode.ERROR
    assert attributes_of(span)["error.type"] == "internal"
    assert not span.status.description
    assert "marzipan" not in str([each.to_json() for each in spans.all])


def test_a_begin_with_a_bad_parent_is_refused(edge: SocketlessEdge, spans: Spans) -> None:
    edge.deliver(RawSession().begin(PROMPT, "stream", traceparent=PARENT.upper()))
    edge.fails("malformed")
    assert not spans.all
