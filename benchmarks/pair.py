"""A pair of two vocabularies, prompt by prompt: are its texts the target's, and how fast are they?

    python benchmarks/pair.py [--draft DIR] [--target DIR] [--questions FILE --count N] [--chats N]
        [--tokens N] [--window W …] [--out FILE] [--json PATH] [--quick]
    python benchmarks/pair.py --report FILE [--json PATH]

An edge process with the target and a device with the drafter, CURVE over loopback between them,
each with a thread for each core: they wait for each other. On each prompt `stream` and drafting
protocols take turns, at temperature 0 (`greedy`) and 1 (`coupled`, with the same seed), and their
tokens should be equal. "alpha" is the share accepted of the verified positions; "tokens_per_s"
leaves out an answer's first round, "ratio" is that over `stream`'s on the same prompt (median and
quartiles over prompts); "whole_per_s" has everything in it, reading the prompt too.

Where texts part that should be equal the target is asked why, when all is done: a "tie" is one of
less than 1e-3 between two tokens; "shape" means that each text is what the target says if it reads
as that run read, token by token or a window at once. The last table tells how much that changes.

--out keeps a line for each prompt; a later run goes on behind the lines that are there. `--report`
shows the tables of such a file. "bridge_…_ms" is what the bridge between the vocabularies costs the
device in a round (`bridge`); it is a part of "draft_ms".
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from _common import Steps, conclude, options, pair, pair_options, show, throwaway_keys
from _pair_partings import Replays, examined, partings, shapes
from _pair_prompts import Prompt, chats, questions
from _pair_report import PARTS, SHAPES, SPEED, goals, rows, shape_rows
from _pair_runs import ALONE, Meter, Results, Run, answered, pair_name, runs

from pilotfish import Device, EdgeServer

SHAPED = 3  # prompts whose answers are read in both ways


def window(text: str) -> "int | str":
    """A window's size, or "auto"."""
    return text if text == "auto" else int(text)


def measure(
    args: argparse.Namespace, prompts: Sequence[Prompt], every: Sequence[Run], results: Results
) -> None:
    """A line for each prompt that has none yet."""
    done = {line["prompt"] for line in results.of("prompt")}
    left = [(seed, item) for seed, item in enumerate(prompts) if item.name not in done]
    if not left:
        return
    drafter, target = pair(args)
    settings = _settings(args)
    steps, meter = Steps(len(left)), Meter()
    with (
        throwaway_keys() as folder,
        EdgeServer(target, keys=folder) as edge,
        Device(drafter, edge.endpoint, folder, on_round=meter.ended) as device,
    ):
        for run in every:  # the first passes of fresh engines are slow ones
            device.generate("Hello!", **run.options(0, 6))
        for seed, item in left:
            steps.next(f"{item.name}: {len(every)} answers")
            prompt = device.prompt(item.content)
            line = {"prompt": item.name, "kind": item.kind, "seed": seed, "settings": settings}
            result = answered(device, meter, prompt, every, seed=seed, tokens=args.tokens)
            results.add({**line, "prompt_ids": prompt.ids.tolist(), **result})


def explain(target: Path, every: Sequence[Run], results: Results) -> None:
    """Look at all partings that were not looked at; and at what a pass's shape changes."""
    known = {(item["parting"], item["run"]) for item in results.of("parting")}
    lines = results.of("prompt")
    wanted = [
        (line, run, at)
        for line in lines
        for run, at in partings(line, every)
        if (line["prompt"], run.name) not in known
    ]
    widths = {item.window + 1 for item in every if isinstance(item.window, int) and item.window}
    shaped = {(item["shape"], item["width"]) for item in results.of("shape")}
    wide = [
        (line, width)
        for line in lines[:SHAPED]
        for width in sorted(widths)
        if (line["prompt"], width) not in shaped
        and len(line["runs"][ALONE[0.0]]["tokens"]) >= width
    ]
    if not wanted and not wide:
        return
    print(f"looking at {len(wanted)} partings", file=sys.stderr)
    replays = Replays(target)
    for line, run, at in wanted:
        results.add({"parting": line["prompt"], **examined(replays, line, run, at)})
    for line, width in wide:
        results.add({"shape": line["prompt"], **shapes(replays, line, width)})


def report(args: argparse.Namespace, results: Results) -> int:
    """The tables of all lines."""
    lines = results.of("prompt")
    if not lines:
        print("There are no answers in this file.", file=sys.stderr)
        return 1
    settings = lines[0]["settings"]
    every = runs(settings["windows"])
    made = rows(lines, results.of("parting"), every)
    title = f"{settings['pair']}, {settings['tokens']} tokens"
    show(args, "where the time of a round goes", PARTS, [r for r in made if r["prompts"] == "all"])
    show(args, "what a pass's width changes", SHAPES, shape_rows(results.of("shape")))
    return conclude(args, title, SPEED, made, goals(made))


def _settings(args: argparse.Namespace) -> dict[str, object]:
    return {"pair": pair_name(*pair(args)), "tokens": args.tokens, "windows": args.window}


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    result = questions(args.questions, args.count) if args.questions else []
    return [*result, *chats(args.chats)]


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    parser.add_argument("--questions", type=Path, metavar="FILE", help='JSON lines with "question"')
    parser.add_argument("--count", type=int, default=50, help="questions (%(default)s)")
    parser.add_argument("--chats", type=int, default=20, help="chat prompts (%(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer (%(default)s)")
    parser.add_argument(
        *("--window", "-w"),
        type=window,
        nargs="+",
        default=[4],
        metavar="W",
        help='draft tokens a round, or "auto"; several are compared (default: 4)',
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the answers, go on there")
    parser.add_argument("--report", type=Path, metavar="FILE", help="only show what is there")
    args = parser.parse_args()
    if args.report:
        return report(args, Results(args.report))
    if args.quick:
        args.count, args.chats, args.tokens = 2, 2, min(args.tokens, 24)
    with tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as scratch:
        results = Results(args.out or Path(scratch) / "answers.jsonl")
        other = [item for item in results.of("prompt") if item["settings"] != _settings(args)]
        if other:
            parser.error(f"{args.out} has answers with other settings: {other[0]['settings']}")
        every = runs(args.window)
        measure(args, _prompts(args), every, results)
        explain(pair(args)[1], every, results)
        return report(args, results)


if __name__ == "__main__":
    sys.exit(main())
