"""``pilotfish field load``: find out how many devices an edge carries."""

import argparse
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
from msgspec import structs
from rich.console import Console

from pilotfish.base.cpus import usable_cpus
from pilotfish.base.errors import RunFileError, UnsupportedError
from pilotfish.base.progress import FETCHING, ProgressDisplay
from pilotfish.cli.default_models import drafter_folder
from pilotfish.cli.field.load_settings import LoadSettings
from pilotfish.cli.field.load_tables import capacity_table, points_tables
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.device_runtime.device import Device
from pilotfish.drafting.text_drafter import TEXT
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.lab.field.load.figures import PointFigures
from pilotfish.lab.field.load.fleet import Period
from pilotfish.lab.field.load.methods import SERVICE, Method, read_method
from pilotfish.lab.field.load.record import Record
from pilotfish.lab.field.load.record_folder import DRAFTS, read_or_record
from pilotfish.lab.field.load.results import Load
from pilotfish.lab.field.load.search import Search, figures_of, open_results
from pilotfish.lab.field.load.service_client import address_of
from pilotfish.lab.field.load.worker import Devices
from pilotfish.lab.field.opened_drafters import open_sources
from pilotfish.lab.field.target_answers import AnswerHeader
from pilotfish.lab.prompts import BUILT_IN, read_questions
from pilotfish.lab.runs import locked_folder
from pilotfish.lab.statistics import FEWEST_VALUES
from pilotfish.wire.messages import Welcome

_DESCRIPTION = """\
Finds the number of devices that an edge carries at a given time per token:

  1. One device records how it behaves: the target answers each prompt at temperature 0, and the
     drafter drafts after every beginning of an answer, on this machine.
  2. N devices, with real connections, ask these prompts: each thinks for a while (--think), asks,
     and drafts what was recorded, in the time that was recorded. So acceptance is real, but
     drafting takes no CPU.
  3. This repeats for each method to answer and for larger N, until more than 1 of 10 answers takes
     longer per token than --at; then the gap is bisected.

Serve the edge with room for them: --sessions 16 --sessions-per-client 16. If it shares this
machine, pin both to different cores. Points, picture and record are in --out."""
_EXAMPLE = """\
example:
  taskset -c 0 pilotfish edge serve --target default --sessions 16 --sessions-per-client 16
  taskset -c 1 pilotfish field load --edge tcp://127.0.0.1:7077 --draft default --out load
  taskset -c 1 pilotfish field load --edge tcp://127.0.0.1:7077 --draft default --out load50 \\
    --rtt 50ms --protocols stream,ahead,ahead:edge --devices 1,2,4,8
  pilotfish field load --edge tcp://edge:7077 --keys --draft default --out load --resume
"""
_RESULTS, _PICTURE = "load.json", "load.png"
_PER_MINUTE = 1 / 60.0


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "load",
        help="find how many devices an edge carries at 100 ms a token",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, LoadSettings)
    json_option(parser)
    parser.set_defaults(run=_run, usage=parser.error)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, LoadSettings)
    if (settings.edge is None) == (not settings.service):
        args.usage("name either the edge by --edge, or services by --service")
    methods = _methods(settings)
    questions = BUILT_IN if settings.prompts is None else read_questions(settings.prompts)
    with locked_folder(settings.out):
        if not settings.resume and (settings.out / _RESULTS).exists():
            raise RunFileError(
                f"{settings.out} has results: continue by --resume, or name another folder."
            )
        measured = _measure(settings, methods, questions)
        if args.json != "-":
            # printed before any file is written, since the disk may be full
            print_ = Console(highlight=False).print
            print_(*points_tables(measured))
            print_(capacity_table(measured, settings.at_s))
        if args.json:
            write_json(args.json, msgspec.to_builtins(measured))
        _draw(settings, measured)
    return 0


def _methods(settings: LoadSettings) -> list[Method]:
    """Read the methods; raise `UnsupportedError` if one needs a drafter and none is named."""
    if settings.service:
        for url in settings.service:
            address_of(url)  # fail now if it is no address
        return [Method(name=SERVICE, options={})]
    methods = [read_method(text) for text in dict.fromkeys(settings.protocols)]
    for method in methods:
        if method.needs_drafts and settings.draft is None:
            raise UnsupportedError(f"{method.name} needs drafts: name a drafter by --draft.")
    if str(settings.draft) == TEXT:
        raise UnsupportedError("The drafter text cannot be recorded: name a drafter with a model.")
    return methods


def _measure(
    settings: LoadSettings, methods: Sequence[Method], questions: Sequence[Any]
) -> list[PointFigures]:
    """Record, if there is no record yet, and measure all points that the results lack."""
    load, devices = _prepare(settings, questions)
    for method in methods:
        if not settings.service and method.needs_drafts and not load.drafter:
            raise UnsupportedError(
                f"{settings.out} was recorded without a drafter, which {method.name} needs: name "
                "another folder."
            )
    path = settings.out / _RESULTS
    results = open_results(path, load)
    with _link(settings) as address, ProgressDisplay() as display:
        search = Search(
            methods=methods,
            counts=settings.devices,
            limit_s=settings.at_s,
            period=Period(
                warm_up_s=settings.warm_up_s, for_s=settings.for_s, answers=settings.answers
            ),
            processes=settings.processes or usable_cpus(),
            edge=settings.edge or "",
            devices=structs.replace(devices, edge=address),
        )
        try:
            results = search.measure(
                results,
                path,
                lambda point, seconds: display.show(f"{point}: seconds", int(seconds), None),
                display.print_above,
            )
        except BaseException:
            if path.exists():
                display.print_above(
                    f"All points so far are in {path}: repeat the command with --resume."
                )
            raise
    return figures_of(results, methods)


@contextmanager
def _link(settings: LoadSettings) -> Iterator[str]:
    """Yield the address that devices connect to: the edge's, or the emulated link's."""
    if settings.edge is None or settings.link == Conditions():
        yield settings.edge or ""
        return
    with Emulator(settings.edge, settings.link) as emulator:
        yield emulator.endpoint


def _prepare(settings: LoadSettings, questions: Sequence[Any]) -> tuple[Load, Devices]:
    """Return what determines the points, and the devices without their numbers."""
    devices = Devices(
        numbers=[],
        seed=settings.arrivals_seed,
        think_s=settings.think_s,
        rate=None if settings.rate is None else settings.rate * _PER_MINUTE,
        services=list(settings.service),
    )
    recording = Record([])
    target, digest = ",".join(settings.service), ""
    if settings.service:
        devices = structs.replace(devices, prompts=list(questions), max_tokens=settings.max_tokens)
    else:
        recording, welcome = _record(settings, questions)
        target, digest = welcome.model, welcome.digest or ""
        keys = None if settings.keys is None else str(settings.keys)
        devices = structs.replace(
            devices, keys=keys, digest=digest, record=str(settings.out / DRAFTS)
        )
    load = Load(
        target=target,
        digest=digest,
        drafter=recording.drafter,
        draft_s=recording.draft_s,
        read_s=recording.read_s,
        prompts=hashlib.sha256(msgspec.json.encode(questions)).hexdigest(),
        max_tokens=settings.max_tokens,
        think_s=settings.think_s,
        rate=devices.rate,
        seed=settings.arrivals_seed,
        warm_up_s=settings.warm_up_s,
        for_s=settings.for_s,
        answers=settings.answers,
        link=_link_conditions(settings.link),
    )
    return load, devices


def _link_conditions(link: Conditions) -> dict[str, Any]:
    """Return the conditions that differ from an ideal link's."""
    ideal = structs.asdict(Conditions())
    values: dict[str, Any] = msgspec.to_builtins(link)
    return {name: value for name, value in values.items() if value != ideal[name]}


def _record(settings: LoadSettings, questions: Sequence[Any]) -> tuple[Record, Welcome]:
    """Load the folder's record, or record it; return it and the edge's welcome."""
    assert settings.edge is not None
    drafter = None
    if settings.draft is not None and not (settings.out / DRAFTS).exists():
        drafter = str(drafter_folder(settings.draft, settings.provider))
        open_sources([drafter])  # fail now if the artifact is missing
    with ProgressDisplay() as display:
        device = Device(
            TEXT, settings.edge, settings.keys, on_fetch=partial(display.show, FETCHING)
        )
        with device:
            welcome = device.welcome
            assert welcome is not None
            most = max(settings.devices)
            if most > welcome.limits.sessions:
                raise UnsupportedError(
                    f"The edge admits {welcome.limits.sessions} sessions of one key, fewer than "
                    f"{most} devices: serve it with --sessions-per-client {most}, or lower "
                    "--devices."
                )
            header = AnswerHeader(
                target=welcome.model,
                digest=welcome.digest,
                prompts=list(questions),
                max_tokens=settings.max_tokens,
                temperature=0.0,
                seed=0,
            )
            recording = read_or_record(
                settings.out,
                device,
                header,
                drafter,
                settings,
                draft_ms=settings.draft_ms,
                resume=settings.resume,
                display=display,
            )
    return recording, welcome


def _draw(settings: LoadSettings, measured: Sequence[PointFigures]) -> None:
    """Draw the picture, or say why matplotlib or the points do not allow it."""
    notes = Console(stderr=True, highlight=False)
    path = settings.out / _PICTURE
    try:
        from pilotfish.lab.field.load.picture import draw
    except UnsupportedError as error:
        notes.print(f"No picture: {error}", markup=False, soft_wrap=True)
        return
    if draw(path, measured, settings.at_s, link_text(settings.link)):
        notes.print(f"drawn: {path}", markup=False, soft_wrap=True)
    else:
        notes.print(
            f"No picture: every point has fewer than {FEWEST_VALUES} answers.", markup=False
        )


def link_text(link: Conditions) -> str:
    """Describe the link for the picture's title."""
    if link == Conditions():
        return "the link as it is"
    others = [name for name in _link_conditions(link) if name != "rtt_s"]
    more = " and more" if others else ""
    return f"emulated link: RTT {link.rtt_s * 1e3:g} ms{more}"
