"""``pilotfish field measure``: measure latency over a real link; write a run file."""

import argparse
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.progress import FETCHING, ProgressDisplay
from pilotfish.base.settings import settings as settings_of
from pilotfish.base.version import SOFTWARE
from pilotfish.cli.default_models import drafter_folder
from pilotfish.cli.field.axis_flags import add_axes, values_of
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import (
    Commands,
    json_option,
    write_json,
)
from pilotfish.device_runtime import energy
from pilotfish.device_runtime.device import Device
from pilotfish.drafting.text_drafter import TEXT
from pilotfish.emulation.emulator import Emulator
from pilotfish.engines.artifact import Artifact
from pilotfish.lab import host
from pilotfish.lab.field import matrix
from pilotfish.lab.field.axes import format_point, of_link
from pilotfish.lab.field.configuration import Cell
from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.lab.field.measure import Measurement, MeasureSettings, RoundLog
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.report.figures import Figures, counters_with_values, figures, flatten
from pilotfish.lab.field.resumption import (
    expect_same_pair,
    expect_same_settings,
    host_changes,
)
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_clock import RunClock, begin
from pilotfish.lab.field.run_facts import Facts, Model, Start
from pilotfish.lab.field.writable_run_file import expect_unused, has_begun
from pilotfish.lab.prompts import BUILT_IN, read_prompts
from pilotfish.wire.messages import Welcome
from pilotfish.wire.protocols import RoundCounter

_COMMAND = ("pilotfish", "field", "measure")
_SETTINGS = tuple(
    setting.name for setting in settings_of(MatrixSettings) if setting.meta.description
)
_Column: TypeAlias = tuple[str, str, Callable[[Figures], float | None]]
_SPEED: tuple[_Column, ...] = (
    ("n", "d", lambda f: f.n),
    ("ms per token", ".1f", lambda f: f.token_ms.median if f.token_ms else None),
    ("p95", ".1f", lambda f: f.token_ms.p95 if f.token_ms else None),
    ("tokens/s", ".1f", lambda f: f.tokens_per_s),
    ("× stream", ".2f", lambda f: f.speedup),
    ("first token", ",.0f", lambda f: f.first_token_ms.median if f.first_token_ms else None),
)
_ROUNDS: tuple[_Column, ...] = (
    ("rounds", ".1f", lambda f: f.rounds_per_answer),
    ("α", ".2f", lambda f: f.acceptance),
    ("AAL", ".2f", lambda f: f.tokens_per_round),
    ("B up", ",.0f", lambda f: f.up_bytes_per_round),
    ("B down", ",.0f", lambda f: f.down_bytes_per_round),
    ("T_comm", ".1f", lambda f: f.comm_ms),
)
_SPEED_CAPTION = (
    "medians over n answers, after the first round, which reads the prompt; p95: 95th percentile "
    "of the ms per token; × stream: tokens/s divided by those of stream; first token: ms"
)
_ROUNDS_CAPTION = (
    "rounds: of an answer; AAL: committed tokens a round; B up, B down: bytes a round; T_comm: ms "
    "a round on the link"
)
_EXAMPLE = """\
example:
  pilotfish field measure --draft drafter --edge tcp://edge:7077 --keys --out walk.pilotfish
  pilotfish field report walk.pilotfish --out walk

The effect of K and of the RTT, over an emulated link (tslt, Figures 3 to 6):
  pilotfish field measure --draft drafter --edge tcp://127.0.0.1:7077 --out k.pilotfish \\
    --protocols tslt,stream --windows 4,8 --temperature 1 --draft-top-k 16,64,320,3200 \\
    --rtt 0,20,50 --up 10mbit --down 50mbit

To resume an interrupted run, with the settings in its file:
  pilotfish field measure --resume --out walk.pilotfish
"""


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "measure",
        help="measure latency over a link, and write a run file",
        description="Answers every prompt under every protocol, window and value of an option,\n"
        "several times and in interleaved order, and writes each round into a run file as it\n"
        "happens. An option counts for the protocols that have it.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, MeasureSettings)
    add_flags(parser, MatrixSettings)
    add_axes(parser)
    json_option(parser)
    # no defaults here, since a resumed run takes the settings in its file
    parser.set_defaults(run=_run, **dict.fromkeys(_SETTINGS))


def _run(args: argparse.Namespace) -> int:
    arguments = from_args(args, MeasureSettings)
    resumed = _facts_of(arguments.out) if arguments.resume and has_begun(arguments.out) else None
    if resumed is None:
        expect_unused(arguments.out)
    settings = _settings(args, arguments, resumed)
    matrix.check(settings)
    if resumed is None or matrix.remaining(settings, _finished_cells(arguments.out)):
        _measure(arguments, settings, resumed, named=args.protocols is not None)
    with Run.open(arguments.out) as run:
        summaries = figures(list(run.answers()))
    Console(stderr=True, highlight=False).print(*_tables(summaries, settings))
    if args.json:
        write_json(args.json, [flatten(asdict(summary)) for summary in summaries])
    return 0


def _measure(
    arguments: MeasureSettings, settings: MatrixSettings, resumed: Facts | None, *, named: bool
) -> None:
    """Connect to the edge, open the run file, and measure all answers that it lacks.

    named: whether the caller named the protocols; a new run leaves out those defaults that the edge
    does not offer.
    """
    draft, edge, keys = _endpoints(arguments, settings, resumed)
    log = RoundLog()
    with ExitStack() as stack:
        emulator = None
        if edge is not None and matrix.emulates(settings):
            first = next(matrix.warm_up(settings), None) or next(matrix.cells(settings))
            conditions = matrix.conditions(settings, first.configuration)
            emulator = stack.enter_context(Emulator(edge, conditions))
        reached = edge if emulator is None else emulator.endpoint
        device = stack.enter_context(_open(draft, reached, keys, settings, log))
        if resumed is None and not named and device.welcome is not None:
            settings = _offered(settings, device.welcome)
        facts = _facts(arguments, settings, device, draft, edge, keys)
        _record(arguments, settings, resumed, device, facts, log, emulator)


def _offered(settings: MatrixSettings, edge: Welcome) -> MatrixSettings:
    """Return the settings without the protocols that the edge does not offer; name these."""
    reduced, missing = matrix.offered(settings, edge)
    others = ", ".join(reduced.protocols)
    if missing:
        Console(stderr=True, highlight=False).print(
            f"The edge does not offer {', '.join(missing)}: measuring {others}.",
            markup=False,
            soft_wrap=True,
        )
    return reduced


def _open(
    draft: Path, edge: str | None, keys: Path | None, settings: MatrixSettings, log: RoundLog
) -> Device:
    """Open the device, with its progress."""
    with ProgressDisplay() as display:
        return Device(
            draft,
            edge,
            keys,
            provider=settings.provider,
            threads=settings.threads,
            on_round=log,
            on_fetch=partial(display.show, FETCHING),
        )


def _record(
    arguments: MeasureSettings,
    settings: MatrixSettings,
    resumed: Facts | None,
    device: Device,
    facts: Facts,
    log: RoundLog,
    emulator: Emulator | None,
) -> None:
    """Open the run file, and measure all answers that it lacks."""
    if resumed is None:
        recorder = Recorder.create(arguments.out, facts)
    else:
        expect_same_pair(arguments.out, resumed, facts)
        recorder = Recorder.resume(arguments.out)
    with recorder:
        if resumed is not None:
            recorder.change_facts(starts=[*resumed.starts, *facts.starts])
        cells = matrix.remaining(settings, recorder.finished_cells())
        warm_up = list(matrix.warm_up(settings))
        with ProgressDisplay() as display:
            report = display.counter("measuring, answers", len(warm_up) + len(cells))
            if resumed is not None and (changed := host_changes(resumed.host, facts.host)):
                display.print_above(
                    f"These facts about the machine have changed since the run began: {changed}"
                )
            measurement = Measurement(
                device,
                log,
                recorder,
                settings,
                emulator=emulator,
                rails=energy.rails(),
                patience_s=arguments.patience_s,
                clock_s=RunClock(facts.starts[-1].moment),
                notify=display.print_above,
            )
            try:
                answers = chain(
                    measurement.answers(warm_up, warm_up=True), measurement.answers(cells)
                )
                for number, _ in enumerate(answers, 1):
                    report(number)
            except BaseException:
                again = shlex.join([*_COMMAND, "--resume", "--out", str(arguments.out)])
                display.print_above(
                    f"All answers measured so far are in {arguments.out}. To continue, run: {again}"
                )
                raise


def _facts_of(path: Path) -> Facts:
    with Run.open(path) as run:
        return run.facts


def _finished_cells(path: Path) -> set[Cell]:
    with Run.open(path) as run:
        return {answer.cell for answer in run.answers()}


def _settings(
    args: argparse.Namespace, arguments: MeasureSettings, resumed: Facts | None
) -> MatrixSettings:
    """Return the settings: from the flags, else from the resumed file, else the defaults."""
    values_by_name = values_of(args)
    single = {name: values[0] for name, values in values_by_name.items() if len(values) == 1}
    varied = {name: values for name, values in values_by_name.items() if len(values) > 1}
    values = {name: value for name in _SETTINGS if (value := getattr(args, name)) is not None}
    if arguments.prompts is not None:
        values["prompts"] = read_prompts(arguments.prompts)
    if resumed is None:
        link = of_link(single.items())
        if "temperature" in single:
            values["temperature"] = single["temperature"]
        options = {n: v for n, v in single.items() if n not in link and n != "temperature"}
        groups = {"options": options, "link": link, "varied": varied}
        return MatrixSettings(**{"prompts": BUILT_IN, **groups, **values})
    others = {"edge": arguments.edge, "note": arguments.note}
    values |= {name: value for name, value in others.items() if value is not None}
    expect_same_settings(arguments.out, resumed, {**values, **single, **varied})
    return resumed.settings


def _endpoints(
    arguments: MeasureSettings, settings: MatrixSettings, resumed: Facts | None
) -> tuple[Path, str | None, Path | None]:
    """Return the drafter's path, the edge's address and the folder of keys."""
    draft, edge, keys = arguments.draft, arguments.edge, arguments.keys
    if draft is not None:
        draft = drafter_folder(draft, settings.provider)
    if resumed is not None:
        draft = draft or Path(resumed.draft_path)
        edge = resumed.edge
        keys = keys or (Path(resumed.keys_path) if resumed.keys_path else None)
    if draft is None:
        if arguments.resume and not has_begun(arguments.out):
            raise UnsupportedError(f"There is no run file {arguments.out} to resume.")
        raise UnsupportedError("No drafter is named: name it by --draft.")
    if edge is None and matrix.needs_edge(settings):
        raise UnsupportedError("No edge is named: name its address by --edge tcp://HOST:PORT.")
    return draft, edge, keys


def _facts(
    arguments: MeasureSettings,
    settings: MatrixSettings,
    device: Device,
    draft: Path,
    edge: str | None,
    keys: Path | None,
) -> Facts:
    """Return the facts of the run; raise a typed error if the pair cannot make the run."""
    welcome = device.welcome
    if welcome is not None:
        matrix.check_edge(settings, welcome, device.tokenizer.vocab_size)
    matrix.check_prompts(settings.prompts, lambda p: len(device.prompt(p)), device.context)
    return Facts(
        software=SOFTWARE,
        settings=settings,
        starts=(_start(arguments),),
        drafter=_model(draft),
        target=None if welcome is None else Model(welcome.model, digest=welcome.digest or None),
        edge=edge,
        edge_software=None if welcome is None else welcome.software,
        draft_path=TEXT if str(draft) == TEXT else str(draft.resolve()),
        keys_path=None if keys is None else str(keys.resolve()),
        note=(arguments.note or "").encode(errors="replace").decode(),
        energy=energy.source(energy.rails()),
        device=(arguments.name or host.name()).encode(errors="replace").decode(),
    )


def _start(arguments: MeasureSettings) -> Start:
    """Return this start of the command; a resumed run's clock goes on."""
    last = None
    if arguments.resume and has_begun(arguments.out):
        with Run.open(arguments.out) as run:
            last = run.last_moment()
    return Start(host=host.facts(), **vars(begin(last)))


def _model(draft: Path) -> Model:
    if str(draft) == TEXT:
        return Model(TEXT)
    manifest = Artifact.open(draft).manifest
    return Model(manifest.model, manifest.precision, manifest.digest)


def _tables(summaries: Sequence[Figures], settings: MatrixSettings) -> Iterator[Table]:
    """Yield two tables of the configurations: their speed; their rounds and lossy counters."""
    notes = [_note_column(counter) for counter in counters_with_values(summaries)]
    link = ""
    if matrix.emulates(settings):
        link = f". The link was emulated: {format_point(settings.link.items()) or 'see the rows'}."
    yield _table(summaries, _SPEED, _SPEED_CAPTION + link)
    yield _table(summaries, [*_ROUNDS, *notes], _ROUNDS_CAPTION + link)


def _note_column(counter: RoundCounter) -> _Column:
    form = ".1%" if counter.counts_tokens else ".4f"
    return counter.name, form, lambda figures: figures.notes[counter.name]


def _table(summaries: Sequence[Figures], columns: Sequence[_Column], caption: str) -> Table:
    table = Table(caption=caption)
    table.add_column("")
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    for summary in summaries:
        values = (_number(value(summary), form) for _, form, value in columns)
        table.add_row(escape(str(summary.configuration)), *values)
    return table


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
