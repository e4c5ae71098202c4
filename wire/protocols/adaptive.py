"""adaptive: tokens that matter little may stray from the target (decentralized-dsd §2.3).

up:    ids [γ], truncated q̂ of each, as `tslt`
down:  accepted count, token, deviation
law:   not the target's: at each position that is looked at, its total variation from the target's
       is known, and their sum is told with the verdict; with τ = 0 it is `tslt`, draw by draw

Key tokens are verified as under `tslt`, others against p̃ ∝ p^(1−τ)·q̂^τ (`speculation.adaptive`,
DESIGN §6.7). A rejection is followed by the residual of p, whatever the token was. τ and what makes
a token key come with the request, or are the edge's own. At temperature 0 there is nothing to
soften, and the protocol is refused.
"""

from copy import copy
from typing import TYPE_CHECKING

from pilotfish.speculation.adaptive import Relaxation, verify
from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.wire.errors import UnsupportedError
from pilotfish.wire.messages import Relaxing
from pilotfish.wire.protocols.exchange import Law, Place, Ruling, coins, follow
from pilotfish.wire.protocols.tslt import SparseDraft, Tslt

if TYPE_CHECKING:
    from typing_extensions import Self

# Where neither request nor edge say anything. A position deviates by 0.045 with it on the default
# pair, where 18 % of the drafts are key; with SmolLM2-135M for Qwen2.5-Coder-1.5B by 0.022 in chats
# (62 %) and by 0.015 on GSM8K (73 %); all at temperature 1.
BUILT_IN = Relaxation(tau=0.2, lambda1=3.0, lambda2=0.3, lambda3=0.4)


class Adaptive(Tslt):
    """Both halves of `adaptive`. relaxation: the edge's, for one generation."""

    name = "adaptive"
    lossless = False
    relaxes = True
    agreement = 1.04  # tslt's, and what `BUILT_IN` adds to it

    def __init__(self, relaxation: Relaxation = BUILT_IN) -> None:
        self.relaxation = relaxation

    def relaxed(self, own: Relaxation, asked: Relaxing | None = None) -> "Self":
        """The same as a request asks for it; ``own`` is what it does not name."""
        asked = asked or Relaxing()
        lambdas = asked.lambdas or (own.lambda1, own.lambda2, own.lambda3)
        other = copy(self)
        other.relaxation = Relaxation(
            tau=own.tau if asked.tau is None else asked.tau,
            lambda1=lambdas[0],
            lambda2=lambdas[1],
            lambda3=lambdas[2],
        )
        return other

    def check(self, target: Sampling, drafter: Sampling | None = None) -> None:
        """Anything but temperature 0, where p is one token and cannot be softened."""
        if target.greedy:
            raise UnsupportedError(
                "Protocol adaptive softens what is sampled from, and at temperature 0 nothing is: "
                "use greedy, or a temperature above 0."
            )

    def rule(
        self,
        draft: SparseDraft,
        logits: Floats,
        law: Law,
        *,
        round_start: int,
        hidden: Floats | None = None,
    ) -> Ruling:
        """Accept by the ratio, of p or of p̃; residual of p at the first rejection, else a bonus."""
        walk, deviation = verify(
            draft.ids.tolist(),
            draft.q.row,
            lambda index: probabilities(logits[index : index + 1], law.sampling)[0],
            coins(len(draft.ids), law, round_start),
            self.relaxation,
        )
        token = follow(walk, law, Place(round_start, walk.node))
        return Ruling(walk.node, token, deviation=deviation)
