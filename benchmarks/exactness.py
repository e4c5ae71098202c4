"""Greedy speculation over the link against the target alone, token for token.

20 prompts, windows 1, 4, 8 and 16, against `stream` from the same edge process. Passes of different
shape differ by about 1e-5 in their logits, so two runs may part at a tie; each parting is looked at
in the target's own logits, and one that is no tie is a bug.
"""

import sys

import numpy as np
from _common import PROMPTS, Goal, Rows, Steps, at_most, conclude, options, pair, pair_options
from _common import throwaway_keys as keys

from engines.decoder import Decoder
from pilotfish import Device, EdgeServer

WINDOWS = (1, 4, 8, 16)
TIE = 1e-3
MORE = (
    "Why do leaves change their colour in autumn?",
    "Write a SQL query that counts the orders of each customer.",
    "Explain photosynthesis to a child.",
    "What are the first ten prime numbers?",
    "Write a haiku about the sea.",
    "How does a refrigerator work?",
    "A train travels 120 km in 1.5 hours. What is its average speed?",
    "Name three advantages of electric cars.",
    "Describe the water cycle.",
    "Write a polite email that declines a meeting.",
    "What is the capital of Australia, and what is it known for?",
    "Explain the difference between TCP and UDP.",
)


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (%(default)s)")
    args = parser.parse_args()
    drafter, target = pair(args)
    prompts = (*PROMPTS, *MORE)[: 4 if args.quick else 20]
    length = min(args.tokens, 48) if args.quick else args.tokens
    steps = Steps(len(prompts) * (1 + len(WINDOWS)))
    reference = Decoder(target)
    rows: Rows = [
        {"window": w, "answers": 0, "identical": 0, "ties": 0, "differ": 0, "alpha": []}
        for w in WINDOWS
    ]
    with (
        keys() as folder,
        EdgeServer(target, keys=folder) as edge,
        Device(drafter, edge.endpoint, folder) as device,
    ):
        for prompt in prompts:
            steps.next("stream")
            wanted = device.generate(prompt, protocol="stream", max_tokens=length).tokens
            for row in rows:
                steps.next(f"window {row['window']}")
                got = device.generate(prompt, window=row["window"], max_tokens=length)
                ids = device.prompt_ids(prompt).astype(np.int64)
                row["answers"] += 1
                row["alpha"].append(got.acceptance)
                row[_verdict(reference, ids, got.tokens, wanted)] += 1
    for row in rows:
        row["alpha"] = float(np.mean(row["alpha"]))
    goals: list[Goal] = [
        at_most("answers that differ otherwise than by a tie", sum(r["differ"] for r in rows), 0),
        at_most("answers that part at a tie", sum(r["ties"] for r in rows), 0),
    ]
    columns = ("window", "answers", "identical", "ties", "differ", "alpha")
    return conclude(args, f"greedy against stream, {length} tokens", columns, rows, goals)


def _verdict(reference: Decoder, prompt: np.ndarray, got: list[int], wanted: list[int]) -> str:
    """`identical`, `ties` or `differ`."""
    if got == wanted:
        return "identical"
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), None)
    if at is None:
        return "differ"
    reference.rollback(0, 0)
    ids = np.concatenate([prompt, np.array(wanted[:at], dtype=np.int64)])
    logits = reference.prefill(0, ids, rows=1).logits[0]
    gap = abs(float(logits[got[at]]) - float(logits[wanted[at]]))
    print(f"parted at token {at}, {gap:.2e} apart in the target's logits", file=sys.stderr)
    return "ties" if gap < TIE else "differ"


if __name__ == "__main__":
    sys.exit(main())
