"""``pilotfish field compare``: compare drafters on a target's own answers."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from pilotfish.base.errors import MalformedError, PairMismatchError, UnsupportedError
from pilotfish.base.files import private_folder
from pilotfish.base.progress import FETCHING, ProgressDisplay
from pilotfish.cli.default_models import drafter_folder, target_folder
from pilotfish.cli.field.compare_settings import CompareSettings
from pilotfish.cli.field.comparison_tables import as_json, print_comparison
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.plan import plan
from pilotfish.drafting.text_drafter import TEXT
from pilotfish.engines.artifact import Artifact, check_head
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.lab.field.comparison import DrafterComparison, compare, target_passes
from pilotfish.lab.field.drafter_figures import DrafterEntry
from pilotfish.lab.field.opened_drafters import (
    expect_pairs,
    measure_draft_s,
    open_contenders,
    open_sources,
    read_answers,
)
from pilotfish.lab.field.shared_machine import is_this_machine, shared_machine_warning
from pilotfish.lab.field.target_answers import AnswerFile, AnswerHeader, TargetAnswer, answer_all
from pilotfish.lab.pairs import serving
from pilotfish.lab.prompts import BUILT_IN, read_questions
from pilotfish.wire.messages import Welcome
from pilotfish.wire.protocols import STREAM
from pilotfish.wire.request import Request

_DESCRIPTION = """\
Finds the best drafter for a target at each round trip:

  1. The target answers each prompt once, over the wire (protocol stream).
  2. Each drafter reads these answers and predicts every next token. A draft counts only after
     accepted ones, so the result holds for every protocol and window.
  3. The drafters are timed in turns on this machine, after an answer.
  4. From both, the expected tokens/s at each RTT are computed, for rounds with the best window and
     for protocol ahead. Protocol stream is the target without a drafter.

Run it on the drafter's future machine: milliseconds per draft matter as much as α. If the target
runs on this machine, too, the command warns that its times may not be those of your edge."""
_EXAMPLE = """\
example:
  pilotfish field compare drafter-int8 drafter-int4 --target target --prompts questions.jsonl
  pilotfish field compare drafter-* --target tcp://edge:7077 --keys --out which
  pilotfish field compare drafter-* --target tcp://edge:7077 --keys --out which --resume
"""
_ANSWERS, _FIGURES, _PICTURE = "answers.jsonl", "comparison.json", "comparison.png"


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "compare",
        help="compare drafters on a target's answers, to choose one for a device",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, CompareSettings)
    json_option(parser)
    parser.set_defaults(run=_run, usage=parser.error)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, CompareSettings)
    if not settings.drafters:
        args.usage("name the drafters: one or several")
    if settings.resume and settings.out is None:
        args.usage("--resume needs --out DIR, the folder with the answers so far")
    named = dict.fromkeys(settings.drafters)
    names = [str(drafter_folder(Path(name), settings.provider)) for name in named]
    open_sources(names)  # fail now if an artifact is missing
    plan(Request(protocol=STREAM, temperature=settings.temperature, seed=settings.seed))
    questions = BUILT_IN if settings.prompts is None else read_questions(settings.prompts)
    if settings.out is not None:
        private_folder(settings.out)
    with _edge(settings) as address:
        header, answers, welcome, vocabulary = _collect_answers(settings, names, questions, address)
    # an edge started here has ended by now, so its memory is free
    comparison = _compare_drafters(settings, names, header, answers, welcome, vocabulary)
    if is_this_machine(address):
        served_here = "://" not in settings.target
        warning = shared_machine_warning(served_here=served_here, pass_ms=settings.target_ms)
        comparison = replace(comparison, warning=warning)
    if args.json != "-":
        # printed before any file is written, since the disk may be full
        print_comparison(comparison, header.target)
    figures = as_json(header, comparison)
    if args.json:
        write_json(args.json, figures)
    if settings.out is not None:
        write_json(str(settings.out / _FIGURES), figures)
        _draw(settings.out / _PICTURE, comparison)
    return 0


@contextmanager
def _edge(settings: CompareSettings) -> Iterator[str]:
    """Yield the address of the target's edge, started here if the target is an artifact."""
    if "://" in settings.target:
        yield settings.target
        return
    target = target_folder(Path(settings.target), settings.provider)
    check_head(Artifact.open(target))  # fail now if the artifact is not a target
    print_ = Console(stderr=True, highlight=False).print
    print_(f"serving {settings.target} …", markup=False, soft_wrap=True)
    with serving(target, threads=settings.threads, provider=settings.provider) as address:
        yield address


def _collect_answers(
    settings: CompareSettings, names: Sequence[str], questions: Sequence[Any], address: str
) -> tuple[AnswerHeader, list[TargetAnswer], Welcome, Vocabulary]:
    """Let the target answer; return the header, answers, and the edge's welcome and vocabulary."""
    with _device(settings, names, address) as device:
        welcome, vocabulary = device.welcome, device.vocabulary
        assert welcome is not None
        expect_pairs(names, vocabulary)  # fail before the answers if a drafter does not fit
        header = AnswerHeader(
            target=welcome.model,
            digest=welcome.digest,
            prompts=list(questions),
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            seed=settings.seed,
        )
        path = None if settings.out is None else settings.out / _ANSWERS
        with ExitStack() as stack:
            file = None
            if path is not None:
                answer_file = AnswerFile(
                    path, header, vocabulary.vocab_size, resume=settings.resume
                )
                file = stack.enter_context(answer_file)
            answers = _answers(device, header, file)
    if not any(answer.tokens for answer in answers):
        raise UnsupportedError("No prompt was answered: all are too long for target and drafter.")
    return header, [answer for answer in answers if answer.tokens], welcome, vocabulary


def _device(settings: CompareSettings, names: Sequence[str], address: str) -> Device:
    """Open a device with any of the drafters, since the device only streams."""
    keys = settings.keys if "://" in settings.target else None
    with ProgressDisplay() as display:
        open_ = partial(Device, edge=address, keys=keys, on_fetch=partial(display.show, FETCHING))
        try:
            return open_(TEXT)
        except (MalformedError, PairMismatchError):
            models = [name for name in names if name != TEXT]
            if not models:
                raise
            # the edge cannot send its vocabulary; a drafter may have the same vocabulary
            return open_(models[0], provider=settings.provider, threads=settings.threads)


def _answers(device: Device, header: AnswerHeader, file: AnswerFile | None) -> list[TargetAnswer]:
    """Return all answers: the answers in the file, and new answers to the other prompts."""
    done = {} if file is None else dict(file.answers)
    with ProgressDisplay() as display:
        report = display.counter("the target answers, prompts", len(header.prompts) - len(done))
        try:
            for number, answer in enumerate(answer_all(device, header, dict(done)), 1):
                if file is not None:
                    file.add(answer)
                done[answer.prompt] = answer
                if answer.left_out:
                    display.print_above(
                        f"Prompt {answer.prompt + 1} is left out: {answer.left_out}"
                    )
                report(number)
        except BaseException:
            if file is not None:
                display.print_above(
                    "The answers so far are kept: repeat the command with --resume to go on."
                )
            raise
    return [done[prompt] for prompt in sorted(done)]


def _compare_drafters(
    settings: CompareSettings,
    names: Sequence[str],
    header: AnswerHeader,
    answers: Sequence[TargetAnswer],
    welcome: Welcome,
    vocabulary: Vocabulary,
) -> DrafterComparison:
    """Read the answers with the drafters, time the drafters, and compare them."""
    with ProgressDisplay() as display:
        display.show("opening the drafters", 0, None)
        contenders = open_contenders(names, vocabulary, settings)
    try:
        with ProgressDisplay() as display:
            report = display.counter("reading, answers", len(answers) * len(contenders))
            for done, _ in enumerate(read_answers(contenders, header, answers), 1):
                report(done)
            seconds = measure_draft_s(contenders, header, answers, display.show)
    finally:
        for contender in contenders:
            contender.drafter.release()
    order = {answer.prompt: at for at, answer in enumerate(answers)}
    entries = [
        DrafterEntry(
            name=contender.name,
            size_bytes=contender.size_bytes,
            draft_s=draft_s,
            agreed={order[prompt]: agreed for prompt, agreed in contender.agreed.items()},
        )
        for contender, draft_s in zip(contenders, seconds, strict=True)
    ]
    with ProgressDisplay() as display:
        return compare(
            entries,
            prompts=len(answers),
            target_s=target_passes(welcome, answers, settings.target_ms),
            rtts_s=settings.rtts_s,
            longest=welcome.limits.window,
            in_rounds="coupled" if header.temperature else "greedy",
            progress=display.show,
        )


def _draw(path: Path, comparison: DrafterComparison) -> None:
    """Draw the comparison; without matplotlib, note that there is no picture."""
    notes = Console(stderr=True, highlight=False)
    try:
        from pilotfish.lab.field.comparison_picture import draw
    except UnsupportedError as error:
        notes.print(f"No picture: {error}", markup=False, soft_wrap=True)
        return
    draw(path, comparison)
    notes.print(f"drawn: {path}", markup=False, soft_wrap=True)
