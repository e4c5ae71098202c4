"""What asks a load's questions: a device on the wire, or a client of a device's HTTP service.

In:  the number of a prompt. Out: a `TimedAnswer`.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from pilotfish.base.errors import EdgeUnreachableError, PilotfishError, UnsupportedError
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.record import Generation
from pilotfish.lab.field.load.record import Record
from pilotfish.lab.field.load.timed_answer import TimedAnswer

_PATIENCE_S = 600.0  # longest wait for a service's next bytes
_DATA, _DONE = b"data: ", b"[DONE]"


class Client(Protocol):
    """Asks one question at a time."""

    def ask(self, device: int, prompt: int, asked_s: float) -> TimedAnswer:
        """Ask a prompt and wait for its answer. asked_s: when the question came."""

    def close(self) -> None:
        """End the connection; a running answer ends with an error."""


class WireClient:
    """A device of Pilotfish; its answers are as long as the recorded ones."""

    def __init__(self, device: Device, record: Record, options: dict[str, Any]) -> None:
        self._device, self._record, self._options = device, record, options

    def ask(self, device: int, prompt: int, asked_s: float) -> TimedAnswer:
        """Ask one of the record's prompts."""
        recorded = self._record.answers[prompt]
        arrivals: list[tuple[float, int]] = []
        options = {**self._options, "max_tokens": len(recorded.answer)}
        try:
            with self._device.stream(recorded.prompt.tolist(), owner=None, **options) as pieces:
                arrivals.extend(
                    (time.monotonic(), len(piece.tokens)) for piece in pieces if piece.tokens
                )
            generation = pieces.generation
            assert generation is not None
        except PilotfishError as error:
            return TimedAnswer(device=device, prompt=prompt, asked_s=asked_s, error=str(error))
        return TimedAnswer(
            device=device,
            prompt=prompt,
            asked_s=asked_s,
            arrivals=_by_round(arrivals, generation),
            rounds=len(generation.rounds),
            verify_s=sum(each.timings.verify for each in generation.rounds),
            drafted=sum(each.window for each in generation.rounds),
            accepted=sum(each.accepted for each in generation.rounds),
            parted=generation.tokens != recorded.answer.tolist(),
        )

    def close(self) -> None:
        """Close the device."""
        self._device.close()


def _by_round(
    arrivals: Sequence[tuple[float, int]], generation: Generation
) -> list[tuple[float, int]]:
    """Join the pieces of each round: they came in one message."""
    rounds: list[tuple[float, int]] = []
    wanted = iter([len(each.tokens) for each in generation.rounds if each.tokens])
    missing = 0
    for at_s, count in arrivals:
        if missing <= 0:
            missing += next(wanted, count)
            rounds.append((at_s, 0))
        first_s, before = rounds[-1]
        rounds[-1] = first_s, before + count
        missing -= count
    return rounds


class _Delta(Struct):
    content: str | None = None


class _StreamedChoice(Struct):
    delta: _Delta


class _Usage(Struct):
    completion_tokens: int


class _Event(Struct):
    """The fields of a chat completion's chunk that a client of a load reads."""

    choices: list[_StreamedChoice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


class ServiceClient:
    """A client of an OpenAI-compatible service, which streams chat completions.

    url: the service's address, ``http://HOST:PORT``. A chunk with content counts as one token; the
    service's count of tokens is the answer's length.
    """

    def __init__(self, url: str, prompts: Sequence[Any], max_tokens: int) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise UnsupportedError(f"{url} is not the address of a service, http://HOST:PORT.")
        self._url, self._prompts, self._max_tokens = url, prompts, max_tokens
        self._connection = http.client.HTTPConnection(
            parts.hostname, parts.port or 80, timeout=_PATIENCE_S
        )

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
        try:
            tokens = self._stream(json.dumps(body).encode(), arrivals)
        except (OSError, http.client.HTTPException, PilotfishError) as error:
            self._connection.close()  # the next question opens it again
            text = str(error) or type(error).__name__
            return TimedAnswer(device=device, prompt=prompt, asked_s=asked_s, error=text)
        if arrivals:
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
            raise EdgeUnreachableError(f"{self._url} answered {response.status}: {text}")
        tokens, is_whole = 0, False
        while line := response.readline():
            if not line.startswith(_DATA):
                continue
            if line[len(_DATA) :].strip() == _DONE:
                is_whole = True
                continue
            at_s = time.monotonic()
            try:
                event = _DECODER.decode(line[len(_DATA) :])
            except msgspec.DecodeError as error:
                raise EdgeUnreachableError(
                    f"{self._url} sent what is no chat completion: {error}."
                ) from error
            if event.error is not None:
                raise EdgeUnreachableError(f"{self._url} failed: {event.error}")
            if event.usage is not None:
                tokens = event.usage.completion_tokens
            if any(choice.delta.content for choice in event.choices):
                arrivals.append((at_s, 1))
        if not is_whole:
            raise EdgeUnreachableError(f"{self._url} ended before its answer was complete.")
        if not arrivals:
            raise EdgeUnreachableError(f"{self._url} sent no token.")
        return tokens

    def close(self) -> None:
        """End the connection; a thread that reads from it gets an error."""
        connected = self._connection.sock
        if connected is not None:
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
