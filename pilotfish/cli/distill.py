"""``pilotfish distill``: a better drafter for a target, made here."""

import argparse
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pilotfish.cli.countdown import Countdown
from pilotfish.cli.extras import export_tools
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, json_option, write_json
from pilotfish.distill.distill_settings import DistillSettings
from pilotfish.distill.measuring import ALL
from pilotfish.distill.outcome import DEPTH, Distilled
from pilotfish.distill.stages import ANSWERS

_DESCRIPTION = """\
Makes a drafter better for one target, on this machine. It asks the target (several sessions at
once, over the wire), trains the drafter's weights on the answers as a device would read them, and
exports the result. It says what that brought on prompts that were kept out: α, the share of the
target's tokens that the drafter guesses, and S(k), the share of runs that reach k drafts.

Killed at any time, it goes on where it stopped when the same command is given again: all that it
has stands in the run's folder, report included. Needs the extra 'distill' (torch, transformers)."""
_EXAMPLE = """\
example:
  pilotfish distill --draft default --target target --prompts questions.jsonl --out drafter
  pilotfish distill --draft default --edge tcp://10.0.0.2:7077 --keys --minutes 45 --out drafter
  pilotfish device run --draft drafter --edge tcp://10.0.0.2:7077 --keys "Why is the sky blue?"

The edge answers eight sessions in one pass only if its artifact takes them so: export the target
with --dialect opset24 for that. Prompts like those that the drafter will meet help most; the
built-in ones are short, of nine kinds, two of which are never learnt from: what is forgotten shows
there.
"""


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "distill",
        help="make a drafter better for one target",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, DistillSettings)
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, DistillSettings)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    from pilotfish.distill.distill_report import write  # first: without matplotlib nothing is begun

    with export_tools():
        from pilotfish.distill.running import distill

    with _Stages({ANSWERS: settings.sessions}) as stages:
        distilled = distill(settings, stages.update)
    page = write(settings.folder, distilled)
    console.print(_table(distilled))
    console.print(f"{distilled.learnt} answers learnt from; the report is {page}", markup=False)
    if args.json:
        write_json(args.json, distilled.figures())
    if args.json != "-":
        print(settings.out)
    return 0


class _Stages:
    """A countdown for each stage in turn. waves: of stages whose steps come several at once."""

    def __init__(self, waves: Mapping[str, int]) -> None:
        self._label, self._waves = "", waves
        self._countdown: Countdown | None = None

    def update(self, label: str, done: int, total: int, left_s: float | None) -> None:
        """So many steps of this stage are done."""
        if self._countdown is None or self._label != label:
            self._end()
            wave = self._waves.get(label, 1)
            self._label = label
            self._countdown = Countdown(label, total, begun=done, wave=wave)
            self._countdown.__enter__()
        self._countdown.total = total  # of training it is settled on the way
        self._countdown.update(done, left_s)

    def _end(self) -> None:
        if self._countdown is not None:
            self._countdown.__exit__(None, None, None)
        self._countdown = None

    def __enter__(self) -> "_Stages":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()


def _table(distilled: Distilled) -> Table:
    table = Table(title=Text(f"{distilled.drafter} for {distilled.target}, answers kept out"))
    table.add_column("kind")
    for name in ("places", "α before", "after", "change", f"S({DEPTH}) before", "after"):
        table.add_column(name, justify="right")
    for kind, places, before, after, reach, now in distilled.rows:
        if kind == ALL:
            table.add_section()
        table.add_row(
            Text(f"{kind} (not learnt)" if distilled.unlearnt(kind) else kind),  # no markup
            f"{places}",
            f"{before:.3f}",
            f"{after:.3f}",
            f"{after - before:+.3f}",
            f"{reach:.3f}",
            f"{now:.3f}",
        )
    return table
