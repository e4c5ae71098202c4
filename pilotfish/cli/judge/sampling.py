"""How mined mismatches become instances: what `relabel` shows, and `train` goes by."""

import argparse
from pathlib import Path

from pilotfish.cli.options import between, positive, share
from pilotfish.judge.episodes import Mined, episodes
from pilotfish.judge.instances import InstanceOptions, Instances, Relabelling, instances
from pilotfish.wire.codecs.hidden import HIDDEN_FORMATS

_USUAL, _LABELS = InstanceOptions(), Relabelling()


def sampling_options(parser: argparse.ArgumentParser) -> None:
    """The folder, and how instances are made of what is there."""
    add = parser.add_argument
    add("mined", type=Path, metavar="MINED", help="folder of judge mine")
    add(
        "--channels",
        type=between(1, 1000),
        default=_USUAL.channels,
        metavar="K",
        help="sampled for each question (%(default)s)",
    )
    add("--seed", type=between(0), default=0, metavar="N", help="of all draws (%(default)s)")
    add(
        "--hidden",
        choices=HIDDEN_FORMATS,
        default=_USUAL.form,
        help="how the drafter's states will be sent (%(default)s)",
    )
    add("--no-relabel", action="store_true", help="ablation: labels as mined under any channel")
    add(
        "--kappa",
        type=positive,
        default=_LABELS.kappa,
        metavar="TOKENS",
        help="how far a critical mismatch makes its neighbours important (%(default)g)",
    )
    add(
        "--floor",
        type=share,
        default=_LABELS.floor,
        metavar="SHARE",
        help="of critical labels kept under the poorest channel (%(default)g)",
    )
    add(
        "--relax-temperature",
        type=positive,
        default=_LABELS.temperature,
        metavar="T",
        help="low: the least important ones are relaxed; high: any (%(default)g)",
    )


def instances_of(args: argparse.Namespace) -> tuple[Mined, InstanceOptions, Instances]:
    """What the options say, of what was mined."""
    relabelling = Relabelling(args.kappa, args.floor, args.relax_temperature)
    sampling = InstanceOptions(
        channels=args.channels,
        seed=args.seed,
        form=args.hidden,
        relabelling=None if args.no_relabel else relabelling,
    )
    mined = Mined.read(args.mined)
    return mined, sampling, instances(mined, episodes(args.mined), sampling)
