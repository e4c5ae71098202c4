"""Format an answer for Anthropic's ``/v1/messages``: as one body, or as the events of a stream.

In:  the parts of a turn, as they come, and its generation. Out: bodies. A body has the same blocks
as a stream. The field ``pilotfish``, a summary of the generation, is added to Anthropic's fields:
in a body, and in the event ``message_delta``.
"""

import base64
import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from pilotfish.device_runtime.record import Generation, Piece
from pilotfish.device_runtime.service.answers import summary, thought_tokens
from pilotfish.device_runtime.service.event_stream import named_event
from pilotfish.device_runtime.service.messages import MessageRequest
from pilotfish.device_runtime.service.output_items import Output, OutputItem
from pilotfish.device_runtime.service.refusal import Body, RefusalError
from pilotfish.engines.chat_formats.reader import TurnPart

_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(refusal: RefusalError) -> Body:
    """Return a refusal's body: Anthropic's error, whose details name the error and the field."""
    default = "api_error" if refusal.status >= 500 else "invalid_request_error"
    error = {
        "type": _ERROR_TYPES.get(refusal.status, default),
        "message": refusal.message,
        "details": {"error_code": refusal.code, "param": refusal.param},
    }
    return {"type": "error", "error": error}


class _Block(OutputItem):
    """A block of a message: a text, a thought or a call. hidden: thoughts are sent empty."""

    def __init__(self, first: TurnPart, index: int, *, hidden: bool) -> None:
        super().__init__(first, index)
        self._hidden = hidden and self.kind == "reasoning"

    def body(self) -> Body:
        """Return the block as JSON types."""
        match self.kind:
            case "content":
                return {"type": "text", "text": self.text}
            case "reasoning":
                thought = "" if self._hidden else self.text
                return {"type": "thinking", "thinking": thought, "signature": self._signature}
        input = _object_of(self.text)
        return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": input}

    def begin(self) -> Iterator[Body]:
        """Return the block's first event."""
        yield {"type": "content_block_start", "index": self.index, "content_block": self.body()}

    def delta(self, text: str) -> Iterator[Body]:
        """Return the event of a text that was added."""
        match self.kind:
            case "content":
                yield self._delta("text_delta", text=text)
            case "reasoning" if not self._hidden:
                yield self._delta("thinking_delta", thinking=text)
            case "call":
                yield self._delta("input_json_delta", partial_json=text)

    def end(self) -> Iterator[Body]:
        """Return the block's last events."""
        if self.kind == "reasoning":
            yield self._delta("signature_delta", signature=self._signature)
        yield {"type": "content_block_stop", "index": self.index}

    @property
    def _signature(self) -> str:
        """A digest of the thought: clients send a thought back only if it has a signature."""
        digest = hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).digest()
        return base64.b64encode(digest).decode() if self.text else ""

    def _delta(self, kind: str, **fields: str) -> Body:
        delta = {"type": kind, **fields}
        return {"type": "content_block_delta", "index": self.index, "delta": delta}


def _object_of(arguments: str) -> Body:
    """Return a call's arguments; {} if they are cut off."""
    try:
        fields = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


class MessageFormat:
    """The format of one message.

    tokens: counts the tokens of a text. prompt_tokens: for the first event of a stream; 0 until the
    prompt has been read.
    """

    quiet = named_event({"type": "ping"})

    def __init__(
        self, request: MessageRequest, *, model: str, tokens: Callable[[str], int]
    ) -> None:
        self._model = model
        self._tokens = tokens
        self._most = request.completion.request.max_tokens
        self._output = Output(partial(_Block, hidden=request.hides_thoughts))
        self._begun = False
        self.prompt_tokens = 0

    def full_body(self, generations: Sequence[Generation]) -> Body:
        """Return an unstreamed message."""
        (generation,) = generations
        for _ in self._output.push(generation.parts):
            pass
        for _ in self._output.end("completed"):
            pass
        return {
            **self._message(),
            "content": self._output.items(),
            **self._ending(generation),
            "usage": self._usage(generation),
            "pilotfish": summary(generation),
        }

    def start_events(self) -> list[Body]:
        """Return the event before the first block; later calls return none."""
        if self._begun:
            return []
        self._begun = True
        return [{"type": "message_start", "message": self._message()}]

    def piece_events(self, piece: Piece) -> list[Body]:
        """Return the events of one piece."""
        return [*self.start_events(), *self._output.push(piece.parts)]

    def end_events(self, generation: Generation) -> list[Body]:
        """Return the events after the last piece."""
        last = {
            "type": "message_delta",
            "delta": self._ending(generation),
            "usage": self._usage(generation),
            "pilotfish": summary(generation),
        }
        stop = {"type": "message_stop"}
        return [*self.start_events(), *self._output.end("completed"), last, stop]

    def error_event(self, refusal: RefusalError) -> Body:
        """Return the event that ends a stream with an error."""
        return error_body(refusal)

    def encode_event(self, body: Body) -> bytes:
        """Encode an event."""
        return named_event(body)

    def closing_events(self) -> bytes:
        """Return nothing: the last event ends a stream."""
        return b""

    def _message(self) -> Body:
        """Return a message without content."""
        return {
            "id": "msg_" + secrets.token_hex(12),
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(self.prompt_tokens, 0, 0),
        }

    def _ending(self, generation: Generation) -> Body:
        reason, string = "end_turn", None
        if generation.finish_reason == "length":
            limited = self._most is not None and len(generation.tokens) >= self._most
            reason = "max_tokens" if limited else "model_context_window_exceeded"
        elif generation.turn.has_calls:
            reason = "tool_use"
        elif generation.stop_string is not None:
            reason, string = "stop_sequence", generation.stop_string
        return {"stop_reason": reason, "stop_sequence": string}

    def _usage(self, generation: Generation) -> Body:
        details = {"thinking_tokens": thought_tokens(generation, self._tokens)}
        cached = generation.cached_tokens
        usage = _usage(generation.prompt_tokens - cached, cached, len(generation.tokens))
        return {**usage, "output_tokens_details": details}


def _usage(prompt: int, cached: int, answer: int) -> Body:
    return {
        "input_tokens": prompt,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": answer,
    }
