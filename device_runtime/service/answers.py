"""Format answers as OpenAI's bodies and chunks.

In: pieces, and the finished generation. Two fields are added, which other clients ignore: each
chunk has the origin of its tokens (``choices[0].pilotfish``), and the whole answer, or its last
chunk, a summary of the generation (``pilotfish``).
"""

import secrets
import time
from typing import Any

from pilotfish.device_runtime.record import Generation, Piece

Body = dict[str, Any]


class AnswerFormat:
    """Formats one answer for its route, chat or text."""

    def __init__(self, *, chat: bool, model: str) -> None:
        self._chat = chat
        self._id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._model = model
        self._created = int(time.time())

    def whole(self, generation: Generation) -> Body:
        """Return the body of an answer that is not streamed."""
        choice: Body = {
            "index": 0,
            "finish_reason": generation.finish_reason,
            "logprobs": None,
        }
        if self._chat:
            choice["message"] = {
                "role": "assistant",
                "content": generation.text,
                "refusal": None,
            }
        else:
            choice["text"] = generation.text
        return {
            **self._head("chat.completion"),
            "choices": [choice],
            "usage": usage(generation),
            "pilotfish": summary(generation),
        }

    def beginning(self) -> list[Body]:
        """Return the chunks before the first token: in a chat, the role."""
        return [self._chunk({"role": "assistant", "content": ""})] if self._chat else []

    def piece(self, piece: Piece) -> Body:
        """Return the chunk of one piece."""
        said = {"content": piece.text} if self._chat else piece.text
        return self._chunk(said, told={"origin": piece.origin, "tokens": len(piece.tokens)})

    def end(self, generation: Generation, *, include_usage: bool) -> list[Body]:
        """Return the chunks after the last token."""
        last = self._chunk({} if self._chat else "", finish=generation.finish_reason)
        if not include_usage:
            return [{**last, "pilotfish": summary(generation)}]
        final = {**self._head("chat.completion.chunk"), "choices": []}
        return [
            last,
            {**final, "usage": usage(generation), "pilotfish": summary(generation)},
        ]

    def _head(self, kind: str) -> Body:
        return {
            "id": self._id,
            "object": kind if self._chat else "text_completion",
            "created": self._created,
            "model": self._model,
        }

    def _chunk(
        self, said: "Body | str", *, finish: str | None = None, told: Body | None = None
    ) -> Body:
        choice: Body = {
            "index": 0,
            "delta" if self._chat else "text": said,
            "finish_reason": finish,
            "logprobs": None,
        }
        if told is not None:
            choice["pilotfish"] = told
        return {**self._head("chat.completion.chunk"), "choices": [choice]}


def usage(generation: Generation) -> Body:
    """Count the tokens of prompt and answer, the end token included."""
    prompt, completion = generation.prompt_tokens, len(generation.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def summary(generation: Generation) -> Body:
    """Summarise a generation. Bytes are of frames as sent, times milliseconds."""
    rounds = generation.rounds
    return {
        "protocol": generation.protocol,
        "window": max((one.window for one in rounds), default=0),
        "rounds": len(rounds),
        "accepted": sum(one.accepted for one in rounds),
        **generation.rounded_notes,
        "acceptance": round(generation.acceptance, 4),
        "tokens_per_s": round(generation.tokens_per_s, 2),
        "first_token_ms": round(generation.first_token_s * 1e3, 2),
        "total_ms": round(generation.total_s * 1e3, 2),
        "uplink_bytes": sum(one.uplink_bytes for one in rounds),
        "downlink_bytes": sum(one.downlink_bytes for one in rounds),
        "choice": None if generation.choice is None else generation.choice.reason,
        "recoveries": [
            {"at": one.at, "lost_s": round(one.lost_s, 3), "local_tokens": one.local_tokens}
            for one in generation.recoveries
        ],
    }
