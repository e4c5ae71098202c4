"""What comes over the link against the target alone, token for token.

`greedy` at temperature 0 and `coupled` at temperature 1 with the same seed, 20 prompts, windows 1,
4, 8 and 16, against `stream` from the same edge process; then `coupled` again with an edge that is
killed and started anew in the middle of every answer. Passes of different shape differ by about
1e-5 in their logits, so two runs may part at a tie; each parting is looked at in the target's own
logits (and the noise of that position), and one that is no tie is a bug.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
from _common import PROMPTS, Goal, Rows, Steps, at_most, conclude, options, pair, pair_options
from _common import throwaway_keys as keys
from _parting import TIE, scores_at

from pilotfish import Device, EdgeServer
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.wire.request import Options

WINDOWS = (1, 4, 8, 16)
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
    steps = Steps(len(prompts) * (3 + 2 * len(WINDOWS)))
    reference = Decoder(target)
    rows: Rows = [_row("greedy", w) for w in WINDOWS] + [_row("coupled", w) for w in WINDOWS]
    wanted: dict[tuple[str, str], list[int]] = {}
    with keys() as folder:
        with (
            EdgeServer(target, keys=folder) as edge,
            Device(drafter, edge.endpoint, folder) as device,
        ):
            for seed, prompt in enumerate(prompts):
                for protocol in ("greedy", "coupled"):
                    steps.next(f"stream for {protocol}")
                    generation = _generation(protocol, seed, length)
                    streamed = device.generate(prompt, **generation | {"protocol": "stream"})
                    wanted[protocol, prompt] = streamed.tokens
                    for row in (r for r in rows if r["protocol"] == protocol):
                        steps.next(f"{protocol}, window {row['window']}")
                        got = device.generate(prompt, **generation | {"window": row["window"]})
                        ids = device.prompt(prompt).ids.astype(np.int64)
                        row["alpha"].append(got.acceptance)
                        verdict = _verdict(
                            reference, ids, got.tokens, streamed.tokens, _seed(protocol, seed)
                        )
                        row["answers"] += 1
                        row[verdict] += 1
        killed = _row("coupled, edge killed", 8)
        rows.append(killed)
        for seed, prompt in enumerate(prompts):
            steps.next("coupled, the edge is killed under way")
            generation = _generation("coupled", seed, length)
            tokens, ids, alpha = _with_a_killed_edge(drafter, target, folder, prompt, generation)
            killed["answers"] += 1
            killed["alpha"].append(alpha)
            killed[_verdict(reference, ids, tokens, wanted["coupled", prompt], seed)] += 1
    for row in rows:
        row["alpha"] = float(np.mean(row["alpha"]))
    goals: list[Goal] = [
        at_most("answers that differ otherwise than by a tie", sum(r["differ"] for r in rows), 0),
        at_most("answers that part at a tie", sum(r["ties"] for r in rows), 0),
    ]
    columns = ("protocol", "window", "answers", "identical", "ties", "differ", "alpha")
    return conclude(args, f"against stream, {length} tokens", columns, rows, goals)


def _row(protocol: str, window: int) -> dict[str, Any]:
    counts = dict.fromkeys(("answers", "identical", "ties", "differ"), 0)
    return {"protocol": protocol, "window": window, **counts, "alpha": []}


def _seed(protocol: str, seed: int) -> int | None:
    """The seed of the noise that decides; None where none does."""
    return None if protocol == "greedy" else seed


def _generation(protocol: str, seed: int, length: int) -> Options:
    temperature = 0.0 if protocol == "greedy" else 1.0
    return Options(protocol=protocol, temperature=temperature, seed=seed, max_tokens=length)


def _with_a_killed_edge(
    drafter: Path, target: Path, folder: Path, prompt: str, generation: Options
) -> tuple[list[int], np.ndarray, float]:
    """Tokens, prompt ids and α of an answer whose edge dies after a third of it."""
    first = EdgeServer(target, keys=folder).start()
    second = EdgeServer(target, first.endpoint, keys=folder)
    try:
        with Device(drafter, first.endpoint, folder) as device:
            tokens: list[int] = []
            for piece in device.stream(prompt, **generation | {"window": 8}):
                before, tokens = tokens, [*tokens, *piece.tokens]
                if len(before) < generation["max_tokens"] // 3 <= len(tokens):
                    os.kill(first.pid, signal.SIGKILL)
                    first.stop()
                    second.start()
            assert device.last is not None
            return tokens, device.prompt(prompt).ids.astype(np.int64), device.last.acceptance
    finally:
        first.stop()
        second.stop()


def _verdict(
    reference: Decoder, prompt: np.ndarray, got: list[int], wanted: list[int], seed: int | None
) -> str:
    """`identical`, `ties` or `differ`."""
    if got == wanted:
        return "identical"
    at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), None)
    if at is None:
        return "differ"
    ids = np.concatenate([prompt, np.array(wanted[:at], dtype=np.int64)])
    scores = scores_at(reference, ids, seed)
    gap = abs(float(scores[got[at]]) - float(scores[wanted[at]]))
    print(f"parted at token {at}, {gap:.2e} apart in the target's scores", file=sys.stderr)
    return "ties" if gap < TIE else "differ"


if __name__ == "__main__":
    sys.exit(main())
