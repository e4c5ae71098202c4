"""``pilotfish judge train``: a decision head from mined mismatches."""

import argparse
from dataclasses import fields
from pathlib import Path

import msgspec
from rich.console import Console

from pilotfish.cli.countdown import Countdown
from pilotfish.cli.judge.sampling import instances_of, sampling_options
from pilotfish.cli.options import Commands, between, json_option, positive, share, write_json
from pilotfish.edge_runtime.head_file import HeadCard
from pilotfish.judge.thresholds import POINTS
from pilotfish.judge.training import TrainingOptions, train

_OPTIONS = tuple(one.name for one in fields(TrainingOptions) if one.name != "link")
_EXAMPLE = f"""\
The recommended threshold is the largest one of the curve, {POINTS} quantiles of the head's own
probabilities, at which at most the share --risk of the harmful mismatches of questions that were
kept out are forgiven under a good channel (500 Mbit/s, 5 ms); 0 if there is none. Harmful are those
that are critical and those that stall (see judge mine).

example:
  pilotfish judge train mined --out heads/smol-qwen
  pilotfish edge serve --target target --head heads/smol-qwen
"""


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "train",
        help="train a head on mined mismatches",
        description="Trains a two-layer head on mined mismatches under sampled channels, and "
        "writes NAME.json and NAME.safetensors. Needs the extra 'judge' (torch).",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    usual = TrainingOptions()
    add("--out", required=True, type=Path, metavar="NAME", help="where to, without a suffix")
    sampling_options(parser)
    add("--no-link", action="store_true", help="ablation: a head that does not read the channel")
    add("--tokens", action="store_true", help="ablation: reads token ids instead of states")
    for name, type_, meta, told in (
        ("buckets", between(1, 65536), "N", "of a token's hash, with --tokens"),
        ("width", between(1, 1024), "H", "of the hidden layer"),
        ("dropout", share, "P", "behind it"),
        ("weight_decay", positive, "W", "AdamW's"),
        ("learning_rate", positive, "R", "AdamW's"),
        ("batch", between(1), "N", "mismatches a step, each under its K channels"),
        ("epochs", between(1), "N", "at most"),
        ("patience", between(1), "N", "epochs without a better validation loss end it"),
        ("validation", share, "SHARE", "of questions kept out"),
        ("risk", share, "SHARE", "of harmful mismatches that may be forgiven, see below"),
    ):
        add(
            f"--{name.replace('_', '-')}",
            type=type_,
            default=getattr(usual, name),
            metavar=meta,
            help=f"{told} (%(default)s)",
        )
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    options = TrainingOptions(
        link=not args.no_link, **{name: getattr(args, name) for name in _OPTIONS}
    )
    mined, sampling, found = instances_of(args)
    with Countdown("training, epochs at most", options.epochs) as countdown:
        head = train(
            args.out.name, mined, found, sampling, options, lambda done, _: countdown.at(done)
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    path = head.save(args.out.parent)
    Console(stderr=True, highlight=False, soft_wrap=True).print(_told(head.card), markup=False)
    if args.json:
        write_json(args.json, msgspec.to_builtins(head.card))
    print(path)
    return 0


def _told(card: HeadCard) -> str:
    training = card.training
    area = "unknown" if training.auc is None else f"{training.auc:.3f}"
    forgiven, poor, harmful = (
        training.options[name]
        for name in ("forgiven_good", "forgiven_poor", "harmful_forgiven_good")
    )
    return (
        f"{training.questions} questions, {training.examples} instances, "
        f"{training.options['kept_out']} questions kept out; best after epoch "
        f"{training.options['epochs']}.\n"
        f"AUC on questions kept out, labels as mined: {area}.\n"
        f"Threshold {card.threshold:.3g}: forgives {forgiven:.1%} of mismatches and {harmful:.1%} "
        f"of harmful ones under a good channel, {poor:.1%} of mismatches under a poor one."
    )
