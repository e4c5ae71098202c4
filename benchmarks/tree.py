"""Token trees against chains of equal depth: what several candidates a position gain.

    python benchmarks/tree.py [--json PATH] [--quick] [--draft DIR] [--target DIR]

Real rounds over an edge process at temperature 1, q̂ of 64 tokens in every case: protocol `tree`
with several expansions ⟨k₁…k_L⟩, and `tslt`, whose window is the chain of the same depth. All cases
go on from the same places in texts of the target, one round from each, and take turns there; so
they differ in nothing but the window. "accepted" are accepted tokens per round, "se" is the
standard error of that mean, "gain" the ratio to the chain of equal depth. "predicted" is what
theory makes of the two models' logits on these texts: E[Σ_l Π_{i≤l} θᵢ], where θᵢ (tslt (39)) is
the acceptance of kᵢ candidates at neighbouring positions. "nodes" are those of a tree without
duplicates, "distinct" those that were drafted, sent and verified: equal candidates share a node.
Times are medians of a round; tokens per second are (1 + accepted) / round_ms.

Goal: every tree has more tokens accepted per round than the chain of its depth.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from _cases import connected
from _common import PROMPTS, Rows, Steps, at_least, conclude, options, pair, pair_options
from _recorded import Chat, record
from numpy.typing import NDArray

from pilotfish import Device
from pilotfish.device_runtime.record import Round
from pilotfish.speculation.distributions import Sampling
from pilotfish.speculation.theory import betas, theta
from pilotfish.speculation.tree import Expansion, nodes_at_most
from pilotfish.speculation.truncation import truncate
from pilotfish.wire.request import Options

# each chain before the trees of its depth
EXPANSIONS: tuple[Expansion, ...] = (
    (1, 1, 1),
    (2, 2, 1),
    (3, 1, 1),
    (2, 2, 2),
    (4, 2, 1),
    (1, 1, 1, 1),
    (2, 2, 1, 1),
)
TOP_K = 64
COLUMNS = (
    *("expansion", "nodes", "distinct", "accepted", "se", "gain", "predicted"),
    *("tokens_per_round", "bytes_up", "draft_ms", "verify_ms", "round_ms", "tokens_per_s"),
)
Thetas = NDArray[np.float64]


@dataclass
class Case:
    """An expansion and its rounds."""

    expansion: Expansion
    rounds: list[Round] = field(default_factory=list)

    @property
    def chain(self) -> bool:
        """No more than one candidate a position."""
        return max(self.expansion) == 1

    @property
    def name(self) -> str:
        """As the table calls it."""
        if self.chain:
            return f"chain of {len(self.expansion)}"
        return f"⟨{','.join(map(str, self.expansion))}⟩"

    def run(self, device: Device, tokens: list[int], seed: int) -> None:
        """One round after these tokens."""
        levels = len(self.expansion)
        wanted: Options = {"temperature": 1.0, "draft_top_k": TOP_K, "seed": seed}
        wanted["max_tokens"] = levels + 1  # and the round ends the answer
        if self.chain:
            wanted |= {"protocol": "tslt", "window": levels}
        else:
            wanted |= {"protocol": "tree", "expansion": self.expansion}
        self.rounds.append(device.generate(tokens, **wanted).rounds[0])

    @property
    def accepted(self) -> float:
        """Tokens per round."""
        return float(np.mean([r.accepted for r in self.rounds]))

    def row(self, chain: "Case", thetas: Sequence[Thetas]) -> dict[str, float | int | str]:
        """The figures, beside those of the chain of equal depth."""
        round_ms = median_ms([r.timings.total for r in self.rounds])
        return {
            "expansion": self.name,
            "nodes": nodes_at_most(self.expansion),
            "distinct": float(np.mean([r.nodes for r in self.rounds])),
            "rounds": len(self.rounds),
            "accepted": self.accepted,
            "se": float(np.std([r.accepted for r in self.rounds]) / len(self.rounds) ** 0.5),
            "gain": self.accepted / chain.accepted,
            "predicted": predicted(self.expansion, thetas),
            "tokens_per_round": 1.0 + self.accepted,
            "bytes_up": float(np.mean([r.uplink_bytes for r in self.rounds])),
            "draft_ms": median_ms([r.timings.draft for r in self.rounds]),
            "verify_ms": median_ms([r.timings.verify for r in self.rounds]),
            "round_ms": round_ms,
            "tokens_per_s": (1.0 + self.accepted) / round_ms * 1e3,
        }


def median_ms(seconds: Sequence[float]) -> float:
    """The median of some seconds, in milliseconds."""
    return float(np.median(seconds)) * 1e3


def acceptances(chat: Chat) -> Thetas:
    """θ of 1, 2, … candidates at each position of a chat; f64 [n, most k]."""
    most = max(map(max, EXPANSIONS))
    sampling = Sampling(temperature=1.0, top_k=TOP_K)
    results = []
    for index in range(len(chat)):
        p = chat.p(index)
        row = truncate(chat.drafter[index], sampling).row(0)
        q = np.zeros(len(p))
        q[row.support] = row.probabilities()
        each = betas(p, q, most)
        results.append([float(theta(each[:k])) for k in range(1, most + 1)])
    return np.array(results)


def predicted(expansion: Expansion, thetas: Sequence[Thetas]) -> float:
    """E[Σ_l Π_{i≤l} θᵢ] over neighbouring positions of the chats."""
    levels = len(expansion)
    sums = []
    for chat in thetas:
        # [positions, levels], the acceptance of each level's candidates where it would stand
        result = np.array(
            [
                [chat[at + level, k - 1] for level, k in enumerate(expansion)]
                for at in range(len(chat) - levels + 1)
            ]
        ).reshape(-1, levels)
        sums += result.cumprod(axis=1).sum(axis=1).tolist()
    return float(np.mean(sums))


def take_turns(
    cases: Sequence[Case], device: Device, chats: Sequence[Chat], apart: int, steps: Steps
) -> None:
    """A round of every case from places so many tokens apart; each begins with another case."""
    device.generate(
        PROMPTS[0], protocol="greedy", max_tokens=8
    )  # the first passes of fresh engines are slow ones
    seed = 0
    for chat in chats:
        steps.next("one text, all cases")
        for index in range(0, len(chat), apart):
            seed += 1
            first = seed % len(cases)
            for case in (*cases[first:], *cases[:first]):
                case.run(device, chat.before(index), seed)


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    args = parser.parse_args()
    drafter, target = pair(args)
    steps = Steps(2 * len(PROMPTS) + 1)
    chats = record(drafter, target, quick=args.quick, steps=steps)
    steps.next("what theory predicts")
    thetas = [acceptances(chat) for chat in chats]
    cases = [Case(expansion) for expansion in EXPANSIONS]
    chains = {len(case.expansion): case for case in cases if case.chain}
    with connected(drafter, target) as device:
        take_turns(cases, device, chats, 5 if args.quick else 2, steps)
    rows: Rows = [case.row(chains[len(case.expansion)], thetas) for case in cases]
    goals = [
        at_least(f"{case.name}: accepted over the chain of equal depth", row["gain"], 1.0)
        for case, row in zip(cases, rows, strict=True)
        if not case.chain
    ]
    title = f"trees and chains, temperature 1, K = {TOP_K}, {rows[0]['rounds']} rounds each"
    return conclude(args, title, COLUMNS, rows, goals)


if __name__ == "__main__":
    sys.exit(main())
