"""One answer of a load, as the device that asked for it saw it."""

from __future__ import annotations

from msgspec import Struct


class TimedAnswer(Struct, frozen=True, kw_only=True):
    """An answer. Times are seconds on the machine's monotonic clock.

    device, prompt: numbers. asked_s: when the question came. arrivals: time and number of the
    tokens of each message with tokens. rounds: number of the answer's rounds. verify_s: time of the
    target's passes that the edge announced for this answer, summed; a pass that served several
    devices counts for each. drafted, accepted: tokens. differs: whether the answer is another than
    the recorded one. error: why the answer failed; "": it did not.
    """

    device: int
    prompt: int
    asked_s: float
    arrivals: list[tuple[float, int]] = []
    rounds: int = 0
    verify_s: float = 0.0
    drafted: int = 0
    accepted: int = 0
    differs: bool = False
    error: str = ""

    @property
    def tokens(self) -> int:
        """Number of the answer's tokens."""
        return sum(count for _, count in self.arrivals)

    @property
    def first_token_s(self) -> float:
        """Seconds from the question to its first tokens."""
        return self.arrivals[0][0] - self.asked_s

    @property
    def token_s(self) -> float | None:
        """Seconds per token after the first message with tokens; None without later tokens."""
        (first_s, first), (last_s, _) = self.arrivals[0], self.arrivals[-1]
        later = self.tokens - first
        return (last_s - first_s) / later if later else None
