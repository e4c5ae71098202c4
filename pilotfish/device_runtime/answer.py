"""Build an answer from rounds: tokens, text, and its parts (words, thought, calls).

In:  rounds. Out: pieces. The answer ends at an end token, a stop string, or the token limit.
"""

from collections.abc import Collection, Sequence
from functools import partial

from pilotfish.base.errors import BadGrammarError, UnsupportedError
from pilotfish.bridge import Prompt
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Piece, Round
from pilotfish.engines.chat_formats.outline import Outline
from pilotfish.engines.chat_formats.reader import TurnPart, TurnReader
from pilotfish.engines.engine_errors import GrammarBusyError, GrammarError
from pilotfish.engines.grammar import Grammars
from pilotfish.engines.relaxation import find_obstacle, with_relaxed_tools
from pilotfish.engines.schemas import assertions
from pilotfish.engines.tokenizer import TextStream
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.speculation.logits_options import Grammar
from pilotfish.wire.messages import MAX_GRAMMAR

_TAIL = 16  # number of last prompt tokens that are searched for the beginning of a thought


def answer_outline(prompt: Prompt, target: Vocabulary, content: Grammar | None) -> Outline:
    """Return the outline of the answers to a prompt. content: the answer's grammar, if any.

    Raises `UnsupportedError` if an answer cannot call the prompt's tools.
    """
    content = _simplify(content)
    if not prompt.is_chat_turn or target.chat_template is None:
        return Outline(content=content)
    chat_format = target.chat_format
    tail = target.tokenizer.decode(prompt.ids[-_TAIL:].tolist(), special=True)
    tools = prompt.tools
    try:
        outline = Outline.for_chat_format(
            chat_format,
            target.chat_template,
            tools=tools,
            content=content,
            thinking=tail.rstrip().endswith(chat_format.thought[0].rstrip()),
        )
    except GrammarError as error:
        raise UnsupportedError(str(error)) from error
    if tools is None:
        return outline
    strict = {tool.name for tool in tools.callable if tool.strict}
    outline = with_relaxed_tools(outline, strict, partial(_fits, grammars=target.grammars))
    if (size := _grammar_bytes(outline)) > MAX_GRAMMAR:
        raise UnsupportedError(
            f"The grammar of the strict tools' parameters and the answer's schema has {size:,} "
            f"bytes; at most "
            f"{MAX_GRAMMAR:,} are allowed: leave out some tools."
        )
    return outline


def _simplify(content: Grammar | None) -> Grammar | None:
    """Return a grammar without the parts of its schema that constrain nothing."""
    if content is None or content.kind != "json":
        return content
    try:
        return Grammar("json", assertions(content.text))
    except (ValueError, RecursionError):  # the grammar's compiler will report this error
        return content


def _grammar_bytes(outline: Outline) -> int:
    """Count the bytes of an outline's grammar on the wire."""
    grammar = outline.grammar
    return 0 if grammar is None else len(grammar.text.encode("utf-8", "replace"))


def _fits(outline: Outline, grammars: Grammars) -> bool:
    """Whether an outline is small enough to send, and compiles on this machine."""
    if outline.grammar is None:
        return True
    if _grammar_bytes(outline) > MAX_GRAMMAR:
        return False
    try:
        grammars.attempt(outline.grammar)
    except GrammarBusyError:
        return True
    except GrammarError:
        return False
    return True


def explain_grammar_error(error: BadGrammarError, outline: Outline) -> BadGrammarError:
    """Return an error that names the schema and the keyword at fault.

    Returns the error itself if each schema alone is valid.
    """
    if (fault := find_obstacle(outline)) is None:
        if outline.content is not None and not outline.tools:
            error.part = ""
        return error
    name, keywords = fault
    subject = f"The parameters of tool {name!r} have" if name else "The answer's schema has"
    remedy = ", or leave out the tool's strict" if name else ""
    refusal = BadGrammarError(
        f"{subject} keywords that cannot be enforced: {keywords}. Leave them out{remedy}. ({error})"
    )
    refusal.part = name
    return refusal


class AnswerBuffer:
    """Collects the tokens, text and parts of one answer, until it ends.

    target: the vocabulary of the tokens. ends: ids of the end tokens.
    """

    def __init__(
        self, target: Vocabulary, outline: Outline, plan: Plan, ends: Collection[int]
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.parts: list[TurnPart] = []
        self.finish_reason: str | None = None
        self.stop_string: str | None = None  # the stop string that ended the answer
        visible_ids = target.tokenizer.named_controls(outline.marks)
        self._stream = TextStream(target.tokenizer, visible=visible_ids)
        self._reader = TurnReader(outline, target.chat_format.call_id)
        self._eos = frozenset(ends)
        self._stop = tuple(plan.stop)
        self._max_tokens = plan.max_tokens
        self._pending_text = ""  # unreleased end of the text: it may begin a stop string

    @property
    def remaining(self) -> int:
        """Number of tokens that the answer may still get."""
        return self._max_tokens - len(self.tokens) if self.finish_reason is None else 0

    def take(self, record: Round) -> list[Piece]:
        """Add a round and return its pieces; cut the record's tokens at the answer's end."""
        pieces, tokens = [], []
        for origin, ids, key in record.origins:
            if not ids:
                continue
            taken, text = self._push(ids)
            tokens += taken
            if taken:
                logprobs = record.logprobs[len(tokens) - len(taken) : len(tokens)]
                pieces.append(Piece(text, taken, origin, logprobs, self._read(text), key))
        record.tokens = tokens
        return pieces

    def end(self, reason: str) -> list[Piece]:
        """End the answer for this reason unless it has ended; returns the last piece, if any."""
        text = self._end(reason)
        parts = self._read(text)
        last = self._reader.end()
        self.parts += last
        parts += last
        return [Piece(text, [], "target", parts=parts)] if text or parts else []

    def _read(self, text: str) -> list[TurnPart]:
        parts = self._reader.push(text)
        self.parts += parts
        return parts

    def _push(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Add committed ids; returns the ids within the answer, and the released text."""
        if not self._stop:
            return self._push_all(ids)
        taken: list[int] = []
        released = ""
        for token in ids:  # token by token: a stop string may end at any token
            if self.finish_reason is not None:
                break
            more, text = self._push_all([token])
            taken += more
            released += text
        return taken, released

    def _push_all(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Add ids up to an end token or the token limit."""
        taken = list(ids[: self.remaining])
        end = next((at for at, token in enumerate(taken) if token in self._eos), None)
        if end is not None:
            del taken[end + 1 :]
        self.tokens += taken
        released = self._scan(self._stream.push(taken if end is None else taken[:end]))
        if end is not None:
            released += self._end("stop")
        elif self.finish_reason is None and len(self.tokens) >= self._max_tokens:
            released += self._end("length")
        return taken, released

    def _end(self, reason: str) -> str:
        """End the answer and return the pending text.

        Drops the bytes of an incomplete character, as vLLM does: otherwise a client that sends the
        answer back would send U+FFFD, which the model has not generated.
        """
        if self.finish_reason is not None:
            return ""
        self.finish_reason = reason
        released, self._pending_text = self._pending_text, ""
        self.text += released
        return released

    def _scan(self, new: str) -> str:
        """Release the text that can no longer be part of a stop string."""
        if not self._stop:
            self.text += new
            return new
        pending = self._pending_text + new
        matches = [(at, stop) for stop in self._stop if (at := pending.find(stop)) >= 0]
        if matches:
            self.finish_reason = "stop"
            at, self.stop_string = min(matches)
            released, self._pending_text = pending[:at], ""
        else:
            keep = max((_overlap(pending, stop) for stop in self._stop), default=0)
            released, self._pending_text = (
                pending[: len(pending) - keep],
                pending[len(pending) - keep :],
            )
        self.text += released
        return released


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of ``text`` that may begin ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
