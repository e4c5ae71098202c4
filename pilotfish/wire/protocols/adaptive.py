"""adaptive: tokens that matter little may deviate from the target (decentralized-dsd §2.3).

up:    ids [γ], truncated q̂ of each, as under `tslt`
down:  accepted count, token; notes: deviation, number of key tokens; a bit for each verified
       token: whether it is key
law:   not the target's. At each verified position the edge computes the total variation from the
       target's law; it sends the sum with the verdict. With τ = 0 every draw is as under `tslt`

Key tokens are verified as under `tslt`, other tokens against p̃ ∝ p^(1−τ)·q̂^τ
(`speculation.adaptive`, docs/adaptive.md). After any rejection the residual of p is sampled. τ and
the conditions for a key token come with the request, or else from the edge. At temperature 0
nothing is sampled, so the edge refuses the protocol.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta

from pilotfish.base.errors import MalformedError, UnsupportedError
from pilotfish.base.settings import setting
from pilotfish.speculation.adaptive import HIGHEST_RATIO, Relaxation, verify
from pilotfish.speculation.distributions import Floats, Sampling, probabilities
from pilotfish.wire.protocols.draws import coins, sample_next
from pilotfish.wire.protocols.options import ProtocolOptions, RoundCounter
from pilotfish.wire.protocols.protocol import Decision, Draft, DrawKey, SamplingParams
from pilotfish.wire.protocols.tslt import SparseDraft, Tslt

# The default of requests and of the edge; docs/adaptive.md has its deviation and its gain.
BUILT_IN = Relaxation(tau=0.2, lambda1=3.0, lambda2=0.3, lambda3=0.4)
DEVIATION = RoundCounter(
    name="deviation",
    help="Total variation from the target's law, summed over the verified positions.",
    unit="verified",
    counts_tokens=False,
    is_lossy_gain=True,
    column_since=3,
)

KEY = RoundCounter(
    name="key",
    help="Verified draft tokens that were key, to which the target's own rule applied.",
    unit="verified",
)

Share = Annotated[float, Meta(ge=0.0, le=1.0)]
Ratio = Annotated[float, Meta(ge=0.0, le=HIGHEST_RATIO)]


class RelaxationOptions(ProtocolOptions, frozen=True):
    """Bounds on a generation's deviation from the target; None: the edge's own value."""

    tau: Annotated[
        Share | None,
        setting(
            "adaptive: how far tokens that are not key may deviate; 0: not at all, as under tslt "
            "(default: the edge's value)",
            metavar="τ",
        ),
    ] = None
    lambdas: Annotated[
        tuple[Ratio, Share, Share] | None,
        setting(
            "adaptive: a token is key above an entropy ratio λ₁, above a difference λ₂ of its "
            "probabilities, or below an overlap λ₃ (default: the edge's values)",
            metavar="λ₁,λ₂,λ₃",
        ),
    ] = None

    @classmethod
    def from_relaxation(cls, relaxation: Relaxation) -> "RelaxationOptions":
        """Return the options for this relaxation."""
        lambdas = (relaxation.lambda1, relaxation.lambda2, relaxation.lambda3)
        return cls(tau=relaxation.tau, lambdas=lambdas)

    @property
    def relaxation(self) -> Relaxation:
        """The relaxation, with `BUILT_IN` for missing values."""
        lambdas = self.lambdas or (BUILT_IN.lambda1, BUILT_IN.lambda2, BUILT_IN.lambda3)
        return Relaxation(
            tau=BUILT_IN.tau if self.tau is None else self.tau,
            lambda1=lambdas[0],
            lambda2=lambdas[1],
            lambda3=lambdas[2],
        )


class Adaptive(Tslt):
    """Protocol `adaptive`: the device's half and the edge's half."""

    name = "adaptive"
    Options = RelaxationOptions
    counters = (DEVIATION, KEY)
    lossless = False
    relative_acceptance = 1.04  # tslt's acceptance, plus the gain with `BUILT_IN`
    strict_relative_acceptance = Tslt.relative_acceptance

    def __init__(self, options: ProtocolOptions | None = None) -> None:
        super().__init__(options)
        assert isinstance(self.options, RelaxationOptions)
        self.relaxation = self.options.relaxation

    def check(self, target: Sampling, drafter: Sampling | None = None) -> None:
        """Refuse temperature 0, where p is a single token and cannot be softened."""
        if target.greedy:
            raise UnsupportedError(
                "Protocol adaptive softens the distribution that is sampled, and at temperature 0 "
                "nothing is sampled: use greedy, or a temperature above 0."
            )

    def verify(
        self,
        draft: SparseDraft,
        logits: Floats,
        params: SamplingParams,
        *,
        round_start: int,
        hidden: Floats | None = None,
    ) -> Decision:
        """Accept by the ratio p/q̂ or p̃/q̂; then sample p's residual (if rejected) or the bonus."""
        walk, deviation, key = verify(
            draft.ids.tolist(),
            draft.q.row,
            lambda index: probabilities(logits[index : index + 1], params.sampling)[0],
            coins(len(draft.ids), params, round_start),
            self.relaxation,
        )
        token = sample_next(walk, params, DrawKey(round_start, walk.node))
        return self.verdict(walk.node, token, deviation, key)

    @staticmethod
    def verdict(accepted: int, token: int, deviation: float, key: Sequence[bool]) -> Decision:
        """Return the decision with its notes and frame. key: whether each verified token is key."""
        frames = [np.packbits(key, bitorder="little").tobytes()] if key else []
        return Decision(accepted, token, frames, notes=(deviation, sum(key)))

    def take_key_tokens(self, draft: Draft, decision: Decision) -> tuple[Decision, tuple[int, ...]]:
        """Remove the frame of key tokens, a bit for each verified token, from a decision."""
        verified = min(len(draft.ids), decision.accepted + 1)
        sizes = [(verified + 7) // 8] if verified else []
        if [len(frame) for frame in decision.frames] != sizes:
            raise MalformedError("The verdict does not say which of the verified tokens were key.")
        if not verified:
            return decision, ()
        bits = np.unpackbits(np.frombuffer(decision.frames[0], np.uint8), bitorder="little")
        key = tuple(np.flatnonzero(bits).tolist())
        if len(key) != sum(decision.notes[1:2]) or key[-1:] >= (verified,):
            raise MalformedError("The verdict's key tokens do not fit its notes and its window.")
        return decision._replace(frames=()), key
