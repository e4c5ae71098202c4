"""``pilotfish field measure``: latency over a real link, round by round into a run file."""

import argparse
import shlex
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import partial
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pilotfish import wire
from pilotfish.cli.field.progress import Answers
from pilotfish.cli.generation import protocol_options, protocol_options_of, window
from pilotfish.cli.options import (
    Commands,
    between,
    engine_options,
    json_option,
    keys_option,
    positive,
    write_json,
)
from pilotfish.cli.progress import FETCHING, Bars
from pilotfish.device_runtime import energy
from pilotfish.device_runtime.device import Device
from pilotfish.engines.artifact import Artifact
from pilotfish.field import host, matrix
from pilotfish.field.measure import PATIENCE_S, Measurement, RoundLog
from pilotfish.field.prompts import BUILT_IN, read_prompts
from pilotfish.field.recording import Recorder, begun, expect_nothing
from pilotfish.field.report.figures import Figures, figures, flat, noted
from pilotfish.field.resumption import (
    changes,
    expect_same_pair,
    expect_same_settings,
)
from pilotfish.field.run import Cell, Facts, Model, Run, Settings, Start, WindowSetting
from pilotfish.wire.errors import UnsupportedError

_MOST_REPEATS = 10_000
_COMMAND = ("pilotfish", "field", "measure")
_SETTINGS = tuple(field.name for field in fields(Settings))
_HEADINGS = ("n", "ms a token", "p95", "tokens/s", "α", "tokens a round")
_EXAMPLE = """\
example:
  pilotfish field measure --draft drafter --edge tcp://edge:7077 --keys --out walk.pilotfish
  pilotfish field report walk.pilotfish --out walk

What was interrupted goes on where it stopped, with the settings that the file holds:
  pilotfish field measure --resume --out walk.pilotfish
"""


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "measure",
        help="measure latency over a link, into a run file",
        description="Answers every prompt under every protocol and window, several times and in "
        "interleaved order, and writes each round into a run file as it happens.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    usual = Settings(prompts=BUILT_IN)
    add("--out", required=True, type=Path, metavar="RUN.pilotfish", help="the run file")
    add("--resume", action="store_true", help="go on with the run file, if it has been begun")
    add("--draft", type=Path, metavar="DIR", help="drafter's artifact")
    add("--edge", metavar="ADDRESS", help="tcp://HOST:PORT; protocol local alone needs none")
    keys_option(parser, "the folder with device.key and edge.pub; needed beyond loopback")
    engine_options(parser)
    add(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="a prompt a line, or JSON lines with 'prompt' or 'question' "
        f"(default: {len(BUILT_IN)} that come with Pilotfish)",
    )
    add(
        "--protocols",
        type=_protocols,
        metavar="P,P,…",
        help=f"({','.join(usual.protocols)}); auto lets each answer choose",
    )
    add(
        "--windows",
        type=_windows,
        metavar="N,N,…",
        help=f"draft tokens a round, or auto ({','.join(map(str, usual.windows))})",
    )
    add(
        "--repeat",
        type=between(1, _MOST_REPEATS),
        metavar="N",
        help=f"answers of a cell ({usual.repeat})",
    )
    add(
        "--warm-up",
        type=between(0, _MOST_REPEATS),
        metavar="N",
        help=f"answers of each configuration that do not count, at every start ({usual.warm_up})",
    )
    add("--max-tokens", type=between(1), metavar="N", help=f"of an answer ({usual.max_tokens})")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default)")
    protocol_options(parser)
    add("--seed", type=between(0), metavar="N", help=f"repeat r draws by N + r ({usual.seed})")
    add("--note", metavar="TEXT", help="kept in the file, shown in the report")
    add(
        "--patience",
        type=positive,
        default=PATIENCE_S,
        metavar="SECONDS",
        help="how long an edge that went away is waited for (%(default)g)",
    )
    json_option(parser)
    parser.set_defaults(run=_run, provider=None)


def _protocols(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _windows(text: str) -> tuple[WindowSetting, ...]:
    return tuple(window(part) for part in text.split(","))


def _run(args: argparse.Namespace) -> int:
    resumed = _facts_of(args.out) if args.resume and begun(args.out) else None
    if resumed is None:
        expect_nothing(args.out)
    settings = _settings(args, resumed)
    matrix.check(settings)
    if resumed is None or matrix.remaining(settings, _done(args.out)):
        _measure(args, settings, resumed)
    with Run.open(args.out) as run:
        found = figures(list(run.answers()))
    Console(stderr=True, highlight=False).print(_table(found))
    if args.json:
        write_json(args.json, [flat(asdict(one)) for one in found])
    return 0


def _measure(args: argparse.Namespace, settings: Settings, resumed: Facts | None) -> None:
    """Reach the edge, open the file, and go through what is left of the matrix."""
    draft, edge, keys = _ends(args, settings, resumed)
    log = RoundLog()
    with Bars() as bars:
        opened = Device(
            draft,
            edge,
            keys,
            provider=settings.provider,
            threads=settings.threads,
            on_round=log,
            on_fetch=partial(bars.show, FETCHING),
        )
    with opened as device:
        facts = _facts(args, settings, device, draft, edge, keys)
        if resumed is None:
            recorder = Recorder.create(args.out, facts)
        else:
            expect_same_pair(args.out, resumed, facts)
            recorder = Recorder.resume(args.out)
        with recorder:
            if resumed is not None:
                recorder.started([*resumed.starts, *facts.starts])
            cells = matrix.remaining(settings, recorder.finished())
            warm_up = list(matrix.warm_up(settings))
            with Answers([*warm_up, *cells]) as countdown:
                if resumed is not None and (changed := changes(resumed.host, facts.host)):
                    countdown.tell(f"Not as when the run began: {changed}")
                measurement = Measurement(
                    device,
                    log,
                    recorder,
                    settings,
                    rails=energy.rails(),
                    patience_s=args.patience,
                    tell=countdown.tell,
                )
                try:
                    for answer in chain(
                        measurement.answers(warm_up, warm_up=True), measurement.answers(cells)
                    ):
                        countdown.done(answer.configuration)
                except BaseException:
                    again = shlex.join([*_COMMAND, "--resume", "--out", str(args.out)])
                    countdown.tell(f"What was measured is in {args.out}. To go on: {again}")
                    raise


def _facts_of(path: Path) -> Facts:
    with Run.open(path) as run:
        return run.facts


def _done(path: Path) -> set[Cell]:
    with Run.open(path) as run:
        return {answer.cell for answer in run.answers()}


def _settings(args: argparse.Namespace, resumed: Facts | None) -> Settings:
    """What was asked for, and what was not as in the file, or as is usual."""
    named = [name for name in (*_SETTINGS, "edge", "note") if name != "options"]
    given = {name: getattr(args, name) for name in named}
    given = {name: value for name, value in given.items() if value is not None}
    if "prompts" in given:
        given["prompts"] = read_prompts(given["prompts"])
    if resumed is not None:
        expect_same_settings(args.out, resumed, {**given, **protocol_options_of(args)})
        return resumed.settings
    chosen = {name: value for name, value in given.items() if name in _SETTINGS}
    return Settings(**{"prompts": BUILT_IN, "options": protocol_options_of(args), **chosen})


def _ends(
    args: argparse.Namespace, settings: Settings, resumed: Facts | None
) -> tuple[Path, str | None, Path | None]:
    """Where drafter, edge and keys are."""
    draft, edge, keys = args.draft, args.edge, args.keys
    if resumed is not None:
        draft = draft or Path(resumed.draft_path)
        edge = resumed.edge
        keys = keys or (Path(resumed.keys_path) if resumed.keys_path else None)
    if draft is None:
        raise UnsupportedError("Which drafter? Name the folder of its artifact by --draft.")
    if edge is None and matrix.needs_edge(settings):
        raise UnsupportedError("Which edge? Name its address by --edge tcp://HOST:PORT.")
    return draft, edge, keys


def _facts(
    args: argparse.Namespace,
    settings: Settings,
    device: Device,
    draft: Path,
    edge: str | None,
    keys: Path | None,
) -> Facts:
    """What will hold for the run; a typed error if the pair cannot do what is asked."""
    manifest = Artifact.open(draft).manifest
    welcome = device.welcome
    if welcome is not None:
        matrix.check_edge(settings, welcome)
    matrix.check_prompts(settings.prompts, lambda p: len(device.prompt(p)), device.context)
    return Facts(
        software=wire.SOFTWARE,
        settings=settings,
        starts=(Start(unix_s=time.time(), host=host.facts()),),
        drafter=Model(manifest.model, manifest.precision, manifest.digest),
        target=None if welcome is None else Model(welcome.model, digest=welcome.digest or None),
        edge=edge,
        edge_software=None if welcome is None else welcome.software,
        draft_path=str(draft.resolve()),
        keys_path=None if keys is None else str(keys.resolve()),
        note=(args.note or "").encode(errors="replace").decode(),
        energy=energy.source(energy.rails()),
    )


def _table(found: Sequence[Figures]) -> Table:
    """A line for each protocol and window; columns more where the text may not be the target's."""
    notes = noted(found)
    table = Table(caption="medians over n answers, and their 95th percentile")
    table.add_column("", no_wrap=True)
    for heading in (*_HEADINGS, *(counter.name for counter in notes)):
        table.add_column(heading, justify="right")
    for one in found:
        table.add_row(
            escape(str(one.configuration)),
            str(one.n),
            _number(one.token_ms.median if one.token_ms else None, ".1f"),
            _number(one.token_ms.p95 if one.token_ms else None, ".1f"),
            _number(one.tokens_per_s.median if one.tokens_per_s else None, ".1f"),
            _number(one.acceptance, ".2f"),
            _number(one.tokens_per_round, ".2f"),
            *(_number(one.notes[each.name], ".1%" if each.whole else ".4f") for each in notes),
        )
    return table


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
