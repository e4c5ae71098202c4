"""``pilotfish judge mine``: which mismatches of a pair change what answers come to."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from pilotfish.cli.countdown import Countdown
from pilotfish.cli.options import Commands, between, engine_options, json_option, write_json
from pilotfish.device_runtime.bridge import Pair
from pilotfish.engines.artifact import Artifact, Manifest
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.judge.episodes import Episode, Mined, done, episodes
from pilotfish.judge.mining import SLACK, mine
from pilotfish.judge.reading import Readers
from pilotfish.judge.speakers import length
from pilotfish.judge.tasks import TASKS, Question, Task, questions, task_named
from pilotfish.wire.errors import UnsupportedError

_EXAMPLE = """\
example:
  pilotfish judge mine --draft drafter --target target --questions train.jsonl --right-only \\
      --out mined

What was interrupted goes on where it stopped when the same command is given again. Mining takes
the target many answers a question: at most one for each token that the drafter would have said
otherwise.

Forgiving may gain nothing: the target wanted to end, or wants the same token right behind and the
drafter errs there again, or the answer becomes longer by more than --slack, or loses its end. Such
mismatches stall, and heads learn to reject them, too.
"""


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "mine",
        help="find out which mismatches matter",
        description="Answers questions with the target, and wherever the drafter would have said "
        "another token, lets the target go on from that one. Writes each mismatch with both "
        "models' states, and whether it changed what the answer comes to.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--draft", required=True, type=Path, metavar="DIR", help="drafter's artifact")
    add("--target", required=True, type=Path, metavar="DIR", help="target's artifact")
    add(
        "--questions",
        required=True,
        type=Path,
        metavar="FILE",
        help='JSON lines with "question" and "answer"',
    )
    add("--out", required=True, type=Path, metavar="DIR", help="folder for a file a question")
    add(
        "--task",
        choices=tuple(TASKS),
        default="gsm8k",
        help="what an answer comes to: its last number, its words, or what --checker prints "
        "(%(default)s)",
    )
    add(
        "--checker",
        type=shlex.split,
        default=[],
        metavar="COMMAND",
        help="task command: reads a line of JSON with question, answer and text; prints what the "
        "text comes to; ends with 0 if that is right, with 1 if not",
    )
    add("--count", type=between(1), metavar="N", help="the first N questions (default: all)")
    add(
        "--max-tokens",
        type=between(1),
        default=160,
        metavar="N",
        help="of an answer (%(default)s)",
    )
    slack = parser.add_mutually_exclusive_group()
    slack.add_argument(
        "--slack",
        type=between(0),
        default=SLACK,
        metavar="N",
        help="tokens by which a mismatch may lengthen the answer before it stalls (%(default)s)",
    )
    slack.add_argument(
        "--outcome-only",
        dest="slack",
        action="store_const",
        const=None,
        help="ablation: label by the outcome alone, as in the paper",
    )
    add(
        "--right-only",
        action="store_true",
        help="take no mismatches from answers that are wrong or do not end: they have nothing to "
        "lose",
    )
    add(
        "--slots",
        type=between(1, 256),
        default=8,
        metavar="N",
        help="questions at a time (%(default)s)",
    )
    add(
        "--context",
        type=between(2),
        default=640,
        metavar="N",
        help="tokens of a question and its answer; longer ones are left out (%(default)s)",
    )
    engine_options(parser)
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    task = task_named(args.task, args.checker)
    asked = questions(args.questions, task)[: args.count]
    drafter, target = (Artifact.open(path) for path in (args.draft, args.target))
    pair = Pair(Vocabulary.of(drafter), Vocabulary.of(target))
    Mined(
        task=task.name,
        instruction=task.instruction,
        most=args.max_tokens,
        slack=args.slack,
        right_only=args.right_only,
        drafter=_end(drafter.manifest),
        target=_end(target.manifest),
    ).begin(args.out)
    context = min(args.context, *(one.manifest.dimensions.context for one in (drafter, target)))
    fitting = [one for one in asked if length(one, pair, args.max_tokens) <= context]
    there = done(args.out)
    left = [one for one in fitting if one.key not in there]
    screen = Console(stderr=True, highlight=False, soft_wrap=True)
    if len(fitting) < len(asked):
        screen.print(
            f"{len(asked) - len(fitting)} of {len(asked)} questions are left out, for they and "
            f"their answers may have more than {context} tokens (--context, and the models' own)."
        )
    if not fitting:
        raise UnsupportedError(
            f"All questions are too long for {context} tokens: give a larger --context, or models "
            "that have it."
        )
    if left:
        _mine(args, pair, task, left)
    found = [one for one in episodes(args.out) if one.key in {q.key for q in fitting}]
    figures = _figures(found)
    screen.print(
        "{questions} questions, {right} answered rightly; {mismatches} mismatches: {critical} "
        "critical, {stalling} stall".format(**figures)
    )
    if args.json:
        write_json(args.json, figures)
    return 0


def _mine(args: argparse.Namespace, pair: Pair, task: Task, left: Sequence[Question]) -> None:
    """The episodes of these questions, each written as soon as it is there."""
    readers = Readers.open(
        args.draft,
        args.target,
        slots=min(args.slots, len(left)),
        context=args.context,
        threads=args.threads,
        provider=args.provider,
    )
    with Countdown("mining, questions", len(left)) as countdown:
        found = mine(
            readers,
            pair,
            task,
            left,
            ends=pair.target.eos_ids,
            most=args.max_tokens,
            slack=args.slack,
            right_only=args.right_only,
        )
        for number, episode in enumerate(found, 1):
            episode.write(args.out)
            countdown.at(number)


def _end(manifest: Manifest) -> dict[str, Any]:
    """What a head's card says of a model (`edge_runtime.head_file.End`)."""
    return {
        "model": manifest.model,
        "origin": manifest.origin,
        "precision": manifest.precision,
        "hidden": manifest.dimensions.hidden,
    }


def _figures(found: Sequence[Episode]) -> dict[str, int]:
    return {
        "questions": len(found),
        "right": sum(one.right for one in found),
        "mismatches": sum(len(one) for one in found),
        "critical": sum(int(one.critical.sum()) for one in found),
        "stalling": sum(int(one.stalling.sum()) for one in found),
    }
