"""``pilotfish judge calibrate``: choose the key tokens of protocol ``adaptive``."""

import argparse
import hashlib
import itertools
from collections.abc import Callable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.progress import ProgressDisplay
from pilotfish.cli.default_models import drafter_folder, target_folder
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.cli.summary import add_rows
from pilotfish.edge_runtime.relaxation_file import (
    Outcome,
    RelaxationCard,
    expect_writable,
    write_relaxation,
)
from pilotfish.lab.judge.calibrating import (
    CalibrateSettings,
    ObservedPositions,
    Position,
    choose_relaxation,
    observe,
)
from pilotfish.lab.judge.instances import split
from pilotfish.lab.judge.model_passes import Readers
from pilotfish.lab.judge.question_reader import model_card, select_fitting
from pilotfish.lab.judge.tasks import Question, make_task, read_task_questions
from pilotfish.lab.pairs import OpenPair
from pilotfish.lab.prompts import read_prompts

_EXAMPLE = """\
Protocol adaptive verifies key tokens strictly, and all other tokens against a target distribution
softened by τ. A token is key if the drafter is much less certain than the target (their entropy
ratio exceeds λ₁), if their probabilities of the token differ by more than λ₂, or if their ten
likeliest tokens overlap by less than λ₃.

The target answers the prompts, and the drafter reads these answers. λ₁, λ₂ and λ₃ are chosen to
make rounds as long as possible while the output's distribution stays within --deviation of the
target's (mean total variation per position). Acceptance rises by the same amount. A fifth of the
prompts is held out and reported separately. The choice holds for this pair, and for similar
temperatures and texts.

example:
  pilotfish judge calibrate --draft drafter --target target --prompts prompts.txt \\
      --tau 0.2 --deviation 0.02 --out smol-qwen.json
  pilotfish edge serve --target target --relaxation smol-qwen.json
  pilotfish device run --draft drafter --edge tcp://edge:7077 --protocol adaptive \\
      --temperature 1 --stats "Why is the sky blue?"
"""
_ROWS: tuple[tuple[str, Callable[[Outcome], str]], ...] = (
    ("prompts", lambda o: str(o.prompts)),
    ("positions", lambda o: str(o.positions)),
    ("acceptance α, strict", lambda o: f"{o.strict:.3f}"),
    ("relaxed", lambda o: f"{o.relaxed:.3f}"),
    ("deviation per position", lambda o: f"{o.deviation:.4f}"),
    ("drafts that are key", lambda o: f"{o.key:.0%}"),
    ("tokens per round, strict", lambda o: f"{o.strict_tokens:.2f}"),
    ("relaxed", lambda o: f"{o.relaxed_tokens:.2f}"),
)
_KEPT_OUT = 0.2
_TOKENS = "calibrating, tokens (upper bound)"  # label of the progress


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "calibrate",
        help="choose the key tokens of protocol adaptive",
        description="Chooses λ₁, λ₂ and λ₃ for a pair, within a budget of deviation.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, CalibrateSettings)
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, CalibrateSettings)
    expect_writable(settings.out)
    prompts = _prompts(settings)
    pair = drafter_folder(settings.draft), target_folder(settings.target)
    opened = OpenPair(*pair)
    screen = Console(stderr=True, highlight=False, soft_wrap=True)
    context = min(settings.context, opened.context)
    fitting = select_fitting(prompts, opened.vocabularies, settings.max_tokens, context)
    if len(fitting) < len(prompts):
        screen.print(
            f"{len(prompts) - len(fitting)} of {len(prompts)} prompts are left out: together "
            f"with their answers, these prompts may exceed {context} tokens, the context (of "
            f"--context and of the models)."
        )
    if len(fitting) < 2:
        raise UnsupportedError(
            f"Calibration needs at least two prompts that fit {context} tokens together with "
            f"their answers, since one prompt is held out. Give more or shorter prompts, or a "
            f"larger --context."
        )
    positions = _observe_pair(settings, opened, fitting)
    training, validation = (
        ObservedPositions.from_answers([positions[key] for key in keys])
        for keys in split([*positions], _KEPT_OUT, settings.seed)
    )
    relaxation = choose_relaxation(training, settings.tau, settings.deviation, settings.window)
    card = RelaxationCard(
        **vars(relaxation),
        budget=settings.deviation,
        temperature=settings.temperature,
        draft_top_k=settings.draft_top_k,
        window=settings.window,
        max_tokens=settings.max_tokens,
        seed=settings.seed,
        drafter=model_card(opened.drafter),
        target=model_card(opened.target),
        prompts_sha256=_hash(fitting),
        chosen=training.outcome(relaxation, settings.window),
        kept_out=validation.outcome(relaxation, settings.window),
    )
    write_relaxation(settings.out, card)
    screen.print(_table(card))
    screen.print(_summary(card), markup=False)
    if args.json:
        write_json(args.json, msgspec.to_builtins(card))
    if args.json != "-":
        print(settings.out)
    return 0


def _prompts(settings: CalibrateSettings) -> list[Question]:
    if settings.task is not None:
        return read_task_questions(settings.prompts, make_task(settings.task))[: settings.count]
    prompts = read_prompts(settings.prompts)[: settings.count]
    return [
        Question(f"{settings.prompts.stem}-{n}", prompt, "") for n, prompt in enumerate(prompts, 1)
    ]


def _observe_pair(
    settings: CalibrateSettings, opened: OpenPair, prompts: Sequence[Question]
) -> dict[str, list[Position]]:
    slots = min(settings.slots, len(prompts))
    readers = Readers(*opened.paths, slots=slots, context=settings.context, engine=settings)
    done = itertools.count(1)
    with ProgressDisplay(waves={_TOKENS: readers.slots}) as display:
        report = display.counter(_TOKENS, len(prompts) * settings.max_tokens)
        return dict(
            observe(readers, opened.vocabularies, prompts, settings, lambda: report(next(done)))
        )


def _hash(prompts: Sequence[Question]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        text = prompt.message.encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return digest.hexdigest()


def _table(card: RelaxationCard) -> Table:
    table = Table(caption=f"τ = {card.tau:g}, temperature {card.temperature:g}, γ = {card.window}")
    for heading in ("", "chosen by", "held out"):
        table.add_column(heading, justify="right" if heading else "left")
    add_rows(table, _ROWS, (card.chosen, card.kept_out))
    return table


def _summary(card: RelaxationCard) -> str:
    if card.chosen.deviation == 0.0:
        return (
            f"No token can be relaxed within a deviation of {card.budget:g}: all tokens are "
            f"key, so protocol adaptive equals tslt. Give a larger --deviation or --tau."
        )
    return (
        f"A token is key if the entropy ratio exceeds λ₁ = {card.lambda1:.3g}, if the "
        f"probabilities differ by more than λ₂ = {card.lambda2:.3g}, or if the overlap is "
        f"below λ₃ = {card.lambda3:.3g}."
    )
