"""Format answers as OpenAI's bodies and chunks.

In: for each choice in turn, its pieces and then its `Generation`. Out: bodies.

Two fields are added to OpenAI's. In each chunk, ``choices[0].pilotfish`` is the origin of the
chunk's tokens. In an unstreamed answer, and in each choice's last chunk, ``pilotfish`` is a summary
of the generation; an unstreamed answer of several choices has a summary in each choice. The chunk
with the usage repeats the last choice's summary.
"""

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from math import inf

import msgspec

from pilotfish.device_runtime.record import Generation, Piece
from pilotfish.device_runtime.service.event_stream import COMMENT
from pilotfish.device_runtime.service.openai_logprobs import (
    TextOffsets,
    chat_logprobs,
    prompt_logprobs,
    text_logprobs,
)
from pilotfish.device_runtime.service.refusal import Body, RefusalError
from pilotfish.device_runtime.service.timings import timings
from pilotfish.engines.chat_formats.reader import Turn, TurnPart
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.wire.codecs.logprobs import TokenLogprob


class CompletionFormat:
    """The format of one answer on its route, chat or text.

    choices: number of answers to each prompt. echo: returns the text of the prompt with this index,
    with which its choices then begin; None: no echo. id_prompts: indices of the prompts that
    consist of ids, so that their texts include control tokens. words: tokenizer for the answer's
    log-probabilities; None: the answer has none. usage: a stream ends with the usage. best: number
    of each prompt's answers in a body, the answers with the highest mean log-probability; 0: all.
    scores: leave out the answers' tokens. prompt_words: tokenizer for the prompt's
    log-probabilities; None: the answer has none.
    """

    quiet = COMMENT

    def __init__(
        self,
        *,
        chat: bool,
        model: str,
        choices: int = 1,
        echo: Callable[[int], str] | None = None,
        id_prompts: Collection[int] = (),
        words: Tokenizer | None = None,
        usage: bool = False,
        best: int = 0,
        scores: bool = False,
        prompt_words: Tokenizer | None = None,
    ) -> None:
        self._chat = chat
        self._id = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        self._model = model
        self._created = int(time.time())
        self._choices = choices
        self._echo = echo
        self._id_prompts = id_prompts
        self._words = words
        self._sends_usage = usage
        self._best = best
        self._scores = scores
        self._prompt_words = prompt_words
        self._offsets: TextOffsets | None = (
            None  # text offsets of the current choice's tokens, if log-probabilities are sent
        )
        self._ended: list[Generation] = []
        self._begun = False  # whether the current choice has begun

    def full_body(self, generations: Sequence[Generation]) -> Body:
        """Return the body of an unstreamed answer; its usage counts all generations."""
        generations = [self._sent(generation) for generation in generations]
        by_prompt = [
            generations[at : at + self._choices] for at in range(0, len(generations), self._choices)
        ]
        returned = [
            (prompt, generation)
            for prompt, answers in enumerate(by_prompt)
            for generation in (most_likely(answers, self._best) if self._best else answers)
        ]
        choices = [self._choice(at, *choice) for at, choice in enumerate(returned)]
        summaries = [summary(generation) for _, generation in returned]
        if len(choices) > 1:
            choices = [
                {**choice, "pilotfish": generation_summary}
                for choice, generation_summary in zip(choices, summaries, strict=True)
            ]
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": usage(generations, self._choices),
            "timings": timings(generations),
            "pilotfish": summaries[0] if len(summaries) == 1 else None,
        }

    def _sent(self, generation: Generation) -> Generation:
        """Return the part of an answer that is sent."""
        if not self._scores:
            return generation
        return replace(generation, tokens=[], text="", parts=[], rounds=[], finish_reason="length")

    def _choice(self, index: int, prompt: int, generation: Generation) -> Body:
        choice: Body = {
            "index": index,
            "finish_reason": self._finish(generation),
            "logprobs": self._logprobs_of(prompt, generation),
        }
        if self._prompt_words is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                generation.prompt_ids, generation.prompt_logprobs, self._prompt_words
            )
        if self._chat:
            return {**choice, "message": message_body(generation.turn)}
        return {**choice, "text": self._prompt(prompt) + generation.text}

    def _finish(self, generation: Generation) -> str:
        ended = generation.finish_reason
        if not self._chat or ended != "stop":
            return ended
        return "tool_calls" if generation.turn.has_calls else ended

    def _logprobs_of(self, prompt: int, generation: Generation) -> Body | None:
        """Format an unstreamed answer's log-probabilities, after those of an echoed prompt."""
        self._offsets = self._answer_offsets(prompt)
        logprobs = self._logprobs(generation.tokens, generation.logprobs)
        if logprobs is None or self._words is None or self._echo is None:
            return logprobs
        before = generation.prompt_logprobs
        if not before:
            return logprobs
        offsets = TextOffsets(self._words, special=prompt in self._id_prompts)
        prompt_part = text_logprobs(generation.prompt_ids, before, self._words, offsets)
        return {name: prompt_part[name] + logprobs[name] for name in logprobs}

    def _answer_offsets(self, prompt: int) -> TextOffsets | None:
        """Return the text offsets of a new choice's tokens. prompt: index of its prompt."""
        return None if self._words is None else TextOffsets(self._words, len(self._prompt(prompt)))

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> Body | None:
        if self._words is None or self._offsets is None:
            return None
        if self._chat:
            return chat_logprobs(tokens, logprobs, self._words)
        return text_logprobs(tokens, logprobs, self._words, self._offsets)

    def _prompt(self, prompt: int) -> str:
        return "" if self._echo is None else self._echo(prompt)

    def start_events(self) -> list[Body]:
        """Return, once per choice, the chunks before its first token (in a chat, the role)."""
        if self._begun:
            return []
        self._begun = True
        prompt = len(self._ended) // self._choices
        self._offsets = self._answer_offsets(prompt)
        if self._chat:
            return [self._chunk({"role": "assistant", "content": ""})]
        return [self._chunk(self._prompt(prompt))] if self._echo is not None else []

    def piece_events(self, piece: Piece) -> list[Body]:
        """Return the chunks of one piece."""
        if self._scores:
            return self.start_events()
        content = delta_of(piece.parts) if self._chat else piece.text
        note: Body = {"origin": piece.origin, "tokens": len(piece.tokens)}
        if piece.key:
            note["key"] = True
        before = self.start_events()
        chunk = self._chunk(content, note=note)
        chunk["choices"][0]["logprobs"] = self._logprobs(piece.tokens, piece.logprobs)
        return [*before, chunk]

    def end_events(self, generation: Generation) -> list[Body]:
        """Return the chunks after a choice's last token."""
        generation = self._sent(generation)
        content: Body | str = {} if self._chat else ""
        last = self._chunk(content, finish=self._finish(generation))
        last |= {"timings": timings([generation]), "pilotfish": summary(generation)}
        events = [*self.start_events(), last]
        self._ended.append(generation)
        self._begun = False
        return events

    def error_event(self, refusal: RefusalError) -> Body:
        """Return the event that ends a stream with an error."""
        return refusal.body

    def encode_event(self, body: Body) -> bytes:
        """Encode a chunk."""
        return b"data: " + msgspec.json.encode(body) + b"\n\n"

    def closing_events(self) -> bytes:
        """Return the end of a stream; if the request wants the usage, its chunk comes first."""
        usage_event = self.encode_event(self._usage()) if self._sends_usage else b""
        return usage_event + b"data: [DONE]\n\n"

    def _usage(self) -> Body:
        return {
            **self._head("chat.completion.chunk"),
            "choices": [],
            "usage": usage(self._ended, self._choices),
            "timings": timings(self._ended),
            "pilotfish": summary(self._ended[-1]),
        }

    def _head(self, kind: str) -> Body:
        return {
            "id": self._id,
            "object": kind if self._chat else "text_completion",
            "created": self._created,
            "model": self._model,
        }

    def _chunk(
        self, content: "Body | str", *, finish: str | None = None, note: Body | None = None
    ) -> Body:
        choice: Body = {
            "index": len(self._ended),
            "delta" if self._chat else "text": content,
            "finish_reason": finish,
            "logprobs": None,
        }
        if note is not None:
            choice["pilotfish"] = note
        return {**self._head("chat.completion.chunk"), "choices": [choice]}


def message_body(turn: Turn) -> Body:
    """Format a turn as a message."""
    body: Body = {"role": "assistant", "content": turn.content, "refusal": None}
    if turn.reasoning:
        body["reasoning_content"] = turn.reasoning
    if turn.calls:
        body["content"] = turn.content or None
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in turn.calls
        ]
    return body


def delta_of(parts: Sequence[TurnPart]) -> Body:
    """Format the parts of a turn as a message's delta."""
    delta: Body = {}
    calls: dict[int, Body] = {}
    for part in parts:
        match part.kind:
            case "content":
                delta["content"] = delta.get("content", "") + part.text
            case "reasoning":
                delta["reasoning_content"] = delta.get("reasoning_content", "") + part.text
            case "call":
                function = {"name": part.text, "arguments": ""}
                calls[part.call] = {
                    "index": part.call, "id": part.id, "type": "function", "function": function
                }  # fmt: skip
            case "arguments":
                call = calls.setdefault(
                    part.call, {"index": part.call, "function": {"arguments": ""}}
                )
                call["function"]["arguments"] += part.text
    if calls:
        delta["tool_calls"] = [*calls.values()]
    return delta or {"content": ""}


def most_likely(answers: Sequence[Generation], most: int) -> list[Generation]:
    """Return the answers with the highest mean log-probability per token, highest first."""

    def by_token(answer: Generation) -> float:
        known = [token.logprob for token in answer.logprobs if token is not None]
        return sum(known) / len(known) if known else -inf

    return sorted(answers, key=by_token, reverse=True)[:most]


def usage(generations: Sequence[Generation], choices: int = 1) -> Body:
    """Count the tokens of all prompts and answers, end tokens included.

    choices: number of answers to each prompt; a prompt counts once. Of a request's prediction, the
    tokens that the answers repeat are counted as accepted, all others as rejected.
    """
    prompts = generations[::choices]
    prompt = sum(generation.prompt_tokens for generation in prompts)
    predicted = sum(generation.predicted_tokens for generation in generations)
    accepted = sum(generation.accepted_prediction_tokens for generation in generations)
    completion = sum(len(generation.tokens) for generation in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {
            "cached_tokens": sum(generation.cached_tokens for generation in prompts)
        },
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": predicted - accepted,
        },
    }


def thought_tokens(generation: Generation, tokens: Callable[[str], int]) -> int:
    """Count the tokens of an answer's thought by tokenising its text again.

    The text may have another tokenisation than the answer, so the count is at most the answer's.
    """
    thought = generation.turn.reasoning
    return min(tokens(thought), len(generation.tokens)) if thought else 0


def summary(generation: Generation) -> Body:
    """Summarise a generation; bytes count the frames that were sent, times are in milliseconds."""
    rounds = generation.rounds
    return {
        "protocol": generation.protocol,
        "window": max((round_.window for round_ in rounds), default=0),
        "rounds": len(rounds),
        "accepted": sum(round_.accepted for round_ in rounds),
        "forced": generation.forced,
        **generation.rounded_notes,
        "key_positions": generation.key_positions,
        "acceptance": round(generation.acceptance, 4),
        "tokens_per_s": round(generation.tokens_per_s, 2),
        "first_token_ms": round(generation.first_token_s * 1e3, 2),
        "total_ms": round(generation.total_s * 1e3, 2),
        "uplink_bytes": sum(round_.uplink_bytes for round_ in rounds),
        "downlink_bytes": sum(round_.downlink_bytes for round_ in rounds),
        "choice": None if generation.choice is None else generation.choice.reason,
        "pings": generation.probing.pings,
        "recoveries": [
            {
                "at": recovery.at,
                "lost_s": round(recovery.lost_s, 3),
                "local_tokens": recovery.local_tokens,
            }
            for recovery in generation.recoveries
        ],
    }
