"""What constraints cost: a mask, a hostile grammar beside a neighbour, a round without any.

    python benchmarks/constraints.py [masks] [options] [hostile] [rounds] [--json PATH] [--quick]
        [--against PATH] [--large DIR] [--only NAME]

masks    of several kinds of grammar over the default target's vocabulary and a large one: compiling
         it for the first time, with its trial, and again; one mask a row, at random answers; and
         the memory of the vocabulary as it is read for grammars
options  the other options of a window together (bias, penalties, logprobs), behind texts of several
         lengths, V = 151,665: CPU time, and memory beside the logits
hostile  each attack of `_constraints_attacks`, by a key of its own: what came of it, when, what
         memory it took and left; and the rounds meanwhile of a neighbour, of another key, that
         constrains nothing (`greedy`, window 4), beside its rounds just before
rounds   a round without a grammar against an older commit's, answer by answer in turn, less the
         target's pass: --against is a checkout of that commit

--large: an artifact with a large vocabulary; by default one is made up: the default one's tokens,
and pairs of these at random, 151,936 in all.
"""

import argparse
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _common import PROMPTS, Goal, Rows, Steps, at_most, options, pair, pair_options, show
from _constraints_attacks import ATTACKS
from _constraints_beside import HERE, Lines, attacked
from _constraints_masks import LARGE, masks_of
from _constraints_options import TEXTS, options_of

from pilotfish.cli.options import write_json

TOKEN_S = 2e-8  # of a vocabulary: what a constraint may take for a row (engines/constraint.py)
WORST_S, ENDED_S, GROWTH_MIB = 0.3, 1.5, 256.0
RATIO = 1.05
WINDOW_MS, WINDOW_MIB = 20.0, 8.0

Measured = tuple[Rows, list[Goal]]


def masks(args: argparse.Namespace) -> Measured:
    """Time masks over both vocabularies."""
    target = pair(args)[1]
    cases = [(target, 0), (args.large, 0) if args.large else (target, LARGE)]
    steps, rows = Steps(len(cases)), []
    for place, size in cases:
        steps.next(f"{size or 'all'} tokens of {place.name}")
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:  # for its memory
            rows += fresh.submit(masks_of, place, size, 200 if args.quick else 1000).result()
    return rows, [
        *(at_most(f"{row['grammar']}, V = {row['V']}: mean of a mask, ms", row["mean_ms"],
                  1e3 * TOKEN_S * row["V"]) for row in rows),
        at_most("answers that cost too much", sum(row["too_costly"] for row in rows), 0),
    ]  # fmt: skip


def other_options(args: argparse.Namespace) -> Measured:
    """Time the options of a window that are no grammar."""
    steps, rows = Steps(len(TEXTS)), []
    for text in TEXTS:
        steps.next(f"a text of {text:,} tokens")
        rows += options_of(text, 5 if args.quick else 21)
    return rows, [
        *(at_most(f"{row['window']} behind {row['text']:,} tokens: options of a window, ms of CPU",
                  row["window_ms"], WINDOW_MS) for row in rows),
        *(at_most(f"{row['window']} behind {row['text']:,} tokens: memory beside the logits, MiB",
                  row["peak_mib"], WINDOW_MIB) for row in rows),
    ]  # fmt: skip


def hostile(args: argparse.Namespace) -> Measured:
    """Attack edges, one after the other."""
    draft, target = pair(args)
    names = [name for name in ATTACKS if not args.only or name in args.only]
    names = names[::6] if args.quick and not args.only else names
    steps, rows = Steps(len(names)), []
    while names:  # a new edge where one is lost
        for row in attacked(names, draft, target):
            steps.next(row["attack"])
            print(f"  {row['outcome']}, {row['worst_s']:.3f} s, {row['times']}", file=sys.stderr)
            rows.append(row)
        names = names[names.index(row["attack"]) + 1 :]
    attacks = [row for row in rows if not row["attack"].startswith("(")]
    return rows, [
        *(at_most(f"{row['attack']}: neighbour's worst round, s", row["worst_s"], WORST_S)
          for row in attacks),
        *(at_most(f"{row['attack']}: refused or begun, s", row["settled_s"], ENDED_S)
          for row in attacks),
        *(at_most(f"{row['attack']}: growth of the edge, MiB", row["peak_mib"], GROWTH_MIB)
          for row in attacks),
        at_most("neighbour's wrong answers", sum(row["wrong"] for row in rows), 0),
        at_most("edges that the neighbour lost", sum(bool(row["error"]) for row in rows), 0),
    ]  # fmt: skip


def rounds(args: argparse.Namespace) -> Measured:
    """Compare rounds with those of an older commit."""
    if args.against is None:
        print("rounds: left out, for there is no --against", file=sys.stderr)
        return [], []
    script, tokens = HERE / "_constraints_rounds.py", 96
    info = (script, *map(Path.absolute, pair(args)), tokens)
    here, there = HERE.parent, args.against.absolute()
    results: dict[str, list[Any]] = {"here": [], "there": []}
    count = 8 if args.quick else 24
    steps = Steps(count)
    with Lines(*info, root=here) as ours, Lines(*info, root=there) as theirs:
        for root, each in ((here, ours), (there, theirs)):
            if not Path(each.first["from"]).is_relative_to(root):
                raise SystemExit(f"{each.first['from']} is not of {root}")
        for at in range(-2, count):  # the first are slow
            both = [("here", ours), ("there", theirs)]
            for name, each in both[:: 1 if at % 2 else -1]:
                each.tell(PROMPTS[at % len(PROMPTS)])
                results[name].append(each.answer())
            if at >= 0:
                steps.next("one answer of each")
    return _compared({name: each[2:] for name, each in results.items()})


def _compared(figures: dict[str, list[Any]]) -> Measured:
    # [total, draft, pass] of each round, by answer; medians of an answer, of "rest" and "beyond"
    ways = {"rest": [1.0, 0.0, -1.0], "beyond": [1.0, -1.0, -1.0]}
    of = {
        (name, way): [float(np.median(np.array(each["rounds"]) @ signs)) for each in answers]
        for name, answers in figures.items()
        for way, signs in ways.items()
    }
    rows: Rows = []
    for way in ways:
        ours, theirs = of["here", way], of["there", way]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        low, high = np.percentile(ratios, (25, 75))
        rows.append({
            "less": "the pass" if way == "rest" else "the pass and drafting",
            "answers": len(ours), "here_ms": 1e3 * median(ours), "there_ms": 1e3 * median(theirs),
            "ratio": median(ratios), "ratio_p25": float(low), "ratio_p75": float(high),
        })  # fmt: skip
    pairs: Sequence[tuple[Any, Any]] = list(zip(figures["here"], figures["there"], strict=True))
    return rows, [
        at_most("a round less the pass, over the older commit's", rows[0]["ratio"], RATIO),
        at_most("answers that differ", sum(a["tokens"] != b["tokens"] for a, b in pairs), 0),
    ]


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    parser.add_argument(
        "tables", nargs="*", metavar="TABLE", help="masks, options, hostile, rounds (all)"
    )
    parser.add_argument("--against", type=Path, metavar="PATH", help="an older checkout")
    parser.add_argument("--large", type=Path, metavar="DIR", help="an artifact (see above)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="attacks of table hostile")
    args = parser.parse_args()
    tables = {"masks": masks, "options": other_options, "hostile": hostile, "rounds": rounds}
    if unknown := {*args.tables} - {*tables}:
        parser.error(f"there is no table {min(unknown)}: {', '.join(tables)}")
    rows: Rows = []
    goals: list[Goal] = []
    for name in args.tables or tables:
        measured, wanted = tables[name](args)
        if measured:
            show(args, f"constraints: {name}", list(measured[0]), measured)
        rows, goals = rows + [{"table": name, **row} for row in measured], goals + wanted
    for goal in goals:
        mark = "met   " if goal["met"] else "MISSED"
        print(f"{mark} {goal['name']} {goal['goal']:g}: {goal['value']:g}")
    if args.json:
        write_json(args.json, {"rows": rows, "goals": goals, "machine": args.company.report()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
