"""decentralized-dsd's ablation: accepted length and speed against τ, and how far the law deviates.

    python benchmarks/adaptive.py [--draft DIR] [--target DIR] [--relaxation FILE]
        [--lambdas L1,L2,L3 …] [--tau T …] [--window W] [--tokens N] [--prompts N] [--top-k K]
        [--task gsm8k FILE --count N] [--out FILE] [--json PATH] [--quick]
    python benchmarks/adaptive.py --report FILE [--json PATH]

An edge process with the target and a device with the drafter, CURVE over loopback between them. At
temperature 1, `stream` and `adaptive` with each τ (and each triple of λ: "own" is the edge's, by
--relaxation or built in) take turns on each prompt, with the same seed; τ = 0 is `tslt`, draw by
draw. "deviation" is the mean total variation of a verified position from the target's law: by as
much its acceptance rises, "alpha" over that at τ = 0, but for the texts' difference. "accepted" is
the accepted length, tokens a round with the correction or bonus (AAL). "tokens_per_s" leaves out
each answer's first round; "ratio" is that over τ = 0 on the same prompt, median and quartiles over
prompts; "speedup" the same over `stream`. The paper reports accepted lengths 15 to 20 % longer, and
no less accuracy, for τ up to 0.3, without its λ.

With --task, prompts are the questions of FILE, and "right" counts the answers that come to the
reference, between "low" and "high" (95 %, Wilson); "p" is the probability of as many or more
questions that only one of τ and `stream` gets right (two-sided sign test), were both as good.

--out keeps a line for each prompt; a later run goes on behind the lines that are there.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
from _common import (
    PROMPTS,
    Goal,
    Rows,
    Steps,
    at_least,
    conclude,
    options,
    pair,
    pair_options,
    throwaway_keys,
)
from _pair_runs import Results, pair_name

from pilotfish import Device, EdgeServer, Generation
from pilotfish.lab.judge.tasks import TASKS, Question, Task, make_task, read_task_questions
from pilotfish.lab.statistics import share_interval
from pilotfish.wire.request import Options

TAUS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8)
ALONE = "stream"
COLUMNS = (
    *("lambdas", "tau", "alpha", "accepted", "longer", "deviation", "tokens_per_s"),
    *("ratio", "q1", "q3", "speedup", "n", "right", "low", "high", "p"),
)
LONGER = 1.15  # the paper's 15 %, for τ up to 0.3
DEVIATES_IN_PAPER = 0.3


@dataclass(frozen=True)
class Case:
    """One way to answer. lambdas: as a list of them, or "own"; tau: None is `stream`."""

    lambdas: str
    tau: float | None

    @property
    def name(self) -> str:
        """As lines have it."""
        return ALONE if self.tau is None else f"{self.lambdas} τ={self.tau:g}"

    def options(self, args: argparse.Namespace, seed: int) -> Options:
        """For `Device.generate`."""
        wanted: Options = {
            "temperature": args.temperature,
            "seed": seed,
            "max_tokens": args.tokens,
        }
        if self.tau is None:
            return {**wanted, "protocol": ALONE}
        ours = None if self.lambdas == "own" else [float(part) for part in self.lambdas.split(",")]
        drafting: Options = {"window": args.window, "draft_top_k": args.top_k}
        return {**wanted, **drafting, "protocol": "adaptive", "tau": self.tau, "lambdas": ours}


def cases(args: argparse.Namespace) -> list[Case]:
    """`stream`, and each τ under each triple."""
    named = args.lambdas or ["own"]
    return [Case("", None), *(Case(each, tau) for each in named for tau in args.tau)]


def measure(args: argparse.Namespace, results: Results) -> None:
    """A line for each prompt that has none yet."""
    task, wanted = _requests(args)
    done = {line["prompt"] for line in results.of("prompt")}
    left = [(seed, item) for seed, item in enumerate(wanted) if item.key not in done]
    if not left:
        return
    drafter, target = pair(args)
    ours = {} if args.relaxation is None else {"relaxation": args.relaxation}
    every, steps = cases(args), Steps(len(left))
    with (
        throwaway_keys() as folder,
        EdgeServer(target, keys=folder, **ours) as edge,
        Device(drafter, edge.endpoint, folder) as device,
    ):
        device.generate(
            "Hello!", protocol="greedy", max_tokens=8
        )  # the first passes of fresh engines are slow ones
        for seed, question in left:
            steps.next(f"{question.key}: {len(every)} answers")
            device.generate(
                question.message, protocol="greedy", max_tokens=1
            )  # both ends read the prompt
            first = seed % len(every)
            answers = {
                case.name: output_of(
                    device.generate(question.message, **case.options(args, seed)), question, task
                )
                for case in (*every[first:], *every[:first])
            }
            line = {"prompt": question.key, "settings": _settings(args), "answers": answers}
            results.add(line)


def output_of(answer: Generation, question: Question, task: Task | None) -> dict[str, Any]:
    """An answer as a line has it. after: tokens behind the first round, in after_s seconds."""
    rounds = answer.rounds
    return {
        "text": answer.text,
        "tokens": len(answer.tokens),
        "finish": answer.finish_reason,
        "rounds": len(rounds),
        "verified": sum(item.verified for item in rounds),
        "accepted": sum(item.accepted for item in rounds),
        "deviation": sum(item.notes.get("deviation", 0.0) for item in rounds),
        "after": sum(len(item.tokens) for item in rounds[1:]),
        "after_s": answer.total_s - answer.first_token_s,
        "total_s": answer.total_s,
        "right": None
        if task is None
        else task.right(question, task.outcome(question, answer.text)),
    }


def report(args: argparse.Namespace, results: Results) -> int:
    """The table of all lines."""
    lines = results.of("prompt")
    if not lines:
        print("There are no answers in this file.", file=sys.stderr)
        return 1
    settings = lines[0]["settings"]
    rows = [_row(lines, Case(*case)) for case in settings["cases"]]
    for row in rows:
        strict = [item for item in rows if item["tau"] == 0.0 and item["lambdas"] == row["lambdas"]]
        row["longer"] = row["accepted"] / strict[0]["accepted"] if strict else float("nan")
    title = f"{settings['pair']}, temperature {settings['temperature']:g}, γ = {settings['window']}"
    return conclude(args, f"{title}, {len(lines)} prompts", COLUMNS, rows, goals(rows))


def _row(lines: Sequence[dict[str, Any]], case: Case) -> dict[str, Any]:
    result = [line["answers"][case.name] for line in lines]
    strict = Case(case.lambdas, 0.0).name
    speeds = [_speed(item) for item in result]

    def over(name: str) -> list[float]:
        others = [line["answers"].get(name) for line in lines]
        pairs = [(a, _speed(b)) for a, b in zip(speeds, others, strict=True) if b is not None]
        return [a / b for a, b in pairs if a and b]

    low, median, high = _quartiles(over(strict))
    verified = sum(item["verified"] for item in result)
    row: dict[str, Any] = {
        "lambdas": case.lambdas,
        "tau": "stream" if case.tau is None else case.tau,
        "n": len(result),
        "alpha": sum(item["accepted"] for item in result) / verified if verified else "",
        "accepted": sum(item["tokens"] for item in result) / sum(item["rounds"] for item in result),
        "deviation": sum(item["deviation"] for item in result) / verified if verified else "",
        "tokens_per_s": sum(item["after"] for item in result)
        / sum(item["after_s"] for item in result),
        "ratio": median,
        "q1": low,
        "q3": high,
        "speedup": _quartiles(over(ALONE))[1],
    }
    if result[0]["right"] is not None:
        alone = [line["answers"][ALONE]["right"] for line in lines]
        right = [item["right"] for item in result]
        interval = share_interval(sum(right), len(right))
        row |= {"right": sum(right), "low": interval[0], "high": interval[1]}
        row["p"] = _sign_test([(a, b) for a, b in zip(right, alone, strict=True) if a != b])
    return row


def goals(rows: Rows) -> list[Goal]:
    """Strict is strict; the paper's longer rounds at τ up to 0.3."""
    return [
        at_least(
            f"accepted length over τ = 0, λ {row['lambdas']}, τ = {row['tau']:g}",
            row["longer"],
            LONGER,
        )
        for row in rows
        if row["tau"] == DEVIATES_IN_PAPER
    ]


def _speed(answer: dict[str, Any] | None) -> float | None:
    """Tokens a second behind the first round; None where there are none."""
    return float(answer["after"] / answer["after_s"]) if answer and answer["after"] else None


def _quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    if not values:
        return (float("nan"),) * 3
    low, median, high = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
    return low, median, high


def _sign_test(differing: Sequence[tuple[bool, bool]]) -> float:
    """Two-sided, of questions that only one of two gets right."""
    n, ours = len(differing), sum(a for a, _ in differing)
    tail = sum(comb(n, k) for k in range(min(ours, n - ours) + 1)) / 2**n
    return min(1.0, 2 * tail)


def _requests(args: argparse.Namespace) -> tuple[Task | None, list[Question]]:
    if args.task is None:
        return None, [
            Question(f"p{n:02}", item, "") for n, item in enumerate(PROMPTS[: args.prompts])
        ]
    name, path = args.task
    task = make_task(name)
    return task, read_task_questions(Path(path), task)[: args.count]


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "pair": pair_name(*pair(args)),
        "temperature": args.temperature,
        "window": args.window,
        "top_k": args.top_k,
        "tokens": args.tokens,
        "relaxation": None if args.relaxation is None else args.relaxation.read_text("utf-8"),
        "cases": [[case.lambdas, case.tau] for case in cases(args)],
    }


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    add = parser.add_argument
    add("--relaxation", type=Path, metavar="FILE", help="the edge's, by judge calibrate")
    add(
        "--lambdas",
        nargs="+",
        metavar="L1,L2,L3",
        help='triples to compare; "own": the edge\'s; 1e6,1,0: no token is key (own)',
    )
    add("--tau", type=float, nargs="+", default=list(TAUS), metavar="T", help="(0 … 0.8)")
    add("--window", type=int, default=4, metavar="W", help="draft tokens a round (%(default)s)")
    add("--top-k", type=int, default=64, metavar="K", help="the drafter's (%(default)s)")
    add("--temperature", type=float, default=1.0, metavar="T", help="(%(default)s)")
    add("--tokens", type=int, default=128, metavar="N", help="of an answer (%(default)s)")
    add("--prompts", type=int, default=len(PROMPTS), metavar="N", help="(%(default)s)")
    add("--task", nargs=2, metavar=("TASK", "FILE"), help=f"{', '.join(TASKS)}; its questions")
    add("--count", type=int, default=50, metavar="N", help="questions (%(default)s)")
    add("--out", type=Path, metavar="FILE", help="keep the answers, go on there")
    add("--report", type=Path, metavar="FILE", help="only show what is there")
    args = parser.parse_args()
    if args.report:
        return report(args, Results(args.report))
    if args.quick:
        args.prompts, args.count, args.tokens = 2, 2, min(args.tokens, 48)
    with tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as scratch:
        results = Results(args.out or Path(scratch) / "answers.jsonl")
        if any(item["settings"] != _settings(args) for item in results.of("prompt")):
            parser.error(f"{args.out} has answers with other settings")
        measure(args, results)
        return report(args, results)


if __name__ == "__main__":
    sys.exit(main())
