"""``pilotfish demo``: show speculative decoding on one machine, without preparations.

An edge process runs the fp32 target, and this process runs the int4 drafter; the link between them
is encrypted. Each process has half of the cores, as if they were two machines.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from msgspec import Struct

from pilotfish.base.cpus import split_cpus
from pilotfish.base.settings import setting
from pilotfish.cli import demo_wisv
from pilotfish.cli.export import default_pair
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.cli.screen import AnswerScreen
from pilotfish.cli.summary import report, summary
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.record import Generation
from pilotfish.edge_runtime.process import EdgeServer
from pilotfish.wire import keys
from pilotfish.wire.protocols import LOCAL, STREAM

_PROMPT = "Explain in a few sentences why the sky is blue."


class DemoSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``pilotfish demo``: the prompt and the options of its answers."""

    prompt: Annotated[str, setting("the user's message")] = _PROMPT
    max_tokens: Annotated[int, setting("maximum number of tokens of an answer")] = 96
    window: Annotated[int, setting("γ, the number of draft tokens per round")] = 4
    temperature: Annotated[
        float,
        setting("temperature of protocol coupled, and of the second run of stream", metavar="T"),
    ] = 1.0
    seed: Annotated[int, setting("seed of the protocols that sample")] = 7


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "demo",
        help="run both ends on this machine, without preparations",
        description="Exports the default pair on first use (SmolLM2-135M: int4 drafter, fp32 "
        "target), starts an edge process, and answers one prompt under several protocols. Each end "
        "uses half of the cores.",
    )
    add_flags(parser, DemoSettings)
    json_option(parser)
    # before set_defaults: without an action, the command shows the protocols
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    demo_wisv.add_to(actions)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, DemoSettings)
    drafter, target = default_pair()
    screen = AnswerScreen(quiet=args.json == "-")
    with tempfile.TemporaryDirectory(prefix="pilotfish-demo-") as folder:
        key_folder = Path(folder)
        keys.create(key_folder, keys.EDGE)
        keys.allow(key_folder, keys.create(key_folder, keys.DEVICE))
        theirs, ours = split_cpus()
        with (
            EdgeServer(target, keys=key_folder, threads=len(theirs)) as edge,
            Device(drafter, edge.endpoint, key_folder, threads=len(ours)) as device,
        ):
            # a first answer without a measurement, since the first passes of new engines are slow
            device.generate("Hello", protocol="greedy", max_tokens=8)
            screen.notes.print(f"edge process {edge.pid} on {edge.endpoint}, encrypted; ", end="")
            screen.legend("drafted", "corrected", "bonus")
            # the target alone, at both temperatures: the reference for the other protocols
            plain = dict.fromkeys([(STREAM, 0.0), (STREAM, settings.temperature)])
            drafted = (("greedy", 0.0), ("coupled", settings.temperature))
            generations = {
                run: _generate(device, screen, settings, *run)
                for run in (*drafted, *plain, (LOCAL, 0.0))
            }
    figures = _figures(generations)
    screen.notes.print(report(list(figures["protocols"].values())))
    verdict = "equals" if figures["matches_target"] else "DIFFERS FROM"
    screen.notes.print(f"greedy over the link {verdict} the target's own greedy output")
    if args.json:
        write_json(args.json, figures)
    screen.notes.print(
        f"next: {_this_command()} up    the same pair with a chat page and an API",
        markup=False,
        soft_wrap=True,
    )
    return 0


def _this_command() -> str:
    """Return this environment's command `pilotfish` as a user can paste it into a shell here."""
    script = Path(sys.executable).with_name("pilotfish")
    if not script.exists():
        return f"{quote(sys.executable)} -m pilotfish"
    if shutil.which("pilotfish") == str(script):
        return "pilotfish"
    below = script.is_relative_to(Path.cwd())
    return quote(str(script.relative_to(Path.cwd()) if below else script))


def _generate(
    device: Device, screen: AnswerScreen, settings: DemoSettings, protocol: str, temperature: float
) -> Generation:
    screen.notes.rule(f"{protocol}, temperature {temperature:g}")
    for piece in device.stream(
        settings.prompt,
        protocol=protocol,
        window=settings.window,
        max_tokens=settings.max_tokens,
        temperature=temperature,
        seed=settings.seed,
    ):
        screen.show(piece)
    screen.end()
    assert device.last is not None
    return device.last


def _figures(generations: dict[tuple[str, float], Generation]) -> dict[str, Any]:
    """Return the measurements of the run with `greedy`.

    "protocols" has every run's measurements.
    """
    rows: dict[str, dict[str, Any]] = {}
    for (protocol, temperature), generation in generations.items():
        # the second run of `stream` has the temperature in its name
        name = f"{protocol}, T={temperature:g}" if protocol in rows else protocol
        rows[name] = summary(generation) | {"protocol": name}
        if protocol not in (STREAM, LOCAL):
            alone = generations[STREAM, temperature]
            rows[name]["speedup"] = round(_pace(generation) / _pace(alone), 3)
    greedy, alone = generations["greedy", 0.0], generations[STREAM, 0.0]
    return {
        **rows["greedy"],
        "matches_target": greedy.tokens == alone.tokens,
        "protocols": rows,
    }


def _pace(generation: Generation) -> float:
    """Return the tokens per second, without the first round, in which both ends read the prompt."""
    later = sum(len(round_.tokens) for round_ in generation.rounds[1:])
    spent_s = generation.total_s - generation.first_token_s
    return later / spent_s if later else generation.tokens_per_s
