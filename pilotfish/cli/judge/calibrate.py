"""``pilotfish judge calibrate``: what makes a token key under protocol ``adaptive``."""

import argparse
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from pilotfish.cli.countdown import Countdown
from pilotfish.cli.options import (
    Commands,
    between,
    engine_options,
    json_option,
    positive,
    share,
    write_json,
)
from pilotfish.device_runtime.bridge import Pair
from pilotfish.edge_runtime.head_file import End
from pilotfish.edge_runtime.relaxation_file import (
    Outcome,
    RelaxationCard,
    expect_writable,
    write_relaxation,
)
from pilotfish.engines.artifact import Artifact, Manifest
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.field.prompts import read_prompts
from pilotfish.judge.calibrating import Observed, Position, chosen, observe
from pilotfish.judge.instances import split
from pilotfish.judge.reading import Readers
from pilotfish.judge.speakers import length
from pilotfish.judge.tasks import TASKS, Question, questions, task_named
from pilotfish.wire.errors import UnsupportedError
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols.adaptive import Adaptive

_EXAMPLE = """\
Protocol adaptive accepts tokens that are not key against a target that is softened by τ. A token is
key where the drafter is much less certain than the target (the ratio of their entropies is above
λ₁), where the two differ about it by more than λ₂, or where their ten likeliest tokens overlap by
less than λ₃. The target answers the prompts; at each token the drafter is asked, too; and λ₁, λ₂
and λ₃ are chosen such that a round becomes as long as it can while the output's law stays within
--deviation of the target's, in total variation a position, in the mean. Acceptance rises by just as
much. About a fifth of the prompts is kept out, and told apart. What is chosen holds for this pair,
about this temperature and text like this.

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
    ("deviation a position", lambda o: f"{o.deviation:.4f}"),
    ("drafts that are key", lambda o: f"{o.key:.0%}"),
    ("tokens a round, strict", lambda o: f"{o.strict_tokens:.2f}"),
    ("relaxed", lambda o: f"{o.relaxed_tokens:.2f}"),
)
_KEPT_OUT = 0.2
_WINDOW = 4


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "calibrate",
        help="choose what makes a token key, for protocol adaptive",
        description="Chooses λ₁, λ₂ and λ₃ for a pair, by a budget of deviation from the target.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--draft", required=True, type=Path, metavar="DIR", help="drafter's artifact")
    add("--target", required=True, type=Path, metavar="DIR", help="target's artifact")
    add(
        "--prompts",
        required=True,
        type=Path,
        metavar="FILE",
        help="a prompt a line, or JSON lines with 'prompt' or 'question'; two at least",
    )
    add(
        "--task",
        choices=[name for name, task in TASKS.items() if task.instruction],
        help="ask as this task does, see judge mine; FILE is then its questions",
    )
    add("--count", type=between(2), metavar="N", help="the first N prompts (default: all)")
    add("--tau", type=share, default=0.2, metavar="τ", help="how far to soften (%(default)s)")
    add(
        "--deviation",
        type=share,
        default=0.02,
        metavar="D",
        help="the budget: mean total variation a position (%(default)s)",
    )
    add("--out", required=True, type=Path, metavar="NAME.json", help="for edge serve --relaxation")
    add("--temperature", type=positive, default=1.0, metavar="T", help="of both (%(default)s)")
    add(
        "--draft-top-k",
        type=between(0),
        default=Adaptive.truncates,
        metavar="K",
        help="as the drafter will be truncated; 0: not at all (%(default)s)",
    )
    add(
        "--window",
        type=between(1, MAX_WINDOW),
        default=_WINDOW,
        metavar="N",
        help="draft tokens of the rounds that are to become long (%(default)s)",
    )
    add("--max-tokens", type=between(1), default=64, metavar="N", help="an answer's (%(default)s)")
    add("--seed", type=between(0), default=0, metavar="N", help="of all draws (%(default)s)")
    add("--slots", type=between(1, 256), default=8, metavar="N", help="prompts at a time (8)")
    add(
        "--context",
        type=between(2),
        default=640,
        metavar="N",
        help="tokens of a prompt and its answer; longer ones are left out (%(default)s)",
    )
    engine_options(parser)
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    expect_writable(args.out)
    asked = _asked(args)
    drafter, target = (Artifact.open(path) for path in (args.draft, args.target))
    pair = Pair(Vocabulary.of(drafter), Vocabulary.of(target))
    screen = Console(stderr=True, highlight=False, soft_wrap=True)
    context = min(args.context, *(one.manifest.dimensions.context for one in (drafter, target)))
    fitting = [one for one in asked if length(one, pair, args.max_tokens) <= context]
    if len(fitting) < len(asked):
        screen.print(
            f"{len(asked) - len(fitting)} of {len(asked)} prompts are left out, for they and their "
            f"answers may have more than {context} tokens (--context, and the models' own)."
        )
    if len(fitting) < 2:
        raise UnsupportedError(
            f"It takes two prompts at least that have {context} tokens with their answers: one is "
            "kept out. Give more or shorter ones, or a larger --context."
        )
    learning, held = split([one.key for one in fitting], _KEPT_OUT, args.seed)
    found = _observed(args, pair, fitting)
    observed = Observed.of([found[key] for key in learning])
    relaxation = chosen(observed, args.tau, args.deviation, args.window)
    card = RelaxationCard(
        **vars(relaxation),
        budget=args.deviation,
        temperature=args.temperature,
        draft_top_k=args.draft_top_k,
        window=args.window,
        max_tokens=args.max_tokens,
        seed=args.seed,
        drafter=_end(drafter.manifest),
        target=_end(target.manifest),
        prompts_sha256=_hash(fitting),
        chosen=observed.outcome(relaxation, args.window),
        kept_out=Observed.of([found[key] for key in held]).outcome(relaxation, args.window),
    )
    write_relaxation(args.out, card)
    screen.print(_table(card))
    screen.print(_told(card), markup=False)
    if args.json:
        write_json(args.json, msgspec.to_builtins(card))
    if args.json != "-":
        print(args.out)
    return 0


def _asked(args: argparse.Namespace) -> list[Question]:
    if args.task is not None:
        return questions(args.prompts, task_named(args.task))[: args.count]
    prompts = read_prompts(args.prompts)[: args.count]
    return [Question(f"{args.prompts.stem}-{n}", one, "") for n, one in enumerate(prompts, 1)]


def _observed(
    args: argparse.Namespace, pair: Pair, asked: Sequence[Question]
) -> dict[str, list[Position]]:
    readers = Readers.open(
        args.draft,
        args.target,
        slots=min(args.slots, len(asked)),
        context=args.context,
        threads=args.threads,
        provider=args.provider,
    )
    with Countdown("calibrating, tokens at most", len(asked) * args.max_tokens) as countdown:
        return dict(
            observe(
                readers,
                pair,
                asked,
                ends=pair.target.eos_ids,
                most=args.max_tokens,
                tau=args.tau,
                temperature=args.temperature,
                draft_top_k=args.draft_top_k,
                window=args.window,
                seed=args.seed,
                on_position=_Progress(countdown, readers.slots).tick,
            )
        )


class _Progress:
    """Tells a countdown of tokens: by passes, but for the first one, which waits for prompts."""

    def __init__(self, countdown: Countdown, slots: int) -> None:
        self._countdown = countdown
        self._slots = slots
        self._done = 0
        self._begun_s = 0.0

    def tick(self) -> None:
        """Another token is done."""
        self._done += 1
        since = self._done - self._slots
        if since == 0:
            self._begun_s = time.monotonic()
        elif since > 0 and since % self._slots == 0:
            each_s = (time.monotonic() - self._begun_s) / since
            self._countdown.at(self._done, each_s * (self._countdown.total - self._done))


def _end(manifest: Manifest) -> End:
    return End(
        model=manifest.model,
        origin=manifest.origin,
        hidden=manifest.dimensions.hidden,
        precision=manifest.precision,
    )


def _hash(asked: Sequence[Question]) -> str:
    digest = hashlib.sha256()
    for one in asked:
        text = one.asked.encode()
        digest.update(len(text).to_bytes(4, "little") + text)
    return digest.hexdigest()


def _table(card: RelaxationCard) -> Table:
    table = Table(caption=f"τ = {card.tau:g}, temperature {card.temperature:g}, γ = {card.window}")
    for heading in ("", "chosen by", "kept out"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, cell in _ROWS:
        table.add_row(name, cell(card.chosen), cell(card.kept_out))
    return table


def _told(card: RelaxationCard) -> str:
    if card.chosen.deviation == 0.0:
        return (
            f"Nothing could be relaxed within a deviation of {card.budget:g}: all tokens are key, "
            "and adaptive is tslt. Allow more, or a larger τ."
        )
    return (
        f"Key above an entropy ratio of λ₁ = {card.lambda1:.3g}, above a difference of "
        f"λ₂ = {card.lambda2:.3g}, or below an overlap of λ₃ = {card.lambda3:.3g}."
    )
