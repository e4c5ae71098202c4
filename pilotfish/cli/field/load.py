"""``pilotfish field load``: find out how many devices an edge carries."""

import argparse
import hashlib
import time
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
from pilotfish.base.version import SOFTWARE
from pilotfish.cli.default_models import drafter_folder
from pilotfish.cli.field.load_settings import LoadSettings
from pilotfish.cli.field.load_tables import carried_table, points_tables
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.device_runtime.device import Device
from pilotfish.drafting.text_drafter import TEXT
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.lab import host
from pilotfish.lab.field.load.edge_cpu import cpu_s, edge_process
from pilotfish.lab.field.load.figures import PointFigures, figures, next_count
from pilotfish.lab.field.load.fleet import Fleet, Window, share_out
from pilotfish.lab.field.load.record import Record, record, record_without_drafter
from pilotfish.lab.field.load.results import Load, Results, expect_same, point_of
from pilotfish.lab.field.load.ways import SERVICE, Way, read_way
from pilotfish.lab.field.load.worker import Devices
from pilotfish.lab.field.opened_drafters import open_contenders
from pilotfish.lab.field.target_answers import AnswerFile, AnswerHeader, TargetAnswer, answer_all
from pilotfish.lab.prompts import BUILT_IN, read_questions
from pilotfish.lab.runs import locked_folder
from pilotfish.wire.messages import Welcome

_DESCRIPTION = """\
Finds the number of devices that an edge carries at a given time per token:

  1. One device records how it behaves: the target answers each prompt at temperature 0, and the
     drafter drafts after every beginning of an answer, on this machine.
  2. N devices, with real connections, ask these prompts: each thinks for a while (--think), asks,
     and drafts what was recorded, in the time that was recorded. So acceptance is real, but
     drafting takes no CPU.
  3. This repeats for each way to answer and for larger N, until more than 1 of 10 answers takes
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
_ANSWERS, _DRAFTS, _RESULTS, _PICTURE = "answers.jsonl", "drafts.npz", "load.json", "load.png"
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
    ways = _ways(settings)
    questions = BUILT_IN if settings.prompts is None else read_questions(settings.prompts)
    with locked_folder(settings.out):
        if not settings.resume and (settings.out / _RESULTS).exists():
            raise RunFileError(
                f"{settings.out} has results: continue by --resume, or name another folder."
            )
        measured = _measure(settings, ways, questions)
        if args.json != "-":
            # printed before any file is written, since the disk may be full
            print_ = Console(highlight=False).print
            print_(*points_tables(measured))
            print_(carried_table(measured, settings.at_s))
        if args.json:
            write_json(args.json, msgspec.to_builtins(measured))
        _draw(settings, measured)
    return 0


def _ways(settings: LoadSettings) -> list[Way]:
    """Read the ways; raise `UnsupportedError` if one needs a drafter and none is named."""
    if settings.service:
        return [Way(name=SERVICE, options={})]
    ways = [read_way(text) for text in dict.fromkeys(settings.protocols)]
    for way in ways:
        if way.needs_drafts and settings.draft is None:
            raise UnsupportedError(f"{way.name} needs drafts: name a drafter by --draft.")
    if str(settings.draft) == TEXT:
        raise UnsupportedError("The drafter text cannot be recorded: name a drafter with a model.")
    return ways


def _measure(
    settings: LoadSettings, ways: Sequence[Way], questions: Sequence[Any]
) -> list[PointFigures]:
    """Record, if there is no record yet, and measure all points that the results lack."""
    load, devices = _prepare(settings, questions)
    for way in ways:
        if not settings.service and way.needs_drafts and not load.drafter:
            raise UnsupportedError(
                f"{settings.out} was recorded without a drafter, which {way.name} needs: name "
                "another folder."
            )
    path = settings.out / _RESULTS
    results = Results(software=SOFTWARE, host=host.facts(), load=load)
    if path.exists():
        old = Results.read(path)
        expect_same(path, old.load, load)
        results = structs.replace(results, points=old.points)
    with _link(settings) as address, ProgressDisplay() as display:
        for way in ways:
            here = structs.replace(devices, edge=address, options=way.options)
            held = {
                point.devices: figures(point).holds(settings.at_s)
                for point in results.points
                if point.way == way.name
            }
            while (count := next_count(settings.devices, held)) is not None:
                try:
                    point = _point(settings, way, here, count, display)
                except BaseException:
                    display.print_above(
                        f"All points so far are in {path}: repeat the command with --resume."
                    )
                    raise
                results = structs.replace(results, points=[*results.points, point])
                results.write(path)
                held[count] = figures(point).holds(settings.at_s)
    names = [way.name for way in ways]
    return sorted(
        (figures(point) for point in results.points if point.way in names),
        key=lambda each: (names.index(each.way), each.devices),
    )


def _point(
    settings: LoadSettings, way: Way, devices: Devices, count: int, display: ProgressDisplay
) -> Any:
    """Measure one point."""
    shares = share_out(devices, count, settings.processes or usable_cpus())
    label = f"{way.name}, devices {count}: seconds"
    window = Window(warm_up_s=settings.warm_up_s, for_s=settings.for_s, answers=settings.answers)
    display.show(label, 0, None)
    process = edge_process(settings.edge) if settings.edge else None
    with Fleet(shares) as fleet:
        began_unix_s = time.time()
        measured = fleet.measure(
            window,
            lambda seconds: display.show(label, int(seconds), None),
            partial(cpu_s, process),
        )
    return point_of(way.name, count, began_unix_s, measured)


@contextmanager
def _link(settings: LoadSettings) -> Iterator[str]:
    """Yield the address that devices connect to: the edge's, or the emulated link's."""
    if settings.edge is None or settings.link == Conditions():
        yield settings.edge or ""
        return
    with Emulator(settings.edge, settings.link) as emulator:
        yield emulator.endpoint


# The record


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
        devices = structs.replace(devices, keys=keys, record=str(settings.out / _DRAFTS))
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
        link=_different(settings.link),
    )
    return load, devices


def _different(link: Conditions) -> dict[str, Any]:
    """Return the conditions that differ from an ideal link's."""
    ideal = structs.asdict(Conditions())
    values: dict[str, Any] = msgspec.to_builtins(link)
    return {name: value for name, value in values.items() if value != ideal[name]}


def _record(settings: LoadSettings, questions: Sequence[Any]) -> tuple[Record, Welcome]:
    """Return the folder's record and the edge's welcome; make the record if there is none."""
    path = settings.out / _DRAFTS
    assert settings.edge is not None
    with ProgressDisplay() as display:
        device = Device(
            TEXT, settings.edge, settings.keys, on_fetch=partial(display.show, FETCHING)
        )
    with device:
        welcome, vocabulary = device.welcome, device.vocabulary
        assert welcome is not None
        if max(settings.devices) > welcome.limits.sessions:
            raise UnsupportedError(
                f"The edge admits {welcome.limits.sessions} sessions of one key, fewer than "
                f"{max(settings.devices)} devices: serve it with --sessions-per-client "
                f"{max(settings.devices)}, or lower --devices."
            )
        header = AnswerHeader(
            target=welcome.model,
            digest=welcome.digest,
            prompts=list(questions),
            max_tokens=settings.max_tokens,
            temperature=0.0,
            seed=0,
        )
        answers = _answers(settings, device, header, vocabulary.vocab_size)
        if not path.exists():
            prompts = [device.prompt(questions[answer.prompt]).ids for answer in answers]
            recording = record_without_drafter(prompts, answers)
            if settings.draft is not None:
                recording = _read_drafts(settings, header, answers, vocabulary)
            _paced(recording, settings.draft_ms).save(path)
    return Record.load(path), welcome


def _answers(
    settings: LoadSettings, device: Device, header: AnswerHeader, vocab_size: int
) -> list[TargetAnswer]:
    """Return the target's answers: those in the folder, and new ones to the other prompts."""
    path = settings.out / _ANSWERS
    with AnswerFile(path, header, vocab_size, resume=settings.resume) as file:
        with ProgressDisplay() as display:
            report = display.counter(
                "the target answers, prompts", len(header.prompts) - len(file.answers)
            )
            for number, answer in enumerate(answer_all(device, header, dict(file.answers)), 1):
                file.add(answer)
                report(number)
        answers = [file.answers[prompt] for prompt in sorted(file.answers)]
    answers = [answer for answer in answers if answer.tokens]
    if not answers:
        raise UnsupportedError("The target answered no prompt: all are too long for it.")
    return answers


def _read_drafts(
    settings: LoadSettings,
    header: AnswerHeader,
    answers: Sequence[TargetAnswer],
    vocabulary: Vocabulary,
) -> Record:
    """Read the answers with the drafter, and time it."""
    assert settings.draft is not None
    name = str(drafter_folder(settings.draft, settings.provider))
    with ProgressDisplay() as display:
        display.show("opening the drafter", 0, None)
        (contender,) = open_contenders([name], vocabulary, settings)
        report = display.counter("the drafter reads, answers", len(answers))
        recording = record(contender, header, answers, report)
        contender.drafter.release()
    return recording


def _paced(recording: Record, draft_ms: float | None) -> Record:
    """Set the time of a draft, and that of a prompt's token in proportion."""
    if draft_ms is None or not recording.draft_s:
        return recording
    draft_s = draft_ms * 1e-3
    return Record(
        recording.answers,
        recording.drafter,
        draft_s,
        recording.read_s * draft_s / recording.draft_s,
    )


def _draw(settings: LoadSettings, measured: Sequence[PointFigures]) -> None:
    """Draw the picture, or say why matplotlib or the points do not allow it."""
    notes = Console(stderr=True, highlight=False)
    path = settings.out / _PICTURE
    try:
        from pilotfish.lab.field.load.picture import draw
    except UnsupportedError as error:
        notes.print(f"No picture: {error}", markup=False, soft_wrap=True)
        return
    where = f"emulated RTT {settings.link.rtt_s * 1e3:g} ms" if settings.link.rtt_s else "no delay"
    if draw(path, measured, settings.at_s, where):
        notes.print(f"drawn: {path}", markup=False, soft_wrap=True)
    else:
        notes.print("No picture: every point has fewer than 20 answers.", markup=False)
