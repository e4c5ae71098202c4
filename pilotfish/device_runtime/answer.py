"""An answer while it comes: its tokens and its text, what of it is words, thought or a call, and
where it ends: at an end token, a stop string, the number of tokens.

In:  rounds. Out: pieces.
"""

from collections.abc import Collection, Sequence
from functools import partial

from pilotfish.base.errors import BadGrammarError, UnsupportedError
from pilotfish.device_runtime.bridge import Prompt
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

_TAIL = 16  # tokens of a prompt, in which a thought may begin


def outline_of(prompt: Prompt, target: Vocabulary, content: Grammar | None) -> Outline:
    """Return what the answer to a prompt may be. content: what it must be, if anything.

    `UnsupportedError` if it cannot call the prompt's tools.
    """
    content = _plain(content)
    if not prompt.is_chat_turn or target.chat_template is None:
        return Outline(content=content)
    family = target.chat_format
    tail = target.tokenizer.decode(prompt.ids[-_TAIL:].tolist(), special=True)
    tools = prompt.tools
    try:
        outline = Outline.for_chat_format(
            family,
            target.chat_template,
            tools=tools,
            content=content,
            thinking=tail.rstrip().endswith(family.thought[0].rstrip()),
        )
    except GrammarError as error:
        raise UnsupportedError(str(error)) from error
    if tools is None:
        return outline
    strict = {tool.name for tool in tools.callable if tool.strict}
    outline = with_relaxed_tools(outline, strict, partial(_fits, grammars=target.grammars))
    if (size := _size(outline)) > MAX_GRAMMAR:
        raise UnsupportedError(
            f"The strict tools and what the answer must be have {size:,} bytes, as they are sent; "
            f"{MAX_GRAMMAR:,} is the most: leave some out."
        )
    return outline


def _plain(content: Grammar | None) -> Grammar | None:
    """Return a grammar without what asserts nothing in its schema."""
    if content is None or content.kind != "json":
        return content
    try:
        return Grammar("json", assertions(content.text))
    except (ValueError, RecursionError):  # compiling the grammar raises the error
        return content


def _size(outline: Outline) -> int:
    """Count the bytes of an outline's grammar, as it is sent."""
    grammar = outline.grammar
    return 0 if grammar is None else len(grammar.text.encode("utf-8", "replace"))


def _fits(outline: Outline, grammars: Grammars) -> bool:
    """Whether an outline can be sent, and compiles, as far as can be known here."""
    if outline.grammar is None:
        return True
    if _size(outline) > MAX_GRAMMAR:
        return False
    try:
        grammars.attempt(outline.grammar)
    except GrammarBusyError:
        return True
    except GrammarError:
        return False
    return True


def explain_grammar_error(error: BadGrammarError, outline: Outline) -> BadGrammarError:
    """Return a refusal of an answer's grammar that names the schema and the keyword at fault.

    It is the same error where nothing is wrong with any schema by itself.
    """
    if (fault := find_obstacle(outline)) is None:
        if outline.content is not None and not outline.tools:
            error.part = ""
        return error
    name, keywords = fault
    whose = f"The parameters of tool {name!r} have" if name else "The answer's schema has"
    mended = ", or the tool's strict" if name else ""
    refusal = BadGrammarError(
        f"{whose} what cannot be enforced: {keywords}. Leave it out{mended}. ({error})"
    )
    refusal.part = name
    return refusal


class AnswerBuffer:
    """Collects the tokens, the text and the parts of one answer, and tells when and why it ended.

    target: the vocabulary of the tokens. ends: its end tokens.
    """

    def __init__(
        self, target: Vocabulary, outline: Outline, plan: Plan, ends: Collection[int]
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.parts: list[TurnPart] = []
        self.finish_reason: str | None = None
        shown = target.tokenizer.named_controls(outline.marks)
        self._stream = TextStream(target.tokenizer, visible=shown)
        self._reader = TurnReader(outline, target.chat_format.call_id)
        self._eos = frozenset(ends)
        self._stop = tuple(plan.stop)
        self._max_tokens = plan.max_tokens
        self._held = ""  # the end of the text, while it may be the beginning of a stop string

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return self._max_tokens - len(self.tokens) if self.finish_reason is None else 0

    def take(self, record: Round) -> list[Piece]:
        """Add a round and return its pieces; cuts the record to the tokens kept."""
        pieces, kept = [], []
        for origin, ids in record.origins:
            taken, text = self._push(ids)
            kept += taken
            if taken:
                told = record.logprobs[len(kept) - len(taken) : len(kept)]
                pieces.append(Piece(text, taken, origin, told, self._read(text)))
        record.tokens = kept
        return pieces

    def end(self, reason: str) -> list[Piece]:
        """End the answer; returns the last piece, if there is one.

        reason: unless it has ended.
        """
        text = self._end(reason)
        parts = [*self._read(text), *self._told(self._reader.end())]
        return [Piece(text, [], "target", parts=parts)] if text or parts else []

    def _read(self, text: str) -> list[TurnPart]:
        return self._told(self._reader.push(text))

    def _told(self, parts: list[TurnPart]) -> list[TurnPart]:
        self.parts += parts
        return parts

    def _push(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Add committed ids; returns those within the answer, and the text released."""
        if not self._stop:
            return self._push_all(ids)
        taken: list[int] = []
        released = ""
        for token in ids:  # one by one: a stop string may end at any of them
            if self.finish_reason is not None:
                break
            more, text = self._push_all([token])
            taken += more
            released += text
        return taken, released

    def _push_all(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Add ids up to an end token or the most tokens."""
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
        """End the answer and return the text that was held back.

        The bytes of a character that did not come whole are no text, as in vLLM: a client that
        sends the answer back would else send U+FFFD, which the model has not said.
        """
        if self.finish_reason is not None:
            return ""
        self.finish_reason = reason
        released, self._held = self._held, ""
        self.text += released
        return released

    def _scan(self, new: str) -> str:
        """Release the text that can no longer be part of a stop string."""
        if not self._stop:
            self.text += new
            return new
        pending = self._held + new
        found = [at for at in (pending.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.finish_reason = "stop"
            released, self._held = pending[: min(found)], ""
        else:
            keep = max((_overlap(pending, stop) for stop in self._stop), default=0)
            released, self._held = pending[: len(pending) - keep], pending[len(pending) - keep :]
        self.text += released
        return released


def _overlap(text: str, stop: str) -> int:
    """Count the characters at the end of ``text`` that may begin ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
