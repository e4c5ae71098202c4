"""The way of spans to a collector: OpenTelemetry's SDK, over HTTP, in a thread of its own.

Spans wait in a queue of at most 2,048 (`OTEL_BSP_MAX_QUEUE_SIZE`), and a thread sends them. If the
collector is slow or away, the queue drops spans, and nobody waits. The environment's variables
`OTEL_*` hold as in any program with the SDK, but for a provider of credentials. Only `base.tracing`
imports this module, since it needs the extra `traces`.
"""

import io
import logging
import threading
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import requests
from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.prose import one_line
from pilotfish.base.version import VERSION

_log = logging.getLogger("pilotfish.traces")

_PATH: Final = "/v1/traces"
_CLOSE_S: Final = 2.0  # time limit for sending what is left at the end
_MOST_BYTES: Final = 64 << 10  # bytes of a collector's answer that are read
_sending = threading.local()  # `here`: whether this thread sends spans of ours


class CollectorExport:
    """A provider of tracers whose spans go to the collector at ``url``.

    service: the service's name, unless the environment names another. Raises `UnsupportedError` for
    an address that is not of HTTP, and for a setting of the environment that the SDK refuses.
    """

    def __init__(self, url: str, service: str) -> None:
        endpoint = _endpoint(url)
        logging.getLogger(trace_exporter.__name__).addFilter(_is_of_others)
        named = OTELResourceDetector().detect().attributes
        ours = {"service.name": service, "service.version": VERSION}
        try:
            resource = Resource.create({**ours, **named})
            # not closed at the interpreter's exit, which would wait for the collector for long
            self.provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            exporter = trace_exporter.OTLPSpanExporter(endpoint=endpoint, session=_Session())
            self.provider.add_span_processor(BatchSpanProcessor(_Sender(exporter, endpoint)))
        except ValueError as error:
            raise UnsupportedError(
                f"OpenTelemetry refuses a setting: {one_line(str(error), 200)}. Correct the "
                "environment's variables OTEL_*."
            ) from error

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
        is_address = url.isprintable() and " " not in url and _is_collector(urlsplit(url))
    except ValueError:  # the port or the IPv6 address is bad
        is_address = False
    if not is_address:
        raise UnsupportedError(
            f"{one_line(url, 100)!r} is not the address of a collector: write http://HOST:PORT or "
            "https://HOST."
        )
    base = url.rstrip("/")
    return base if base.endswith(_PATH) else base + _PATH


def _is_collector(parts: SplitResult) -> bool:
    is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    return is_http and not parts.query and not parts.fragment


def _is_of_others(_: logging.LogRecord) -> bool:
    """Return whether a record of the exporter's log is of another exporter than ours.

    The exporter logs each attempt. Of our spans `_Sender` logs the changes, and what a program
    exports itself is not ours to silence.
    """
    return not getattr(_sending, "here", False)


class _Session(requests.Session):
    """A session that follows no redirection, and reads at most 64 KiB of an answer.

    Spans, and the headers with a collector's key, are for the host that the user named.
    """

    def request(self, method: Any, url: Any, *args: Any, **options: Any) -> requests.Response:
        """Send a request; raise `requests.RequestException` if it is redirected."""
        options |= {"allow_redirects": False, "stream": True}
        with super().request(method, url, *args, **options) as received:
            if received.is_redirect or 300 <= received.status_code < 400:
                raise requests.TooManyRedirects("the collector redirects, which is not followed")
            # an answer that is read to its end leaves the connection open for the next request
            start = received.raw.read(_MOST_BYTES, decode_content=False)
        answer = requests.Response()
        answer.status_code, answer.reason = received.status_code, received.reason
        answer.headers, answer.url = received.headers, received.url
        answer.raw = io.BytesIO(start)
        return answer


class _Sender(SpanExporter):
    """Sends spans, and logs when the collector ceases or begins to take them."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        parts = urlsplit(endpoint)
        self._where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"  # leaves a password out
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans. Called by the SDK's thread."""
        _sending.here = True
        try:
            result = self._exporter.export(spans)
        except Exception:  # nothing about traces may end this thread
            result = SpanExportResult.FAILURE
        finally:
            _sending.here = False
        failed = result is not SpanExportResult.SUCCESS
        if failed and not self._failing:
            _log.warning("the collector at %s does not take traces; they are dropped", self._where)
        elif self._failing and not failed:
            _log.warning("the collector at %s takes traces again", self._where)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        """End an attempt under way."""
        _sending.here = True
        try:
            self._exporter.shutdown()
        finally:
            _sending.here = False

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return True: nothing waits here."""
        return True
