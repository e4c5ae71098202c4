"""The device's spans of an answer: one for the answer, and children for prompt, rounds and losses.

In:  rounds and losses of the edge, as they happen. Out: spans, at the answer's end.

While an answer runs, a round costs a few additions here. Spans are made after the answer, and their
number is bounded: each of the first rounds has its own span, under `stream` and `ahead` each of the
first messages has an event of one span, and the answer's span has the sums of all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any, Final

from pilotfish.base.errors import PilotfishError
from pilotfish.base.tracing import Attributes, Event, Tracer
from pilotfish.bridge import Prompt, PromptInput
from pilotfish.bridge.prompt import are_messages
from pilotfish.device_runtime.record import Generation, Piece, Round
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire.protocols import LOCAL, streams
from pilotfish.wire.request import Request

_MOST_ROUNDS: Final = 32  # rounds with a span of their own, messages with an event
_MOST_LOSSES: Final = 16  # losses of the edge, and runs of the drafter alone, with a span
_REQUESTED: Final = (
    *("temperature", "top_p", "top_k", "seed", "max_tokens"),
    *("frequency_penalty", "presence_penalty"),
)  # options that OpenTelemetry's conventions name
_STAGES: Final = ("draft", "uplink", "queue", "verify", "downlink")  # a round's, in its span
_NS: Final = 1e-9


class AnswerTrace:
    """The spans of one answer, for the thread that answers.

    traceparent: the answer's span for the edge; None without a trace. The attributes are those of
    OpenTelemetry's conventions for generative AI, and ``pilotfish.*``.
    """

    def __init__(self, tracer: Tracer, source: PromptInput | Prompt, request: Request) -> None:
        self._operation = "chat" if _is_chat(source) else "text_completion"
        options = {
            f"gen_ai.request.{name}": value
            for name in _REQUESTED
            if (value := getattr(request, name)) is not None
        }
        self._span = tracer.start(
            self._operation,
            "client",
            attributes={
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": "pilotfish",
                **options,
            },
        )
        self.traceparent = self._span.traceparent
        self._read_ns = 0  # when the prompt was sent, and read by the drafter
        self._rounds = self._uplink = self._downlink = self._drafted = self._accepted = 0
        self._tokens = self._local = self._losses = 0
        self._pass_s = 0.0
        # begin, end and tokens of the drafter's present run alone; begin 0: none
        self._alone = 0, 0, 0
        # begin and end of each of the first rounds, or messages of a stream
        self._first_rounds: list[tuple[int, int, Round]] = []
        self._streamed_ns: tuple[int, int] | None = None  # begin and end of all messages

    def note_prompt(self) -> None:
        """Note that the edge has the prompt, and that the drafter has read it."""
        self._read_ns = self._read_ns or time.monotonic_ns()

    def add(self, record: Round) -> None:
        """Add a round that has just ended."""
        if not self._span.recording:
            return
        now_ns = time.monotonic_ns()
        begun_ns = now_ns - int(record.timings.total / _NS)
        self._tokens += len(record.tokens)
        if record.protocol == LOCAL:
            since_ns, _, tokens = self._alone
            self._alone = since_ns or begun_ns, now_ns, tokens + len(record.tokens)
            self._local += len(record.tokens)
            return
        self._end_alone()
        self._rounds += 1
        self._uplink += record.uplink_bytes
        self._downlink += record.downlink_bytes
        self._drafted += record.window
        self._accepted += record.accepted
        self._pass_s += record.pass_s
        if self._rounds <= _MOST_ROUNDS:
            self._first_rounds.append((begun_ns, now_ns, record))
        if streams(record.protocol):
            first_ns = begun_ns if self._streamed_ns is None else self._streamed_ns[0]
            self._streamed_ns = first_ns, now_ns

    def add_loss(self, lost_ns: int, back_ns: int) -> None:
        """Add a loss of the edge, from noticing it until tokens were verified again."""
        self._losses += 1
        if self._losses <= _MOST_LOSSES:
            self._span.child("edge away", lost_ns, back_ns, error="edge-lost")

    def _end_alone(self) -> None:
        """End the drafter's present run alone, if there is one."""
        since_ns, until_ns, tokens = self._alone
        self._alone = 0, 0, 0
        if since_ns and self._losses < _MOST_LOSSES:
            self._span.child("drafter alone", since_ns, until_ns, {"pilotfish.tokens": tokens})

    def follow(
        self,
        pieces: Generator[Piece, None, None],
        last: Callable[[], tuple[Generation | None, Vocabulary]],
    ) -> Generator[Piece, None, None]:
        """Return the pieces of an answer, which end its spans, also if none of them is read.

        last: returns the answer after its last piece, and the target's vocabulary.
        """
        followed = self._follow(pieces, last)
        next(followed)  # a generator that has not begun would not notice its closing
        return followed

    def _follow(
        self,
        pieces: Generator[Piece, None, None],
        last: Callable[[], tuple[Generation | None, Vocabulary]],
    ) -> Generator[Any, None, None]:
        """Yield None at once, then the pieces; end the spans with them."""
        try:
            with closing(pieces):
                yield None
                yield from pieces
        except GeneratorExit:  # the reader has closed the answer
            self._end(None, last()[1], "")
            raise
        except BaseException as error:
            self._end(None, last()[1], error_code(error))
            raise
        self._end(*last(), "")

    def fail(self, error: BaseException) -> None:
        """End the span of an answer that could not begin."""
        self._span.end(error=error_code(error))

    def _end(self, answer: Generation | None, target: Vocabulary, error: str) -> None:
        span, now_ns = self._span, time.monotonic_ns()
        if not span.recording:
            span.end(now_ns, error)
            return
        self._end_alone()
        if self._read_ns:
            span.child("prompt", span.begun_ns, self._read_ns)
        if self._streamed_ns is not None:
            events = [
                Event("tokens", at_ns, _round_attributes(each))
                for _, at_ns, each in self._first_rounds
            ]
            span.child("tokens", *self._streamed_ns, events=events)
        else:
            for begun_ns, ended_ns, each in self._first_rounds:
                span.child("round", begun_ns, ended_ns, _round_attributes(each))
        attributes: dict[str, str | int | float | list[str]] = {
            "gen_ai.request.model": target.model,
            "gen_ai.response.model": target.model,
            "gen_ai.usage.output_tokens": self._tokens,
            "pilotfish.rounds": self._rounds,
            "pilotfish.drafted_tokens": self._drafted,
            "pilotfish.accepted_tokens": self._accepted,
            "pilotfish.local_tokens": self._local,
            "pilotfish.edge_losses": self._losses,
            "pilotfish.uplink_bytes": self._uplink,
            "pilotfish.downlink_bytes": self._downlink,
            "pilotfish.pass_s": self._pass_s,
        }
        if answer is None:
            attributes["gen_ai.response.finish_reasons"] = ["error" if error else "cancelled"]
        else:
            attributes |= _answer_attributes(answer)
        span.set(attributes, f"{self._operation} {target.model}")
        span.end(now_ns, error)


def error_code(error: BaseException) -> str:
    """Return what a span says of an error: its code, or its type."""
    return error.code if isinstance(error, PilotfishError) else type(error).__name__


def _is_chat(source: PromptInput | Prompt) -> bool:
    """Return whether an answer to this prompt is a turn of a chat."""
    if isinstance(source, Prompt):
        return source.is_chat_turn
    return isinstance(source, str) or are_messages(source) or not isinstance(source, list | tuple)


def _round_attributes(record: Round) -> Attributes:
    """Return the attributes of a round, or of a message of a stream."""
    described: dict[str, str | int | float] = {
        "pilotfish.tokens": len(record.tokens),
        "pilotfish.pass_s": record.pass_s,
    }
    if record.window:
        described["pilotfish.window"] = record.window
        described["pilotfish.accepted_tokens"] = record.accepted
    if streams(record.protocol):
        if record.source:
            described["pilotfish.hint_source"] = record.source
        return described
    described["pilotfish.uplink_bytes"] = record.uplink_bytes
    described["pilotfish.downlink_bytes"] = record.downlink_bytes
    for stage in _STAGES:
        described[f"pilotfish.{stage}_s"] = getattr(record.timings, stage)
    return described


def _answer_attributes(answer: Generation) -> dict[str, str | int | float | list[str]]:
    """Return the attributes of a whole answer."""
    outcome: dict[str, str | int | float | list[str]] = {
        "gen_ai.usage.input_tokens": answer.prompt_tokens,
        "gen_ai.usage.output_tokens": len(answer.tokens),
        "gen_ai.usage.cache_read.input_tokens": answer.cached_tokens,
        "gen_ai.response.finish_reasons": [answer.finish_reason],
        "gen_ai.response.time_to_first_chunk": answer.first_token_s,
        "pilotfish.protocol": answer.protocol,
        "pilotfish.window": max((each.window for each in answer.rounds), default=0),
    }
    if answer.link is not None and answer.link.rtt is not None:
        outcome["pilotfish.rtt_s"] = answer.link.rtt.value
    return outcome
