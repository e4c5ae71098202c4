"""``pilotfish judge questions``: write the made-up questions of task facts to a file."""

import argparse
import json
from pathlib import Path
from typing import Annotated

from msgspec import Struct

from pilotfish.base.files import write_output
from pilotfish.base.settings import setting
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands
from pilotfish.lab.judge.facts_task import SETS, make_questions

_EXAMPLE = """\
example:
  pilotfish judge questions --set train --count 600 --out train.jsonl
  pilotfish judge mine --task facts --questions train.jsonl …
"""


class QuestionsSettings(Struct, frozen=True, kw_only=True):
    """Options of ``pilotfish judge questions``."""

    set: Annotated[str, setting("the set; each is drawn on its own", choices=SETS)] = "train"
    count: Annotated[int, setting("number of questions", ge=1)] = 600
    out: Annotated[Path, setting("output: JSON lines with question and answer", metavar="FILE")]


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "questions",
        help="make questions whose answers can be checked",
        description="Writes questions for --task facts: each asks for a short text with given\n"
        "facts. The same set and number give the same questions on every machine.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, QuestionsSettings)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, QuestionsSettings)
    lines = [
        json.dumps({"question": question.message, "answer": question.answer})
        for question in make_questions(settings.set, settings.count)
    ]
    write_output(settings.out, ("\n".join(lines) + "\n").encode())
    print(settings.out)
    return 0
