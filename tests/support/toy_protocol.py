"""A complete toy protocol: `greedy` with a limit on accepted tokens.

Register it in a process by ``PILOTFISH_PROTOCOLS=tests.support.toy_protocol``.
"""

from __future__ import annotations

from typing import Annotated, Any

from pilotfish.base.settings import setting
from pilotfish.wire.protocols import Decision, Greedy, ProtocolOptions, RoundCounter, register


class ToyOptions(ProtocolOptions, frozen=True):
    at_most: Annotated[int, setting("toy: tokens of a window to accept at most", ge=0, le=128)] = (
        128
    )


class Toy(Greedy):
    name = "toy"
    Options = ToyOptions
    counters = (
        RoundCounter(name="odd", help="Accepted tokens with an odd id."),
        RoundCounter(
            name="haste",
            help="Adds 0.5 for each verified position.",
            unit="verified",
            counts_tokens=False,
        ),
    )

    def verify(self, draft: Any, *others: Any, **more: Any) -> Decision:
        """Rule as `greedy`, but accept at most ``at_most`` tokens."""
        result = super().verify(draft, *others, **more)
        assert isinstance(self.options, ToyOptions)
        accepted, token = result.accepted, result.token
        if accepted > self.options.at_most:
            accepted = self.options.at_most
            token = int(draft.ids[accepted])
        odd = int((draft.ids[:accepted] % 2).sum())
        return Decision(accepted, token, notes=(odd, 0.5 * min(len(draft.ids), accepted + 1)))


register(Toy())
