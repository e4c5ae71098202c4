"""Format an answer for ``/v1/responses``: as one body, or as the events of a stream.

In:  the parts of a turn, as they come, and its generation. Out: bodies. A body has the same items
as a stream. The field ``pilotfish``, a summary of the generation, is added to OpenAI's fields.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from pilotfish.device_runtime.record import Generation, Piece
from pilotfish.device_runtime.service.answers import summary, thought_tokens
from pilotfish.device_runtime.service.event_stream import COMMENT, named_event
from pilotfish.device_runtime.service.output_items import Output, OutputItem
from pilotfish.device_runtime.service.refusal import Body, RefusalError
from pilotfish.device_runtime.service.responses import ResponseRequest
from pilotfish.engines.chat_formats.reader import Turn, TurnPart


class _Item(OutputItem):
    """An item of a response: a message, a thought or a call."""

    def __init__(self, first: TurnPart, index: int) -> None:
        super().__init__(first, index)
        prefix = {"content": "msg_", "reasoning": "rs_", "call": "fc_"}[self.kind]
        self._at: Body = {"item_id": prefix + secrets.token_hex(24), "output_index": index}

    def body(self) -> Body:
        """Return the item as JSON types."""
        fields: Body = {"id": self._at["item_id"], "status": self.status}
        parts = [self._part()] if self.text else []
        match self.kind:
            case "content":
                return {**fields, "type": "message", "role": "assistant", "content": parts}
            case "reasoning":
                return {**fields, "type": "reasoning", "summary": [], "content": parts}
        return {
            **fields, "type": "function_call", "call_id": self.call_id,
            "name": self.name, "arguments": self.text,
        }  # fmt: skip

    def begin(self) -> Iterator[Body]:
        """Return the item's first events."""
        item = self.body()
        yield {"type": "response.output_item.added", "output_index": self.index, "item": item}
        if self.kind != "call":
            at = {**self._at, "content_index": 0}
            yield {"type": "response.content_part.added", **at, "part": self._part()}

    def delta(self, text: str) -> Iterator[Body]:
        """Return the event of a text that was added."""
        yield self._event("delta", delta=text)

    def end(self) -> Iterator[Body]:
        """Return the item's last events."""
        if self.kind == "call":
            yield {**self._event("done", arguments=self.text), "name": self.name}
        else:
            yield self._event("done", text=self.text)
            at = {**self._at, "content_index": 0}
            yield {"type": "response.content_part.done", **at, "part": self._part()}
        item = self.body()
        yield {"type": "response.output_item.done", "output_index": self.index, "item": item}

    def _part(self) -> Body:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def _event(self, what: str, **fields: str) -> Body:
        match self.kind:
            case "content":
                kind, also = "output_text", {"content_index": 0, "logprobs": []}
            case "reasoning":
                kind, also = "reasoning_text", {"content_index": 0}
            case _:
                kind, also = "function_call_arguments", {}
        return {"type": f"response.{kind}.{what}", **self._at, **also, **fields}


class ResponseFormat:
    """The format of one response.

    keep: called with a finished response and its turn, to store them. tokens: counts the tokens of
    a text.
    """

    quiet = COMMENT

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
        self._output = Output(_Item)
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
        for _ in self._output.end("incomplete"):
            pass
        response = {**self._response("failed"), "error": error}
        (event,) = self._numbered([{"type": "response.failed", "response": response}])
        return event

    def encode_event(self, body: Body) -> bytes:
        """Encode an event."""
        return named_event(body)

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
        thought = thought_tokens(generation, self._tokens)
        return {
            "input_tokens": generation.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": generation.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": len(generation.tokens),
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": generation.prompt_tokens + len(generation.tokens),
        }
