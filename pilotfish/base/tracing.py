"""Traces by OpenTelemetry: the spans of an answer on both ends, under one trace id.

Off unless asked for: a `Tracer` exists only then, and only then OpenTelemetry is imported (extra
`traces`). Whoever works without one tests ``tracer is None`` and does nothing more. Spans have
names, counts and times. No text, prompt, token or key may enter one, and no exception's message,
which could quote these: an error is recorded by its code.

All times are of the monotonic clock. A span takes the wall clock's offset once, and its children
use the same offset, so that they nest however the wall clock is set.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Protocol, TypeAlias

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.extras import install_command
from pilotfish.base.settings import setting

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan

# W3C Trace Context, version 00: trace id, span id and flags; an id of zeros is invalid.
TRACEPARENT: Final = r"^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}\Z"
TRACEPARENT_LENGTH: Final = 55
# A later version may append fields to those of version 00, after a dash.
_ANY_VERSION: Final = re.compile(r"(?!ff)[0-9a-f]{2}(-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})(-.*)?")
_VERSION_00: Final = re.compile(TRACEPARENT)

TracesUrl: TypeAlias = Annotated[
    str,
    setting(
        "send traces of answers to the OpenTelemetry collector at this address (OTLP over HTTP), "
        "for example http://collector:4318; needs the extra 'traces' (default: no traces)",
        metavar="URL",
    ),
]
Kind: TypeAlias = Literal["internal", "server", "client"]
Attributes: TypeAlias = "Mapping[str, str | bool | int | float | Sequence[str]]"


class Event(NamedTuple):
    """Something that happened during a span, at this time of the monotonic clock."""

    name: str
    at_ns: int
    attributes: Attributes


class TracerProvider(Protocol):
    """The interface of OpenTelemetry's class of this name, so that types need no extra."""

    def get_tracer(self, name: str, version: str | None = None, /) -> Any:
        """Return a tracer of OpenTelemetry."""


class Tracer:
    """Makes the spans of one end. Thread-safe; its calls never wait for a collector.

    on_close: called when the last user closes the tracer.
    """

    def __init__(
        self, provider: TracerProvider, on_close: Callable[[], None] = lambda: None
    ) -> None:
        from opentelemetry import trace

        from pilotfish.base.version import VERSION

        self._trace = trace
        self._otel = provider.get_tracer("pilotfish", VERSION)
        self._on_close = on_close
        self._users, self._changed = 1, Lock()

    @classmethod
    def to_collector(cls, url: str, service: str) -> Tracer:
        """Return a tracer that sends its spans to a collector (OTLP over HTTP).

        service: the service's name, unless the environment names another. Raises
        `UnsupportedError` without the extra `traces`, and for an address of another kind.
        """
        try:
            from pilotfish.base.trace_export import CollectorExport
        except ModuleNotFoundError as error:
            raise UnsupportedError(
                f"Traces need {error.name}, which is not installed: {install_command('traces')}."
            ) from error
        export = CollectorExport(url, service)
        return cls(export.provider, export.close)

    @classmethod
    def for_device(cls, traces: str | TracerProvider | None) -> Tracer | None:
        """Return the tracer of a `Device`; see there. None: this program traces nothing."""
        if isinstance(traces, str):
            return cls.to_collector(traces, "pilotfish-device")
        if traces is not None:
            return cls(traces)
        if "opentelemetry.trace" not in sys.modules:
            return None
        from opentelemetry import trace

        return cls(trace.get_tracer_provider())

    def share(self) -> Tracer:
        """Return this tracer for one more user, who closes it separately."""
        with self._changed:
            self._users += 1
        return self

    def close(self) -> None:
        """End this user's use; after the last user's, send what is left, within a short time."""
        with self._changed:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self._on_close()

    def start(
        self,
        name: str,
        kind: Kind = "internal",
        *,
        parent: str | None = None,
        begun_ns: int | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        """Start a span; the caller must end it.

        parent: a valid `traceparent`; None: the span that is current in this context, if any.
        """
        if begun_ns is None:
            begun_ns = time.monotonic_ns()
        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._otel.start_span(
            name,
            None if parent is None else self._remote(parent),
            getattr(self._trace.SpanKind, kind.upper()),
            attributes,
            start_time=begun_ns + offset_ns,
        )
        return Span(self, span, begun_ns, offset_ns)

    @property
    def has_current(self) -> bool:
        """Whether a span is current in this context."""
        return self._trace.get_current_span().get_span_context().is_valid

    def _remote(self, parent: str) -> Any:
        """Return a context in which the span of a `traceparent` is current."""
        trace = self._trace
        _, trace_id, span_id, flags = parent.split("-")
        remote = trace.SpanContext(
            int(trace_id, 16),
            int(span_id, 16),
            is_remote=True,
            trace_flags=trace.TraceFlags(int(flags, 16)),
        )
        from opentelemetry.context import Context

        return trace.set_span_in_context(trace.NonRecordingSpan(remote), Context())

    def child(
        self,
        parent: Span,
        name: str,
        begun_ns: int,
        ended_ns: int,
        attributes: Attributes,
        events: Sequence[Event],
        error: str,
    ) -> None:
        """Record a span that has ended, below another; see `Span.child`."""
        from opentelemetry.context import Context

        offset_ns = parent.offset_ns
        span = self._otel.start_span(
            name,
            self._trace.set_span_in_context(parent.otel, Context()),
            attributes=attributes,
            start_time=begun_ns + offset_ns,
        )
        for event in events:
            span.add_event(event.name, event.attributes, event.at_ns + offset_ns)
        self.end(span, ended_ns + offset_ns, error)

    def end(self, span: OtelSpan, ended_ns: int, error: str) -> None:
        """End a span at a time of the wall clock; error: code of the error that ended it."""
        if error:
            span.set_attribute("error.type", error)
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR))
        span.end(ended_ns)

    @contextmanager
    def current(self, span: Span) -> Iterator[None]:
        """Make a span the parent of the spans that are started in this context."""
        with self._trace.use_span(span.otel, record_exception=False, set_status_on_exception=False):
            yield


class Span:
    """A span under way. Times are of the monotonic clock, ns."""

    def __init__(self, tracer: Tracer, otel: OtelSpan, begun_ns: int, offset_ns: int) -> None:
        self._tracer = tracer
        self.otel = otel
        self.begun_ns, self.offset_ns = begun_ns, offset_ns
        self.recording = otel.is_recording()  # False: what is added to the span is dropped

    @property
    def traceparent(self) -> str | None:
        """The span's place in its trace, for another process; None without a trace."""
        context = self.otel.get_span_context()
        if not context.is_valid:
            return None
        flags = context.trace_flags & 0xFF
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    def set(self, attributes: Attributes, name: str | None = None) -> None:
        """Set attributes, and another name."""
        if name is not None:
            self.otel.update_name(name)
        self.otel.set_attributes(attributes)

    def child(
        self,
        name: str,
        begun_ns: int,
        ended_ns: int,
        attributes: Attributes | None = None,
        *,
        events: Sequence[Event] = (),
        error: str = "",
    ) -> None:
        """Record a child that has ended. error: code of the error that ended it."""
        if self.recording:
            begun_ns = max(begun_ns, self.begun_ns)
            ended_ns = max(ended_ns, begun_ns)
            self._tracer.child(self, name, begun_ns, ended_ns, attributes or {}, events, error)

    def end(self, ended_ns: int | None = None, error: str = "") -> None:
        """End the span, now or at this time. error: code of the error that ended it."""
        if ended_ns is None:
            ended_ns = time.monotonic_ns()
        self._tracer.end(self.otel, max(ended_ns, self.begun_ns) + self.offset_ns, error)


def read_traceparent(values: Sequence[str]) -> str | None:
    """Return the `traceparent` of a request in version 00; None without a valid one.

    values: the values of all headers of this name. As W3C requires, an invalid one, or several, are
    as good as none, and a later version is read as far as version 00 goes.
    """
    if len(values) != 1:
        return None
    if not (match := _ANY_VERSION.fullmatch(values[0])):
        return None
    if values[0].startswith("00-") and match[2]:
        return None
    read = f"00{match[1]}"
    return read if _VERSION_00.match(read) else None
