"""``pilotfish judge relabel``: what channels make of mined labels."""

import argparse
from dataclasses import asdict
from typing import Any

from msgspec import to_builtins
from rich.console import Console
from rich.table import Table

from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.judge.instances import (
    GOOD,
    POOR,
    InstanceOptions,
    Instances,
    MinedSettings,
    expected_share,
    kept_by_quality,
)

_EXAMPLE = """\
example:
  pilotfish judge relabel mined --json labels.json     labels under every channel, to be looked at
"""


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "relabel",
        help="show what sampled channels make of the labels",
        description="Samples channels for each mined question, and relaxes labels of critical\n"
        "mismatches where the channel is poor, as `train` does with the same options. Writes\n"
        "nothing but what it says.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, MinedSettings)
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    _, sampling, result = from_args(args, MinedSettings).read()
    Console(stderr=True, highlight=False).print(_table(result, sampling))
    if args.json:
        write_json(args.json, _figures(result, sampling))
    return 0


def _table(found: Instances, sampling: InstanceOptions) -> Table:
    table = Table(
        caption=f"{len(found.keys)} questions, {len(found)} mismatches, "
        f"{int(found.critical.sum())} critical, {int(found.stalling.sum())} that stall and are "
        f"rejected under any channel; {sampling.channels} channels a question"
    )
    table.add_column("quality of the channel", no_wrap=True)
    for heading in ("channels", "critical labels", "kept"):
        table.add_column(heading, justify="right", no_wrap=True)
    for item in kept_by_quality(found):
        share = f"{item.kept / item.critical:.1%}" if item.critical else "–"
        row = (str(item.channels), str(item.critical), share)
        table.add_row(f"{item.low:.1f} to {item.high:.1f}", *row)
    table.add_section()
    for name, channel in (("poorest", POOR), ("best", GOOD)):
        expected = expected_share(found, channel, sampling.relabelling)
        table.add_row(f"{channel.quality():.1f}, {name}", "", "", f"{expected:.1%} expected")
    return table


def _figures(found: Instances, sampling: InstanceOptions) -> dict[str, Any]:
    """Collect the table, and every label under every channel, 1: reject."""
    return {
        "sampling": to_builtins(sampling),
        "questions": len(found.keys),
        "mismatches": len(found),
        "critical": int(found.critical.sum()),
        "stalling": int(found.stalling.sum()),
        "by_quality": [item._asdict() for item in kept_by_quality(found)],
        "expected": {
            name: expected_share(found, channel, sampling.relabelling)
            for name, channel in (("poorest", POOR), ("best", GOOD))
        },
        "episodes": [_episode(found, index) for index in range(len(found.keys))],
    }


def _episode(found: Instances, index: int) -> dict[str, Any]:
    ours = found.question == index
    labels = found.rejected[ours].astype(int).T.tolist()
    return {
        "key": found.keys[index],
        "at": found.at[ours].tolist(),
        "critical": found.critical[ours].astype(int).tolist(),
        "stalling": found.stalling[ours].astype(int).tolist(),
        "channels": [
            {**asdict(channel), "quality": channel.quality(), "labels": some}
            for channel, some in zip(found.channels[index], labels, strict=True)
        ],
    }
