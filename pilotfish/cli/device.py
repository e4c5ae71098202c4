"""``pilotfish device run``: one prompt through a drafter here and a target on the edge."""

import argparse
import sys
from pathlib import Path

from device_runtime.device import Device
from device_runtime.plan import AUTO
from field.summary import report, summary
from pilotfish.cli.options import (
    Commands,
    engine_options,
    generation_of,
    generation_options,
    json_option,
    keys_option,
    write_json,
)
from pilotfish.cli.screen import Screen
from wire.errors import UnsupportedError
from wire.protocols import LOCAL


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser("device", help="draft here", description="The drafting end.")
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    run = actions.add_parser(
        "run",
        help="answer one prompt",
        description="Answers one prompt; '-' reads it from stdin. The text goes to stdout, all "
        "else to stderr.",
    )
    run.add_argument("prompt", help="the user's message, or '-'")
    run.add_argument("--draft", required=True, type=Path, metavar="DIR", help="drafter's artifact")
    run.add_argument("--edge", metavar="ADDRESS", help="tcp://HOST:PORT; protocol local needs none")
    keys_option(run, "the folder with device.key and edge.pub; needed beyond loopback")
    engine_options(run)
    generation_options(run, protocol="auto", tokens=128)
    json_option(run)
    run.add_argument("--stats", action="store_true", help="print what happened, to stderr")
    run.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.edge is None and args.protocol not in (LOCAL, AUTO):
        raise UnsupportedError(
            f"Protocol {args.protocol} needs an edge: name it with --edge, or use --protocol local."
        )
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    screen = Screen(quiet=args.json == "-")
    with Device(
        args.draft, args.edge, args.keys, provider=args.provider, threads=args.threads
    ) as device:
        for piece in device.stream(prompt, **generation_of(args)):
            screen.show(piece)
        screen.end()
        assert device.last is not None
        figures = summary(device.last)
        choice = device.last.choice
    if args.json:
        write_json(args.json, figures)
    if args.stats:
        if choice is not None:
            screen.notes.print(f"auto: {choice.reason}")
        screen.notes.print(report([figures]))
    return 0
