"""Spans in memory: a provider of the SDK, and what it has exported."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


class Spans:
    """A provider, and its spans in the order of their ends."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def all(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        """List the spans whose name begins so."""
        return [span for span in self.all if span.name.startswith(name)]

    def single(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span

    def below(self, parent: ReadableSpan) -> list[ReadableSpan]:
        context = parent.get_span_context()
        return [span for span in self.all if span.parent and span.parent.span_id == context.span_id]
