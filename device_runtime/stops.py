"""Find the end of an answer: end tokens, stop strings, the number of tokens."""

from collections.abc import Collection, Sequence

from pilotfish.engines.tokenizer import TextStream, Tokenizer


class AnswerBuffer:
    """Collects the tokens and the text of one answer, and tells when and why it has ended.

    shown: control tokens that its text tells.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_ids: Collection[int],
        stop: Sequence[str],
        max_tokens: int,
        shown: Collection[int] = (),
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self.finish_reason: str | None = None
        self._stream = TextStream(tokenizer, shown=shown)
        self._eos = frozenset(eos_ids)
        self._stop = tuple(stop)
        self._max_tokens = max_tokens
        self._held = ""  # the end of the text, while it may be the beginning of a stop string

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return self._max_tokens - len(self.tokens) if self.finish_reason is None else 0

    def push(self, ids: Sequence[int]) -> tuple[list[int], str]:
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
            released += self.end("stop")
        elif self.finish_reason is None and len(self.tokens) >= self._max_tokens:
            released += self.end("length")
        return taken, released

    def end(self, reason: str) -> str:
        """End the answer and return the text that was held back."""
        released = self._scan(self._stream.flush())
        if self.finish_reason is None:
            self.finish_reason = reason
            released += self._held
            self.text += self._held
            self._held = ""
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
