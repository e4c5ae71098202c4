"""The way of spans to a collector: OpenTelemetry's SDK, over HTTP, in a thread of its own.

Spans wait in a queue of at most 2,048 (`OTEL_BSP_MAX_QUEUE_SIZE`), and a thread sends them. If the
collector is slow or away, the queue drops spans, and nobody waits. The environment's variables
`OTEL_*` hold as in any program with the SDK. Only `base.tracing` imports this module, since it
needs the extra `traces`.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.version import VERSION

_log = logging.getLogger("pilotfish.traces")

_PATH: Final = "/v1/traces"
_CLOSE_S: Final = 2.0  # time limit for sending what is left at the end
# These log each attempt and each dropped span; `_Sender` logs the changes.
_CHATTY: Final = ("opentelemetry.exporter", "opentelemetry.sdk")


class CollectorExport:
    """A provider of tracers whose spans go to the collector at ``url``.

    service: the service's name, unless the environment names another. Raises `UnsupportedError` for
    an address that is not of HTTP.
    """

    def __init__(self, url: str, service: str) -> None:
        endpoint = _endpoint(url)
        for name in _CHATTY:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        named = OTELResourceDetector().detect().attributes
        ours = {"service.name": service, "service.version": VERSION}
        resource = Resource.create({**ours, **named})
        # not closed at the interpreter's exit: that would wait for the collector without a limit
        self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        sender = _Sender(OTLPSpanExporter(endpoint=endpoint), endpoint)
        self.provider.add_span_processor(BatchSpanProcessor(sender))

    def close(self) -> None:
        """Send the spans that wait, for at most 2 s."""
        closing = threading.Thread(target=self.provider.shutdown, name="close traces", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)
        if closing.is_alive():
            _log.warning("the last traces were not sent: the collector does not answer")


def _endpoint(url: str) -> str:
    """Return the address for spans below a collector's address."""
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # the port or the IPv6 address is bad
        named = False
    if not named:
        raise UnsupportedError(
            f"{url!r} is not the address of a collector: write http://HOST:PORT or https://HOST."
        )
    base = url.rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH


class _Sender(SpanExporter):
    """Sends spans, and logs when the collector ceases or begins to take them."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        parts = urlsplit(endpoint)
        self._where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"  # leaves a password out
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans. Called by the SDK's thread."""
        try:
            result = self._exporter.export(spans)
        except Exception:  # nothing about traces may end this thread
            result = SpanExportResult.FAILURE
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            _log.warning("the collector at %s does not take traces; they are dropped", self._where)
        elif self._failing and not failed:
            _log.warning("the collector at %s takes traces again", self._where)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        """End an attempt under way."""
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True: nothing waits here."""
        return True
