"""The clients of a load. Here: what a client does, and a device on the wire.

In:  the number of a prompt. Out: a `TimedAnswer`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from pilotfish.base.errors import PairMismatchError, PilotfishError
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.record import Generation
from pilotfish.lab.field.load.record import Record
from pilotfish.lab.field.load.timed_answer import TimedAnswer


class Client(Protocol):
    """Asks one question at a time.

    last_token_s: when the open question got its last token, or was asked; ∞ while none is open.
    """

    last_token_s: float

    def ask(self, device: int, prompt: int, asked_s: float) -> TimedAnswer:
        """Ask a prompt and wait for its answer. asked_s: when the question came.

        Raises a `PilotfishError` only if no further answer can be measured.
        """

    def close(self) -> None:
        """End the connection; a running answer ends with an error."""


class WireClient:
    """A device of Pilotfish; its answers are as long as the recorded ones.

    digest: that of the recorded target; "" if the edge did not send one.
    """

    def __init__(
        self, device: Device, record: Record, options: dict[str, Any], digest: str
    ) -> None:
        self._device, self._record, self._options = device, record, options
        self._digest = digest
        self.last_token_s = math.inf

    def ask(self, device: int, prompt: int, asked_s: float) -> TimedAnswer:
        """Ask one of the record's prompts."""
        recorded = self._record.answers[prompt]
        arrivals: list[tuple[float, int]] = []
        options = {**self._options, "max_tokens": len(recorded.answer)}
        self.last_token_s = time.monotonic()
        try:
            with self._device.stream(recorded.prompt.tolist(), owner=None, **options) as pieces:
                for piece in pieces:
                    if piece.tokens:
                        self.last_token_s = time.monotonic()
                        arrivals.append((self.last_token_s, len(piece.tokens)))
            generation = pieces.generation
            assert generation is not None
        except PilotfishError as problem:
            error = str(problem)
            return TimedAnswer(device=device, prompt=prompt, asked_s=asked_s, error=error)
        finally:
            self.last_token_s = math.inf
        self._expect_target()
        if not arrivals:
            error = "The edge sent no token."
            return TimedAnswer(device=device, prompt=prompt, asked_s=asked_s, error=error)
        return TimedAnswer(
            device=device,
            prompt=prompt,
            asked_s=asked_s,
            arrivals=_by_round(arrivals, generation),
            rounds=len(generation.rounds),
            verify_s=sum(each.timings.verify for each in generation.rounds),
            drafted=sum(each.window for each in generation.rounds),
            accepted=sum(each.accepted for each in generation.rounds),
            differs=generation.tokens != recorded.answer.tolist(),
        )

    def _expect_target(self) -> None:
        """Raise `PairMismatchError` if the edge has restarted with another target."""
        welcome = self._device.welcome
        if welcome is not None and (welcome.digest or "") != self._digest:
            raise PairMismatchError(
                f"The edge now serves another target, {welcome.model}, than the one that was "
                "recorded: serve the recorded one, or name another folder by --out."
            )

    def close(self) -> None:
        """Close the device."""
        self._device.close()


def _by_round(
    arrivals: Sequence[tuple[float, int]], generation: Generation
) -> list[tuple[float, int]]:
    """Join the pieces of each round: they came in one message."""
    rounds: list[tuple[float, int]] = []
    wanted = iter([len(each.tokens) for each in generation.rounds if each.tokens])
    missing = 0
    for at_s, count in arrivals:
        if missing <= 0:
            missing += next(wanted, count)
            rounds.append((at_s, 0))
        first_s, before = rounds[-1]
        rounds[-1] = first_s, before + count
        missing -= count
    return rounds
