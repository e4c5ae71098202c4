"""``pilotfish judge mine``: find the mismatches of a pair that change an answer's outcome."""

import argparse
from collections.abc import Sequence

import msgspec
from rich.console import Console

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.progress import ProgressDisplay
from pilotfish.cli.default_models import drafter_folder, target_folder
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.lab.judge.episodes import Episode, MiningRecord, episodes, finished_questions
from pilotfish.lab.judge.mining import MineSettings, mine
from pilotfish.lab.judge.model_passes import Readers
from pilotfish.lab.judge.question_reader import model_card, select_fitting
from pilotfish.lab.judge.tasks import make_task, read_task_questions
from pilotfish.lab.pairs import OpenPair

_EXAMPLE = """\
example:
  pilotfish judge mine --draft drafter --target target --questions train.jsonl --right-only \\
      --out mined

To resume an interrupted run, give the same command again. Mining needs many target answers per
question: up to one for each token where the drafter differs from the target.

A mismatch is stalling if its acceptance gains nothing. There are three cases: the target wanted to
end the answer; the target wants the same token next, which the drafter misses again; the answer
grows by more than --slack, or no longer ends. Heads learn to reject stalling mismatches, too.
"""


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "mine",
        help="find the mismatches that change an answer's outcome",
        description="Answers questions with the target, and wherever the drafter predicts another\n"
        "token, lets the target continue from that token. Writes each mismatch with both models'\n"
        "states, and whether it changed the answer's outcome.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, MineSettings)
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, MineSettings)
    pair = drafter_folder(settings.draft), target_folder(settings.target)
    task = make_task(settings.task, settings.checker)
    selected = read_task_questions(settings.questions, task)[: settings.count]
    opened = OpenPair(*pair)
    opened.require_hidden_states()
    mined = MiningRecord(
        task=task.name,
        instruction=task.instruction,
        most=settings.max_tokens,
        slack=None if settings.outcome_only else settings.slack,
        right_only=settings.right_only,
        drafter=msgspec.to_builtins(model_card(opened.drafter)),
        target=msgspec.to_builtins(model_card(opened.target)),
    )
    context = min(settings.context, opened.context)
    fitting = select_fitting(selected, opened.vocabularies, settings.max_tokens, context)
    screen = Console(stderr=True, highlight=False, soft_wrap=True)
    if len(fitting) < len(selected):
        screen.print(
            f"{len(selected) - len(fitting)} of {len(selected)} questions are left out: "
            f"together with their answers, these questions may exceed {context} tokens, the "
            f"context (of --context and of the models)."
        )
    if not fitting:
        raise UnsupportedError(
            f"All questions are too long for a context of {context} tokens: give a larger "
            f"--context, or models with a larger context."
        )
    with mined.writing(settings.out):
        finished = finished_questions(settings.out)
        remaining = [question for question in fitting if question.key not in finished]
        if remaining:
            slots = min(settings.slots, len(remaining))
            readers = Readers(*opened.paths, slots=slots, context=settings.context, engine=settings)
            with ProgressDisplay() as display:
                report = display.counter("mining, questions", len(remaining))
                mined_episodes = mine(readers, opened.vocabularies, task, remaining, mined)
                for number, episode in enumerate(mined_episodes, 1):
                    episode.write(settings.out)
                    report(number)
    keys = {question.key for question in fitting}
    figures = _figures([question for question in episodes(settings.out) if question.key in keys])
    screen.print(
        "{questions} questions, {right} answered correctly; {mismatches} mismatches: "
        "{critical} critical, {stalling} stalling".format(**figures)
    )
    if args.json:
        write_json(args.json, figures)
    return 0


def _figures(mined_episodes: Sequence[Episode]) -> dict[str, int]:
    return {
        "questions": len(mined_episodes),
        "right": sum(episode.right for episode in mined_episodes),
        "mismatches": sum(len(episode) for episode in mined_episodes),
        "critical": sum(int(episode.critical.sum()) for episode in mined_episodes),
        "stalling": sum(int(episode.stalling.sum()) for episode in mined_episodes),
    }
