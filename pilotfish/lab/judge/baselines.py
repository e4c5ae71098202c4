"""Rules that forgive mismatches without a head: the baselines of `judge sweep`.

A *coin* forgives each mismatch with one probability, whatever the mismatch is. A *gap* forgives a
mismatch if the target's logit of its own token exceeds that of the drafter's token by at most a
bound: the target itself hardly prefers its token. A head is worth its states only if it beats both.

In: a head's threshold, and mined mismatches. Out: for each rule, the bound with which it forgives
as large a share of these mismatches as the head does. The mismatches must be of questions that are
neither in the head's training, whose mismatches it forgives more often than others, nor in the
sweep; and of right and wrong answers alike, as the sweep's are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.lab.judge.episodes import Episode
from pilotfish.lab.judge.instances import as_decoded
from pilotfish.lab.judge.model_passes import Floats, Ids
from pilotfish.speculation.channel import Channel

RuleName = Literal["coin", "gap"]
RULES: tuple[RuleName, ...] = ("coin", "gap")


class Baseline(NamedTuple):
    """A rule with its bound. bound: a coin's probability; a gap's largest difference of logits."""

    rule: RuleName
    bound: float

    def rejects(self, gap: float, uniform: float) -> bool:
        """Return whether the rule rejects a mismatch.

        gap: difference of the target's logits. uniform: the mismatch's draw from [0, 1).
        """
        return uniform >= self.bound if self.rule == "coin" else gap > self.bound


def draw_uniform(key: str, answer: Sequence[int], draft: int) -> float:
    """Draw from [0, 1) for a mismatch: question, answer so far and drafted token decide.

    So all coins draw the same number for the same mismatch, and a coin with a higher probability
    forgives whatever one with a lower probability forgives.
    """
    digest = sha256(f"{key} {list(answer)} {draft}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


@dataclass(frozen=True, eq=False)
class MinedMismatches:
    """n mined mismatches, for choosing the bounds of baselines.

    drafter, target: states, f32 [n, d_D] and f32 [n, d_T]. tokens: i64 [n, 2]. gap: f32 [n].
    """

    drafter: Floats
    target: Floats
    tokens: Ids
    gap: NDArray[np.float32]

    @classmethod
    def from_episodes(cls, mined: Iterable[Episode]) -> MinedMismatches:
        """Concatenate the episodes' mismatches.

        Raises `UnsupportedError` if there are none, or if an earlier version mined them.
        """
        with_mismatches = [episode for episode in mined if len(episode)]
        if not with_mismatches:
            raise UnsupportedError("The mined episodes have no mismatch to compare rules with.")
        if any(len(episode.gap) != len(episode) for episode in with_mismatches):
            raise UnsupportedError(
                "An earlier version mined these episodes, without the target's logits: mine them "
                "again with pilotfish judge mine."
            )
        return cls(
            *(
                np.concatenate([getattr(episode, name) for episode in with_mismatches])
                for name in ("drafter", "target", "tokens", "gap")
            )
        )

    def baselines(
        self, head: DecisionHead, channel: Channel, threshold: float
    ) -> tuple[Baseline, ...]:
        """Return a rule of each kind that forgives as large a share of these as the head does."""
        judge = head.judge(channel, threshold)
        rejected = judge(as_decoded(self.drafter, judge.form), self.target, self.tokens)
        share = float(np.mean(~rejected))
        count = round(share * len(self.gap))
        ascending = np.sort(self.gap)
        # no gap is negative, so the bound −1 forgives nothing
        bound = float(ascending[count - 1]) if count else -1.0
        return Baseline("coin", share), Baseline("gap", bound)
