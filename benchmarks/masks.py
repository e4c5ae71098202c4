"""Drafters of many tokens per pass: the time of a draft, α by place, and what `ahead` gains.

    python benchmarks/masks.py [--json PATH] [--quick] [--draft DIR]

draft     milliseconds per draft of a drafter's weights, one token per pass and several per pass,
          after a context of 200 tokens; "unread" 1 is a pass after a correction, and with 8 it
          first reads the drafts of the pass before. Any artifact will do: the time of a pass does
          not depend on what its tokens mean. Processor time, the least of many, in turns.
places    α of the tests' hand-made drafter by the draft's place in its pass (`tests.support.ring`),
          and the drafts that the target takes from one pass
forecast  the speed of `ahead` over `stream` by RTT, by an event simulation, for acceptances that
          were published: P-EAGLE's .64, .40, .25, .15 by place, read as the acceptance of each
          draft given those before it, and as the joint acceptance of all so far; and PARD's 3
          tokens a pass. Beside them: the same weights, one token per pass, all with the first α.
windows   the same for the windows of a protocol that waits, such as `greedy`: the best window of
          those that `auto` tries, as a multiple of `stream`'s speed

The simulation has one session, a target whose passes follow each other, and a drafter whose passes
follow each other while a draft is wanted; a draft is right with the probability of its place. The
drafter's passes of several tokens take the multiples of a single one in the table above ("cpu"), or
1.1 on a GPU, where a pass costs its launch. `speculation.pass_drafts` chooses the number of drafts
of each pass.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from _common import Rows, Steps, conclude, options, pair_options

from pilotfish.cli.export import default_pair
from pilotfish.device_runtime.alternatives import WINDOWS
from pilotfish.engines.engine import Work, open_engine
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.speculation.ahead import FLOOR
from pilotfish.speculation.pass_drafts import (
    single_passes,
    stream_drafts,
    window_passes,
    window_tokens_per_s,
)
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols.ahead import MOST_DRAFTS
from tests.support.ring import MASK, VOCAB, ring_pair

CONTEXT, ROWS, TURNS = 200, 8, 40
RTTS_MS = (0.0, 5.0, 10.0, 20.0, 50.0, 100.0)
DRAFT_MS, GPU_RATIO = 12.0, 1.1  # a pass of one token on one core (SmolLM2-135M)
# A pass, and each draft more.
TARGETS = {"10 ms": (10.0, 0.1), "25 ms": (25.0, 0.25), "40 ms": (40.0, 0.4)}
JOINT = (0.64, 0.40, 0.25, 0.15)


def by_place(published: Sequence[float]) -> list[float]:
    """Continue published acceptances to `ROWS` places, by the ratio of the last two."""
    known = list(published)
    while len(known) < ROWS:
        known.append(known[-1] * min(1.0, known[-1] / known[-2]))
    return known


CASES = {
    "each draft's": by_place(JOINT),
    "joint": by_place([b / a for a, b in zip((1.0, *JOINT), JOINT, strict=False)]),
    "3 tokens a pass": [0.78] * ROWS,  # Σ 0.78ⁱ over 8 places
}


def draft_times(folder: Path, turns: int) -> Rows:
    """Time passes of one token and of several after a context."""
    engine = open_engine(folder, threads=1, provider="cpu", drafts=True)
    text = np.arange(1, CONTEXT + 1) % 1000
    least: dict[tuple[int, int], float] = {}
    for _ in range(turns):
        for new, rows in ((1, 1), (1, 2), (1, 4), (1, ROWS), (ROWS, ROWS)):
            engine.run([Work(0, text, rows=0)])
            tokens = np.concatenate([text, np.full(new + rows - 1, 7)])
            begun_s = time.process_time()
            engine.run([Work(0, tokens, rows)])
            taken_s = time.process_time() - begun_s
            least[new, rows] = min(least.get((new, rows), np.inf), taken_s)
    return [
        {
            "table": "draft", "unread": new, "drafts": rows, "pass_ms": 1e3 * taken_s,
            "draft_ms": 1e3 * taken_s / rows, "ratio": taken_s / least[1, 1],
        }
        for (new, rows), taken_s in least.items()
    ]  # fmt: skip


def places(texts: int) -> Rows:
    """α of the hand-made drafter by place, along the target's own samples."""
    sums, rng = np.zeros(ROWS), np.random.default_rng(0)
    count, taken = 0, 0.0
    with tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as name:
        drafter, target = (Decoder(each, threads=1) for each in ring_pair(Path(name)))
        for start in range(texts):
            text = [start]
            for _ in range(40):
                text.append(int(rng.choice(VOCAB, p=_law(target, text, 1)[0])))
            p = _law(target, text, len(text))
            for end in range(5, len(text) - ROWS):
                q = _law(drafter, [*text[:end], *[MASK] * (ROWS - 1)], ROWS)
                alpha = np.minimum(p[end - 1 : end - 1 + ROWS], q).sum(axis=1)
                sums += alpha
                taken += float(np.cumprod(alpha).sum())
                count += 1
    return [
        {"table": "places", "place": place, "alpha": alpha, "right_per_pass": taken / count}
        for place, alpha in enumerate((sums / count).tolist())
    ]


def _law(decoder: Decoder, tokens: Sequence[int], rows: int) -> np.ndarray:
    """The distributions f64 [rows, V] after the last tokens, at temperature 1."""
    decoder.rollback(0, 0)
    logits = decoder.forward([Pass(0, np.array(tokens), rows)])[0].logits.astype(np.float64)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: np.ndarray = weights / weights.sum(axis=1, keepdims=True)
    return result


@dataclass
class Drafting:
    """The drafter of the simulation: what it has drafted after the tokens that it knows.

    alphas: a draft's acceptance by its place in a pass, if those before it are right. pass_ms: time
    of a pass by its number of tokens. late_ms: half of an RTT. start: position of the first token
    after the last correction. right, alone, arrivals: of each draft from there, whether all up to
    it are right, its acceptance, and when it reaches the edge.
    """

    alphas: Sequence[float]
    pass_ms: Callable[[int], float]
    late_ms: float
    rng: np.random.Generator
    start: int = 0
    free_ms: float = 0.0
    right: list[bool] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    known: list[tuple[float, int]] = field(default_factory=lambda: [(0.0, 0)])

    def correct(self, position: int, at_ms: float) -> None:
        """The target chose another token before ``position``; the device learns it ``at_ms``."""
        self.free_ms = max(at_ms, self.free_ms)
        self.start, self.known = position, [(at_ms, position)]
        self.right, self.alone, self.arrivals = [], [], []

    def run_until(self, now_ms: float) -> None:
        """Run all passes that begin before now."""
        while self.free_ms < now_ms:
            begin_ms = self.free_ms
            if not self._wanted(begin_ms):
                later = [at for at, _ in self.known if at > begin_ms]
                if not later or later[0] > now_ms:
                    return
                self.free_ms = later[0]
                continue
            unread = len(self.alphas) if self.right else 1  # the drafts of the pass before
            end_ms = begin_ms + self.pass_ms(unread + len(self.alphas) - 1)
            self.free_ms = end_ms
            for alpha in self.alphas:
                if not self._wanted(begin_ms):
                    break
                before = self.right[-1] if self.right else True
                self.right.append(before and bool(self.rng.random() < alpha))
                self.alone.append(alpha)
                self.arrivals.append(end_ms + self.late_ms)

    def _wanted(self, at_ms: float) -> bool:
        committed = max((count for known_ms, count in self.known if known_ms <= at_ms), default=0)
        ahead = self.alone[max(0, committed - self.start) :]
        return len(ahead) < MAX_WINDOW and float(np.prod(ahead)) >= FLOOR


def times_stream(
    alphas: Sequence[float],
    pass_ms: Callable[[int], float],
    target: tuple[float, float],
    rtt_ms: float,
    tokens: int,
) -> float:
    """The speed of `ahead` as a multiple of `stream`'s."""
    alone_ms, more_ms = target
    drafter = Drafting(alphas, pass_ms, rtt_ms / 2, np.random.default_rng(1))
    now_ms, committed = 0.0, 0
    while committed < tokens:
        drafter.run_until(now_ms)
        first = committed - drafter.start
        arrived = [at for at in range(first, len(drafter.right)) if drafter.arrivals[at] <= now_ms]
        offered = arrived[:MOST_DRAFTS]
        worth = np.cumprod([drafter.alone[at] for at in offered]) >= more_ms / alone_ms
        offered = offered[: int(np.count_nonzero(worth))]
        accepted = sum(drafter.right[at] for at in offered)
        now_ms += alone_ms + more_ms * len(offered)
        committed += accepted + 1
        learnt_ms = now_ms + drafter.late_ms
        drafter.run_until(learnt_ms)  # the pass under way is finished, and compared, too
        last = committed - 1 - drafter.start  # the target's own token
        if last < len(drafter.right) and drafter.right[last]:
            drafter.known.append((learnt_ms, committed))
            del drafter.known[:-64]
        else:
            drafter.correct(committed, learnt_ms)
    return alone_ms * committed / now_ms


def forecast(ratios: dict[int, float], tokens: int) -> Rows:
    """The speed of `ahead` and of windows by RTT, drafter and target.

    ratios: by number of tokens, the time of a pass as a multiple of a single token's.
    """
    drafters = {
        "cpu": {width: DRAFT_MS * ratio for width, ratio in ratios.items()},
        "gpu": {1: DRAFT_MS, ROWS: GPU_RATIO * DRAFT_MS, 2 * ROWS - 1: GPU_RATIO * DRAFT_MS},
    }
    rows: Rows = []
    for target, times in TARGETS.items():
        for where, pass_times in drafters.items():
            for case, alphas in CASES.items():
                for rtt_ms in RTTS_MS:
                    name = {"target": target, "drafter": where, "case": case, "rtt_ms": rtt_ms}
                    rows.append({
                        "table": "forecast", **name,
                        **ahead_forecast(alphas, pass_times, times, rtt_ms, tokens),
                    })  # fmt: skip
                    rows.append({
                        "table": "windows", **name,
                        **window_forecast(alphas, pass_times, times, rtt_ms),
                    })  # fmt: skip
    return rows


def ahead_forecast(
    alphas: Sequence[float],
    pass_times: dict[int, float],
    target: tuple[float, float],
    rtt_ms: float,
    tokens: int,
) -> dict[str, float]:
    count = stream_drafts(alphas, pass_times, target_s=target[0], rtt_s=rtt_ms)

    def pass_ms(width: int) -> float:
        return float(np.interp(width, list(pass_times), list(pass_times.values())))

    single, several = (
        times_stream(alphas[:drafts], pass_ms, target, rtt_ms, tokens) for drafts in (1, count)
    )
    return {"drafts": count, "single": single, "several": several}


def window_forecast(
    alphas: Sequence[float],
    pass_times: dict[int, float],
    target: tuple[float, float],
    rtt_ms: float,
) -> dict[str, float]:
    """The best window's speed with one draft per pass, with the fewest passes, and as chosen."""
    alone_ms, more_ms = target
    speeds: dict[str, float] = dict.fromkeys(("single", "widest", "several"), 0.0)
    best = 0
    for drafts in WINDOWS:
        waiting_ms = rtt_ms + alone_ms + more_ms * drafts
        chosen = single_passes(alphas, pass_times, waiting_s=waiting_ms, drafts=drafts)
        for name, single in zip(speeds, (drafts, 0, chosen), strict=True):
            passes = window_passes(single, drafts, ROWS)
            speed = alone_ms * window_tokens_per_s(alphas, pass_times, passes, waiting_s=waiting_ms)
            if name == "several" and speed > speeds[name]:
                best = chosen
            speeds[name] = max(speeds[name], speed)
    return {"drafts": best, **speeds}


def main() -> int:
    parser = options(str(__doc__).partition("\n\n")[0])
    pair_options(parser)
    args = parser.parse_args()
    steps = Steps(3)
    steps.next("the time of a draft")
    timed = draft_times(args.draft or default_pair()[0], 8 if args.quick else TURNS)
    steps.next("α by place")
    rows = timed + places(2 if args.quick else 10)
    steps.next("what `ahead` gains")
    ratios = {row["unread"] + row["drafts"] - 1: row["ratio"] for row in timed}
    rows += forecast(ratios, 500 if args.quick else 10_000)
    columns = tuple(dict.fromkeys(key for row in rows for key in row))
    return conclude(args, "drafters of many tokens per pass", columns, rows, [])


if __name__ == "__main__":
    sys.exit(main())
