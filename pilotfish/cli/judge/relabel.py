"""``pilotfish judge relabel``: show how channels change mined labels."""

import argparse
from dataclasses import asdict
from typing import Any

from msgspec import to_builtins
from rich.console import Console
from rich.table import Table

from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.lab.judge.instances import (
    GOOD,
    POOR,
    InstanceOptions,
    Instances,
    MinedSettings,
    expected_share,
    labels_by_quality,
)

_EXAMPLE = """\
example:
  pilotfish judge relabel mined --json labels.json     labels under every channel, for inspection
"""


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "relabel",
        help="show how sampled channels change the labels",
        description="Samples channels for each mined question, and relaxes labels of critical\n"
        "mismatches where the channel is poor, as `train` does with the same options. Writes no\n"
        "files but --json.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, MinedSettings)
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    _, sampling, instances = from_args(args, MinedSettings).read()
    Console(stderr=True, highlight=False).print(_table(instances, sampling))
    if args.json:
        write_json(args.json, _figures(instances, sampling))
    return 0


def _table(instances: Instances, sampling: InstanceOptions) -> Table:
    table = Table(
        caption=f"{len(instances.keys)} questions, {len(instances)} mismatches, "
        f"{int(instances.critical.sum())} critical, {int(instances.stalling.sum())} stalling "
        f"(to be rejected under any channel); {sampling.channels} sampled channels per question"
    )
    table.add_column("quality of the channel", no_wrap=True)
    for heading in ("channels", "critical labels", "kept"):
        table.add_column(heading, justify="right", no_wrap=True)
    for bin in labels_by_quality(instances):
        share = f"{bin.kept / bin.critical:.1%}" if bin.critical else "–"
        row = (str(bin.channels), str(bin.critical), share)
        table.add_row(f"{bin.low:.1f} to {bin.high:.1f}", *row)
    table.add_section()
    for name, channel in (("poorest", POOR), ("best", GOOD)):
        expected = expected_share(instances, channel, sampling.relabelling)
        table.add_row(f"{channel.quality():.1f}, {name}", "", "", f"{expected:.1%} expected")
    return table


def _figures(instances: Instances, sampling: InstanceOptions) -> dict[str, Any]:
    """Return the table's numbers, and every label under every channel (1: reject)."""
    return {
        "sampling": to_builtins(sampling),
        "questions": len(instances.keys),
        "mismatches": len(instances),
        "critical": int(instances.critical.sum()),
        "stalling": int(instances.stalling.sum()),
        "by_quality": [bin._asdict() for bin in labels_by_quality(instances)],
        "expected": {
            name: expected_share(instances, channel, sampling.relabelling)
            for name, channel in (("poorest", POOR), ("best", GOOD))
        },
        "episodes": [_episode(instances, index) for index in range(len(instances.keys))],
    }


def _episode(instances: Instances, index: int) -> dict[str, Any]:
    mask = instances.question == index
    labels = instances.rejected[mask].astype(int).T.tolist()
    return {
        "key": instances.keys[index],
        "at": instances.at[mask].tolist(),
        "critical": instances.critical[mask].astype(int).tolist(),
        "stalling": instances.stalling[mask].astype(int).tolist(),
        "channels": [
            {**asdict(channel), "quality": channel.quality(), "labels": some}
            for channel, some in zip(instances.channels[index], labels, strict=True)
        ],
    }
