"""``pilotfish demo wisv``: a decision head at work, over a link whose RTT crosses 10 ms.

An edge process runs the default target with the shipped head, this process runs the drafter
`default-28`, and a proxy process emulates the link between them. Each question is answered three
times: under `greedy`, and under the policy `threshold` over a short and over a long RTT.
"""

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct, structs
from rich.table import Table
from rich.text import Text

from pilotfish.base.cpus import split_cpus
from pilotfish.base.settings import setting
from pilotfish.cli.default_models import DEFAULT, SHORT, drafter_folder, target_folder
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.head_verdict import verdict
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.cli.screen import STYLES, AnswerScreen
from pilotfish.device_runtime.choice.threshold import RTT_S
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.plan import THRESHOLD, Auto
from pilotfish.device_runtime.record import Generation
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.edge_runtime.process import EdgeServer
from pilotfish.emulation.emulator import Emulator
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.engines.tokenizer import Tokenizer
from pilotfish.lab.judge.facts_task import make_questions
from pilotfish.lab.judge.model_passes import TARGET, Reader, ReadRequest
from pilotfish.lab.judge.tasks import Facts, Question
from pilotfish.lab.pairs import OpenPair
from pilotfish.wire import keys
from pilotfish.wire.protocols import Greedy, WisvFull, WisvSelective

_FORGIVEN = "bold magenta"
_CONTEXT = 512
_BUSY = (
    "Other work on this machine makes every RTT longer than 10 ms, so the policy takes wisv-full. "
    "The next answer names wisv-selective."
)
_TRIES = 3  # answers over a short link, if other work on this machine makes its RTT long


class WisvDemoSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``pilotfish demo wisv``."""

    questions: Annotated[int, setting("number of questions, from the set test", ge=1, le=500)] = 3
    max_tokens: Annotated[int, setting("maximum number of tokens of an answer", ge=2)] = 64
    window: Annotated[int, setting("γ, the number of draft tokens per round", ge=1)] = 8
    rtts: Annotated[
        tuple[Annotated[float, Meta(ge=0)], ...],
        setting("the emulated RTTs, in ms", metavar="MS,MS"),
    ] = (2.0, 40.0)
    mbps: Annotated[float, setting("the emulated rate each way, in Mbit/s", gt=0)] = 20.0
    threshold: (
        Annotated[
            float,
            setting("threshold of ρ (default: the head's own)", ge=0, le=1, metavar="ρ"),
        ]
        | None
    ) = None


@dataclass(frozen=True)
class _Run:
    """One answer. rtt_ms: the emulated RTT. forgiven: positions of forgiven tokens."""

    question: str
    rtt_ms: float
    generation: Generation
    forgiven: list[int]
    right: bool

    def figures(self) -> dict[str, Any]:
        """Return the run's results as JSON types."""
        generation = self.generation
        # an answer without a ping of its own knows the link as the last question's answer had it
        link = generation.link if generation.probing.pings else None
        return {
            "question": self.question,
            "rtt_ms": self.rtt_ms,
            "measured_rtt_ms": None if link is None or not link.rtt else link.rtt.value * 1e3,
            "pings": generation.probing.pings,
            "protocol": generation.protocol,
            "reason": None if generation.choice is None else generation.choice.reason,
            "right": self.right,
            "tokens": len(generation.tokens),
            "rounds": len(generation.rounds),
            "exchanges": sum(each.exchanges for each in generation.rounds),
            "forgiven": int(generation.notes["forgiven"] or 0),
            "forgiven_at": self.forgiven,
            "uplink_bytes": sum(each.uplink_bytes for each in generation.rounds),
            "downlink_bytes": sum(each.downlink_bytes for each in generation.rounds),
            "text": generation.text,
        }


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "wisv",
        help="show a decision head that forgives harmless mismatches",
        description="Answers questions under greedy, wisv-selective and wisv-full with the default "
        "models and the shipped decision head, over an emulated link. Before each answer the "
        "policy threshold measures the RTT, and chooses the protocol by it. The first line tells "
        "whether the head beats simpler rules on questions kept out of its training "
        "(docs/wisv.md).",
    )
    add_flags(parser, WisvDemoSettings)
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, WisvDemoSettings)
    head = DecisionHead.load(DEFAULT)
    screen = AnswerScreen(quiet=args.json == "-")
    screen.notes.print(verdict(head.card), style="bold", soft_wrap=True)
    target, drafter = target_folder(Path(DEFAULT)), drafter_folder(Path(SHORT))
    reader = _ForgivenReader(drafter, target)
    with _both_ends(target, drafter, settings) as (device, road):
        # a first answer without a measurement, since the first passes of new engines are slow
        device.generate("Hello", protocol=Greedy.name, max_tokens=8)
        _legend(screen)
        runs = [
            run
            for question in make_questions("test", settings.questions)
            for run in _answers(device, road, screen, reader, question, settings)
        ]
    screen.notes.print(_table(runs))
    if args.json:
        figures = {"verdict": verdict(head.card), "head": structs.asdict(head.card.training)}
        write_json(args.json, figures | {"runs": [run.figures() for run in runs]})
    return 0


@contextmanager
def _both_ends(
    target: Path, drafter: Path, settings: WisvDemoSettings
) -> Iterator[tuple[Device, Emulator]]:
    """Run the edge with the head, the emulated link and the device inside the ``with`` block."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pilotfish-demo-")))
        keys.create(folder, keys.EDGE)
        keys.allow(folder, keys.create(folder, keys.DEVICE))
        theirs, ours = split_cpus()
        edge = stack.enter_context(
            EdgeServer(
                target, keys=folder, head=DEFAULT, threads=len(theirs), context=_CONTEXT, sessions=2
            )
        )
        road = stack.enter_context(Emulator(edge.endpoint))
        bps = settings.mbps * 1e6
        road.set(rtt_s=settings.rtts[0] / 1e3, up_bps=bps, down_bps=bps)
        device = stack.enter_context(
            Device(drafter, road.endpoint, folder, threads=len(ours), context=_CONTEXT)
        )
        yield device, road


def _answers(
    device: Device,
    road: Emulator,
    screen: AnswerScreen,
    reader: "_ForgivenReader",
    question: Question,
    settings: WisvDemoSettings,
) -> Iterator[_Run]:
    """Answer one question under `greedy`, then under the policy at each RTT; show each answer."""
    task = Facts()
    screen.notes.rule("question")
    screen.notes.print(question.message, soft_wrap=True)
    screen.notes.print(f"facts to keep: {question.answer}", style="dim", soft_wrap=True)
    judged: dict[str, Any] = {
        "protocol": Auto(lossy=True, policy=THRESHOLD),
        "threshold": settings.threshold,
    }
    plans = [
        (settings.rtts[0], {"protocol": Greedy.name}),
        *((rtt, judged) for rtt in settings.rtts),
    ]
    message = task.ask(question.message)
    for rtt_ms, options in plans:
        road.set(rtt_s=rtt_ms / 1e3)
        generation = _generate(device, message, settings, options)
        for _ in range(_TRIES - 1):
            if not _looked_long(generation, rtt_ms):
                break
            generation = _generate(device, message, settings, options)
        if _looked_long(generation, rtt_ms):
            screen.notes.print(_BUSY, style="yellow", soft_wrap=True)
            by_name = {**options, "protocol": WisvSelective.name}
            generation = _generate(device, message, settings, by_name)
        right = task.right(question, task.outcome(question, generation.text))
        run = _Run(question.key, rtt_ms, generation, reader.forgiven(message, generation), right)
        _show(screen, reader.tokenizer, run)
        yield run


def _generate(
    device: Device, message: str, settings: WisvDemoSettings, options: Mapping[str, Any]
) -> Generation:
    """Answer a message at temperature 0. options: protocol and threshold."""
    return device.generate(
        message,
        window=settings.window,
        max_tokens=settings.max_tokens,
        temperature=0.0,
        **options,
    )


def _looked_long(generation: Generation, rtt_ms: float) -> bool:
    """Whether the policy measured more than 10 ms, though the emulated RTT is shorter."""
    return generation.protocol == WisvFull.name and rtt_ms < RTT_S * 1e3


def _show(screen: AnswerScreen, tokenizer: Tokenizer, run: _Run) -> None:
    """Print one answer, its forgiven tokens in colour, and a line with its counts."""
    figures, generation = run.figures(), run.generation
    measured = figures["measured_rtt_ms"]
    by = "" if measured is None else f", measured {measured:.1f} ms"
    screen.notes.rule(f"{generation.protocol}: emulated RTT {run.rtt_ms:g} ms{by}", style="dim")
    if figures["reason"]:
        screen.notes.print(figures["reason"], style="dim", soft_wrap=True)
    screen.show_text(_coloured(tokenizer, run))
    screen.notes.print(
        f"{'all facts kept' if run.right else 'A FACT IS LOST'}; {figures['tokens']} tokens in "
        f"{figures['rounds']} rounds and {figures['exchanges']} round trips; "
        f"{figures['forgiven']} forgiven; {figures['uplink_bytes']:,} B up, "
        f"{figures['downlink_bytes']:,} B down",
        soft_wrap=True,
    )


def _coloured(tokenizer: Tokenizer, run: _Run) -> Text:
    """Return the answer's text with a style for each token."""
    origins = _origins(run.generation)
    text, written = Text(), ""
    for position in range(len(run.generation.tokens)):
        whole = tokenizer.decode(run.generation.tokens[: position + 1])
        style = _FORGIVEN if position in run.forgiven else STYLES[origins[position]]
        text.append(whole[len(written) :], style=style)
        written = whole
    return text


def _origins(generation: Generation) -> list[str]:
    """Return each token's origin: a draft that was accepted, or the target's own token."""
    origins: list[str] = []
    for each in generation.rounds:
        drafted = min(each.accepted, len(each.tokens))
        after = "bonus" if each.accepted == each.window else "corrected"
        origins += ["drafted"] * drafted + [after] * (len(each.tokens) - drafted)
    return origins


class _ForgivenReader:
    """The target on this machine, which finds the forgiven tokens of an answer.

    A verdict holds only their number. They are the accepted drafts that differ from the target's
    argmax after the tokens before them, so one more pass over the answer finds them.
    """

    def __init__(self, drafter: Path, target: Path) -> None:
        _, ours = split_cpus()
        self._pair = OpenPair(drafter, target).vocabularies
        self.tokenizer = Tokenizer(Artifact.open(target).tokenizer_path)
        self._reader = Reader(target, 1, _CONTEXT, EngineSettings(threads=len(ours)), drafts=False)

    def forgiven(self, message: str, generation: Generation) -> list[int]:
        """Return the positions of the forgiven tokens in the answer."""
        if not generation.notes["forgiven"]:
            return []
        tokens = generation.tokens
        prompt = self._pair.prompt(message).ids.tolist()
        ids = np.array([*prompt, *tokens[:-1]], dtype=np.int64)
        request = ReadRequest(TARGET, ids, len(tokens))
        results = self._reader.read({0: request})
        while not results:  # a long text takes several passes
            results = self._reader.read({0: request})
        choices = results[0].logits.argmax(1)
        origins = _origins(generation)
        return [
            position
            for position, (token, choice) in enumerate(zip(tokens, choices, strict=True))
            if origins[position] == "drafted" and token != choice
        ]


def _legend(screen: AnswerScreen) -> None:
    legend = Text("tokens: ")
    for origin in ("drafted", "corrected", "bonus"):
        legend.append(f"{origin} ", style=STYLES[origin])
    legend.append("forgiven", style=_FORGIVEN)
    screen.notes.print(legend)


def _table(runs: Sequence[_Run]) -> Table:
    """Tabulate the sums of all answers under each protocol and RTT."""
    table = Table("", caption="bytes are the sizes of the frames sent", caption_justify="left")
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for run in runs:
        group = run.generation.protocol, run.rtt_ms
        groups.setdefault(group, []).append(run.figures())
    for protocol, rtt_ms in groups:
        table.add_column(f"{protocol}\n{rtt_ms:g} ms", justify="right")
    for heading, name in (
        ("answers with all facts", "right"),
        ("tokens", "tokens"),
        ("rounds", "rounds"),
        ("round trips", "exchanges"),
        ("forgiven tokens", "forgiven"),
        ("bytes up", "uplink_bytes"),
        ("bytes down", "downlink_bytes"),
    ):
        cells = [f"{sum(figures[name] for figures in group):,}" for group in groups.values()]
        table.add_row(heading, *cells)
    table.add_row(
        "tokens per round",
        *(
            f"{sum(f['tokens'] for f in group) / sum(f['rounds'] for f in group):.2f}"
            for group in groups.values()
        ),
    )
    return table
