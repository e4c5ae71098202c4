"""``pilotfish judge train``: train a decision head on mined mismatches."""

import argparse

from msgspec import structs, to_builtins
from rich.console import Console

from pilotfish.base.progress import ProgressDisplay
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.edge_runtime.head_file import HeadCard
from pilotfish.lab.judge.thresholds import POINTS
from pilotfish.lab.judge.training import train
from pilotfish.lab.judge.training_settings import TrainSettings

_EXAMPLE = f"""\
The curve's thresholds are {POINTS} quantiles of the head's own probabilities. The command
recommends the largest threshold at which the head forgives at most the share --risk of harmful
mismatches, on held-out questions under a good channel (500 Mbit/s, 5 ms). If there is no such
threshold, it recommends 0. Harmful mismatches are the critical and the stalling ones (see judge
mine).

example:
  pilotfish judge train mined --out heads/smol-qwen
  pilotfish edge serve --target target --head heads/smol-qwen
"""


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "train",
        help="train a head on mined mismatches",
        description="Trains a two-layer head on mined mismatches under sampled channels, and\n"
        "writes NAME.json and NAME.safetensors. Needs the extra 'judge' (torch).",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, TrainSettings)
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, TrainSettings)
    options = structs.replace(settings.training, seed=settings.options.seed)
    mined, sampling, instances = settings.read()
    with ProgressDisplay() as display:
        report = display.counter("training, epochs (upper bound)", options.epochs)
        head = train(
            settings.out.name,
            mined,
            instances,
            sampling,
            options,
            lambda done, _: report(done),
        )
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    path = head.save(settings.out.parent)
    Console(stderr=True, highlight=False, soft_wrap=True).print(_summary(head.card), markup=False)
    if args.json:
        write_json(args.json, to_builtins(head.card))
    print(path)
    return 0


def _summary(card: HeadCard) -> str:
    training = card.training
    area = "unknown" if training.auc is None else f"{training.auc:.3f}"
    forgiven, poor, harmful = (
        training.options[name]
        for name in ("forgiven_good", "forgiven_poor", "harmful_forgiven_good")
    )
    return (
        f"{training.questions} questions, {training.examples} instances, "
        f"{training.options['kept_out']} questions held out; best after epoch "
        f"{training.options['epochs']}.\n"
        f"AUC on held-out questions, with the labels as mined: {area}.\n"
        f"Threshold {card.threshold:.3g}: under a good channel, the head forgives "
        f"{forgiven:.1%} of all mismatches and {harmful:.1%} of harmful ones; under a poor "
        f"channel, {poor:.1%} of all mismatches."
    )
