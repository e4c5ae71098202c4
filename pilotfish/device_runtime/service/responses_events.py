"""Format an answer for ``/v1/responses``: as one body, or as the events of a stream.

In:  the parts of a turn, as they come, and its generation. Out: bodies. A body has the same items
as a stream. The field ``pilotfish``, a summary of the generation, is added to OpenAI's fields.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import msgspec

from pilotfish.device_runtime.record import Generation, Piece
from pilotfish.device_runtime.service.answers import summary
from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.device_runtime.service.responses import ResponseRequest
from pilotfish.engines.chat_formats.reader import Turn, TurnPart

Body = dict[str, Any]


class _Item:
    """An item of the output, to which text is added: a message, a thought or a call."""

    def __init__(self, first: TurnPart, index: int) -> None:
        self.kind = "call" if first.kind == "arguments" else first.kind
        self._name, self._call_id = (first.text, first.id) if self.kind == "call" else ("", "")
        prefix = {"content": "msg_", "reasoning": "rs_", "call": "fc_"}[self.kind]
        self._at: Body = {"item_id": prefix + secrets.token_hex(24), "output_index": index}
        self._texts: list[str] = []

    def body(self, status: str) -> Body:
        """Return the item as JSON types."""
        fields: Body = {"id": self._at["item_id"], "status": status}
        parts = [self._part()] if self._texts else []
        match self.kind:
            case "content":
                return {**fields, "type": "message", "role": "assistant", "content": parts}
            case "reasoning":
                return {**fields, "type": "reasoning", "summary": [], "content": parts}
        arguments = "".join(self._texts)
        return {
            **fields, "type": "function_call", "call_id": self._call_id,
            "name": self._name, "arguments": arguments,
        }  # fmt: skip

    def begin(self) -> Iterator[Body]:
        """Return the item's first events."""
        index = self._at["output_index"]
        item = self.body("in_progress")
        yield {"type": "response.output_item.added", "output_index": index, "item": item}
        if self.kind != "call":
            at = {**self._at, "content_index": 0}
            yield {"type": "response.content_part.added", **at, "part": self._part()}

    def grow(self, text: str) -> Body:
        """Add a text to the item; return the event."""
        self._texts.append(text)
        return self._event("delta", delta=text)

    def end(self, status: str) -> Iterator[Body]:
        """Return the item's last events."""
        text = "".join(self._texts)
        if self.kind == "call":
            yield {**self._event("done", arguments=text), "name": self._name}
        else:
            yield self._event("done", text=text)
            at = {**self._at, "content_index": 0}
            yield {"type": "response.content_part.done", **at, "part": self._part()}
        index = self._at["output_index"]
        item = self.body(status)
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def _part(self) -> Body:
        text = "".join(self._texts)
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _event(self, what: str, **fields: str) -> Body:
        match self.kind:
            case "content":
                kind, also = "output_text", {"content_index": 0, "logprobs": []}
            case "reasoning":
                kind, also = "reasoning_text", {"content_index": 0}
            case _:
                kind, also = "function_call_arguments", {}
        return {"type": f"response.{kind}.{what}", **self._at, **also, **fields}


class _Output:
    """The items of a response; text may be added to the last one."""

    def __init__(self) -> None:
        self._ended: list[Body] = []
        self._last: _Item | None = None

    def push(self, parts: Sequence[TurnPart]) -> Iterator[Body]:
        """Add parts to the items; return the events."""
        for part in parts:
            kind = "call" if part.kind == "arguments" else part.kind
            item = self._last
            if item is None or item.kind != kind or part.kind == "call":
                yield from self.end("completed")
                item = self._last = _Item(part, len(self._ended))
                yield from item.begin()
            if part.kind != "call":
                yield item.grow(part.text)

    def end(self, status: str) -> Iterator[Body]:
        """Return the events that end the last item."""
        if self._last is not None:
            yield from self._last.end(status)
            self._ended.append(self._last.body(status))
            self._last = None

    def items(self) -> list[Body]:
        """Return the items so far."""
        last = [] if self._last is None else [self._last.body("incomplete")]
        return [*self._ended, *last]


class ResponseFormat:
    """The format of one response.

    keep: called with a finished response and its turn, to store them. tokens: counts the tokens of
    a text.
    """

    def __init__(
        self,
        request: ResponseRequest,
        *,
        model: str,
        keep: Callable[[Body, Turn], None] | None,
        tokens: Callable[[str], int],
    ) -> None:
        self._head: Body = {
            "id": "resp_" + secrets.token_hex(24),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **request.echo,
        }
        self._keep = keep
        self._tokens = tokens
        self._output = _Output()
        self._begun = False
        self._numbers = count()

    def full_body(self, generations: Sequence[Generation]) -> Body:
        """Return an unstreamed response."""
        (generation,) = generations
        for _ in self._output.push(generation.parts):
            pass
        last = [*self._last_events(generation)][-1]
        response: Body = last["response"]
        return response

    def start_events(self) -> list[Body]:
        """Return the events before the first item; later calls return none."""
        if self._begun:
            return []
        self._begun = True
        response = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        return self._numbered({"type": kind, "response": response} for kind in kinds)

    def piece_events(self, piece: Piece) -> list[Body]:
        """Return the events of one piece."""
        return [*self.start_events(), *self._numbered(self._output.push(piece.parts))]

    def end_events(self, generation: Generation) -> list[Body]:
        """Return the events after the last piece."""
        return [*self.start_events(), *self._numbered(self._last_events(generation))]

    def error_event(self, refusal: RefusalError) -> Body:
        """Return the event that ends a stream with an error."""
        error = {"code": refusal.code or "server_error", "message": refusal.message}
        response = {**self._response("failed"), "error": error}
        (event,) = self._numbered([{"type": "response.failed", "response": response}])
        return event

    def encode_event(self, body: Body) -> bytes:
        """Encode an event."""
        name: str = body["type"]
        return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(body) + b"\n\n"

    def closing_events(self) -> bytes:
        """Return nothing: the last event ends a stream."""
        return b""

    def _numbered(self, events: "Iterator[Body] | Sequence[Body]") -> list[Body]:
        return [{**event, "sequence_number": next(self._numbers)} for event in events]

    def _last_events(self, generation: Generation) -> Iterator[Body]:
        status = "incomplete" if generation.finish_reason == "length" else "completed"
        yield from self._output.end(status)
        response = {**self._response(status), "usage": self._usage(generation)}
        response["pilotfish"] = summary(generation)
        if status == "completed":
            response["completed_at"] = int(time.time())
        else:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._keep is not None:
            self._keep(response, generation.turn)
        yield {"type": f"response.{status}", "response": response}

    def _response(self, status: str) -> Body:
        return {
            **self._head,
            "status": status,
            "output": self._output.items(),
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }

    def _usage(self, generation: Generation) -> Body:
        thought = generation.turn.reasoning
        return {
            "input_tokens": generation.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": generation.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": len(generation.tokens),
            "output_tokens_details": {"reasoning_tokens": self._tokens(thought) if thought else 0},
            "total_tokens": generation.prompt_tokens + len(generation.tokens),
        }
