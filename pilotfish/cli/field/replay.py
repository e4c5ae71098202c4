"""``pilotfish field replay``: model how long recorded rounds would take over another link."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pilotfish.cli.options import Commands, json_option, positive, write_json
from pilotfish.cli.quantities import duration, rate
from pilotfish.lab.field.replay import Replay, fastest, replay, replayable
from pilotfish.lab.field.report.measured import read_run
from pilotfish.lab.field.token_speed import tokens_per_s
from pilotfish.speculation.latency import Link

_EXAMPLE = """\
example:
  pilotfish field replay walk.pilotfish --link rtt=50ms,up=20mbit,down=100mbit
  pilotfish field replay walk.pilotfish --link rtt=5ms --link rtt=80ms,up=5mbit --verify-ms 60
"""
_PARTS: dict[str, Callable[[str], float]] = {"rtt": duration, "up": rate, "down": rate}


_LEFT_OUT = (
    "{} answers of protocol ahead are left out: the link decides which of their drafts arrive "
    "in time, so measure protocol ahead over the link itself."
)
_COMPUTE = (
    "These times are modelled, not measured. A drafter's pass: {draft}; a target's pass: {verify}. "
    "Medians over n answers, each after its first round."
)


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "replay",
        help="model the recorded rounds over another link",
        description="Models the time of the recorded answers over another link. Each round keeps\n"
        "its drafted, accepted and sent tokens, and its computing times unless --draft-ms or\n"
        "--verify-ms replaces them. The time on the link is\n"
        "T_comm = RTT + bytes up / rate up + bytes down / rate down.\n"
        "First rounds, in which the models read the prompt, are left out, as in field measure.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="RUN", help="run file, made by field measure")
    parser.add_argument(
        "--link",
        action="append",
        required=True,
        type=_link,
        metavar="rtt=…,up=…,down=…",
        help="the other link; may be repeated. A rate that is left out is unlimited",
    )
    parser.add_argument(
        "--draft-ms",
        dest="draft_s",
        type=_milliseconds,
        metavar="X",
        help="milliseconds of a drafter's pass, per drafted token (default: as recorded)",
    )
    parser.add_argument(
        "--verify-ms",
        dest="verify_s",
        type=_milliseconds,
        metavar="Y",
        help="milliseconds of a target's pass (default: as recorded)",
    )
    json_option(parser)
    parser.set_defaults(run=_run)


def _link(text: str) -> Link:
    """Parse ``rtt=50ms,up=20mbit,down=100mbit`` (an argparse type); rates are optional."""
    parts: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in _PARTS or name in parts:
            raise argparse.ArgumentTypeError(
                f"{part!r} is not a part of a link; write a link as rtt=50ms,up=20mbit,down=100mbit"
            )
        parts[name] = _PARTS[name](value)
    if "rtt" not in parts:
        raise argparse.ArgumentTypeError(
            f"{text!r} lacks the round trip time: add it, as in rtt=50ms"
        )
    return Link(
        rtt_s=parts["rtt"],
        up_bps=parts.get("up", math.inf),
        down_bps=parts.get("down", math.inf),
    )


def _milliseconds(text: str) -> float:
    """Parse milliseconds above 0 as seconds (an argparse type)."""
    return positive(text) * 1e-3


def _run(args: argparse.Namespace) -> int:
    answers = [*read_run(args.file).answers]
    replays = replay(answers, args.link, args.draft_s, args.verify_s)
    if args.json:
        write_json(args.json, _figures(args, replays))
    if args.json != "-":
        console = Console(highlight=False)
        for at, link in enumerate(args.link):
            console.print(_table(replays, at, _in_words(link)))
        if left_out := sum(not replayable(answer) for answer in answers):
            console.print(_LEFT_OUT.format(left_out), style="dim", soft_wrap=True)
        console.print(_COMPUTE.format(**_compute(args)), style="dim", soft_wrap=True)
    return 0


def _compute(args: argparse.Namespace) -> dict[str, str]:
    stated = {"draft": args.draft_s, "verify": args.verify_s}
    return {
        name: "as recorded" if seconds is None else f"{seconds * 1e3:g} ms"
        for name, seconds in stated.items()
    }


def _table(replays: Sequence[Replay], at: int, link: str) -> Table:
    """Tabulate the measured and the modelled times of each (protocol, window) over one link."""
    table = Table(title=f"{link} (modelled)", title_justify="left")
    table.add_column("")
    for heading in ("n", "measured ms/token", "tokens/s", "modelled ms/token", "tokens/s", ""):
        table.add_column(heading, justify="right")
    fastest_row = fastest(replays, at)
    for row in replays:
        table.add_row(
            escape(str(row.configuration)),
            str(row.n),
            *_times(row.measured_s),
            *_times(row.modelled_s[at]),
            "best" if row is fastest_row else "",
            style="bold" if row is fastest_row else "",
        )
    return table


def _times(token_s: float) -> tuple[str, str]:
    rate = tokens_per_s(token_s)
    return f"{token_s * 1e3:.1f}", "–" if rate is None else f"{rate:.1f}"


def _in_words(link: Link) -> str:
    rates = [
        f"{way} {'unlimited' if math.isinf(bps) else f'{bps * 1e-6:g} Mbit/s'}"
        for way, bps in (("up", link.up_bps), ("down", link.down_bps))
    ]
    return ", ".join([f"RTT {link.rtt_s * 1e3:g} ms", *rates])


def _figures(args: argparse.Namespace, replays: Sequence[Replay]) -> dict[str, Any]:
    """Return the results for ``--json``; an unlimited rate is null."""
    return {
        "modelled": True,
        "draft_s": args.draft_s,
        "verify_s": args.verify_s,
        "links": [
            {
                **{key: value if value < math.inf else None for key, value in asdict(link).items()},
                "best": fastest(replays, at).configuration.to_json(),
            }
            for at, link in enumerate(args.link)
        ],
        "figures": [
            {
                **row.configuration.to_json(),
                "n": row.n,
                "measured_token_s": row.measured_s,
                "measured_tokens_per_s": tokens_per_s(row.measured_s),
                "modelled_token_s": row.modelled_s,
                "modelled_tokens_per_s": [tokens_per_s(each) for each in row.modelled_s],
            }
            for row in replays
        ],
    }
