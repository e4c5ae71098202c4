"""A client of an OpenAI-compatible service: of a device's, or of any other.

In:  the number of a prompt. Out: a `TimedAnswer`. Nothing that the service sends is believed: what
is too long, or is no chat completion, fails the answer.
"""

from __future__ import annotations

import http.client
import json
import math
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from pilotfish.base.errors import EdgeUnreachableError, PilotfishError, UnsupportedError
from pilotfish.lab.field.load.timed_answer import TimedAnswer

_TIMEOUT_S = 120.0  # longest wait for a service's next bytes
_LONGEST_LINE = 1 << 20  # bytes
_LONGEST_REASON = 300  # letters of a service's own words in an error
_DATA, _DONE = b"data: ", b"[DONE]"


class _Delta(Struct):
    content: str | None = None


class _StreamedChoice(Struct):
    delta: _Delta


class _Usage(Struct):
    completion_tokens: Annotated[int, Meta(ge=0)]


class _Event(Struct):
    """The fields of a chat completion's chunk that a client of a load reads."""

    choices: list[_StreamedChoice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


def address_of(url: str) -> tuple[str, int]:
    """Return a service's host and port; raises `UnsupportedError` for what is no such address."""
    with suppress(ValueError):  # brackets without an address, or an impossible port
        parts = urlsplit(url)
        if parts.scheme == "http" and parts.hostname and parts.port != 0:
            return parts.hostname, parts.port or 80
    raise UnsupportedError(f"{url} is not the address of a service, http://HOST:PORT.")


class ServiceClient:
    """A client of an OpenAI-compatible service, which streams chat completions.

    url: the service's address, ``http://HOST:PORT``. A chunk with content counts as one token; the
    service's count of tokens is the answer's length.
    """

    def __init__(self, url: str, prompts: Sequence[Any], max_tokens: int) -> None:
        host, port = address_of(url)
        self._url, self._prompts, self._max_tokens = url, prompts, max_tokens
        self.last_token_s = math.inf
        self._connection = http.client.HTTPConnection(host, port, timeout=_TIMEOUT_S)

    def ask(self, device: int, prompt: int, asked_s: float) -> TimedAnswer:
        """Ask one of the prompts."""
        question = self._prompts[prompt]
        messages = (
            [{"role": "user", "content": question}] if isinstance(question, str) else question
        )
        body = {
            "model": "pilotfish",
            "messages": messages,
            "max_tokens": self._max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        arrivals: list[tuple[float, int]] = []
        self.last_token_s = time.monotonic()
        tokens, text = 0, ""
        try:
            tokens = self._stream(json.dumps(body).encode(), arrivals)
        except PilotfishError as error:
            text = str(error)
        except OSError as error:
            text = f"{self._url} cannot be reached: {error.strerror or error}."
        except http.client.HTTPException as error:
            words = _printable(str(error)) or type(error).__name__
            text = f"{self._url} sent what is no answer of HTTP: {words}."
        finally:
            self.last_token_s = math.inf
        if text:
            self._connection.close()  # the next question opens it again
            return TimedAnswer(device=device, prompt=prompt, asked_s=asked_s, error=text)
        # tokens without text (a part of a letter, the end token) arrive with their successors
        last_s, _ = arrivals[-1]
        arrivals[-1] = last_s, max(1, tokens - len(arrivals) + 1)
        return TimedAnswer(device=device, prompt=prompt, asked_s=asked_s, arrivals=arrivals)

    def _stream(self, body: bytes, arrivals: list[tuple[float, int]]) -> int:
        """Send a request and note the arrivals; returns the number of tokens that it used."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        self._connection.request("POST", "/v1/chat/completions", body, headers)
        response = self._connection.getresponse()
        if response.status != 200:
            text = response.read(2000).decode(errors="replace")
            raise self._error(f"answered {response.status}: {_printable(text) or response.reason}")
        tokens, is_whole = 0, False
        while line := response.readline(_LONGEST_LINE):
            if len(line) == _LONGEST_LINE:
                raise self._error("sent a line that does not end")
            if not line.startswith(_DATA):
                continue
            if line[len(_DATA) :].strip() == _DONE:
                is_whole = True
                continue
            event = self._event(line[len(_DATA) :])
            if event.usage is not None:
                tokens = event.usage.completion_tokens
            if any(choice.delta.content for choice in event.choices):
                self.last_token_s = time.monotonic()
                arrivals.append((self.last_token_s, 1))
            # the last token's text may come in two chunks
            if len(arrivals) > self._max_tokens + 1 or tokens > self._max_tokens:
                raise self._error(f"sent more than the {self._max_tokens} tokens that it may")
        if not is_whole:
            raise self._error("ended before its answer was complete")
        if not arrivals:
            raise self._error("sent no token")
        return tokens

    def _event(self, data: bytes) -> _Event:
        """Decode a chunk; raise an error that it tells."""
        try:
            event = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise self._error(f"sent what is no chat completion: {error}") from error
        if event.error is not None:
            raise self._error(f"failed: {_printable(str(event.error))}")
        return event

    def _error(self, what: str) -> PilotfishError:
        return EdgeUnreachableError(f"{self._url} {what.rstrip('.')}.")

    def close(self) -> None:
        """End the connection; a thread that reads from it gets an error."""
        connected = self._connection.sock
        if connected is not None:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)


def _printable(text: str) -> str:
    """Return a service's words without control characters, on one line and not too long."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}…"
