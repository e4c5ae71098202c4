"""`ahead` against `stream`, stop-and-wait and "auto": every table that tells when it pays.

    python benchmarks/ahead.py [TABLE …] [--json PATH] [--quick] [--draft DIR] [--target DIR]

rtt      the default pair by RTT: speed over `stream` of `ahead`, of the best window of
         stop-and-wait (`greedy`; above temperature 0 `coupled`) and of "auto"
paced    the same with a replayed target whose pass takes a given time (`_ahead_edge.py`)
links    the same with jitter, loss, and Mahimahi traces (--traces DIR: NAME.up, NAME.down)
big      the same with --target and --draft as named, the model's forecast beside the clock
own      hints of the device, of the text, of a drafter at the edge; prompts that repeat themselves
first    the first token of a prompt of 1,500 tokens
fleet    8 and 16 devices at one edge, drafters and targets replayed, and beside `stream`
hostile  honest streams beside a device that hints nonsense as fast as it can

Times over `stream` are medians of paired answers, quartiles in brackets. Each end has one core, one
thread (`_ahead_cells.py`); replayed targets sleep. Of windows all are tried on two prompts, and the
best two on all. "auto" has seen what went before on the same device. "auto/best" is its speed over
the best of the others. Texts are compared with `stream`'s token by token; where passes of another
shape part them, the two tokens' scores must be a tie.
"""

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _ahead_cells import AND_TEXT, WINDOWS, Texts, ends
from _ahead_crowd import fleets, hostile
from _ahead_edge import BenchEdge
from _ahead_grid import Grid, Place, Report, forecasts, goals, table_rows
from _ahead_prompts import questions
from _ahead_replayed import Pace, record, save
from _ahead_tables import Bench, Measured, first, own_figures
from _common import Rows, Steps, options, pair_options
from _company import in_words
from msgspec import structs

from pilotfish.cli.export import default_artifact
from pilotfish.cli.options import write_json
from pilotfish.drafting.text_drafter import TEXT
from pilotfish.emulation.emulator import Conditions

RTTS_MS = (0.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0)
PACES_MS = ("10", "25", "40", "130+9")
LINK_RTT_MS = 50.0


def rtt(args: argparse.Namespace, report: Report) -> None:
    """The default pair."""
    places = [Place.rtt(ms) for ms in args.rtt or ((0.0, 50.0) if args.quick else RTTS_MS)]
    grid = _grid(args, "rtt", len(places) * len(args.drafters))
    with ends(args.drafters, args.target) as both:
        rows = grid.cells(both, places)
    _tell(report, "the default pair by RTT", rows, wanted=True)
    markdown("model and clock", forecasts(rows))


def links(args: argparse.Namespace, report: Report) -> None:
    """Jitter, loss, traces."""
    base = Conditions(rtt_s=LINK_RTT_MS * 1e-3)
    places = [
        Place.rtt(LINK_RTT_MS),
        *(
            Place(f"jitter {ms:g} ms", structs.replace(base, jitter_s=ms * 1e-3))
            for ms in (10.0, 40.0)
        ),
        *(
            Place(f"loss {100 * loss:g} %", structs.replace(base, loss=loss))
            for loss in (0.001, 0.01, 0.03)
        ),
    ]
    for up in sorted(args.traces.glob("*.up")) if args.traces else ():
        down = up.with_suffix(".down")
        both_ways = structs.replace(base, trace_up=str(up), trace_down=str(down))
        places.append(Place(up.stem, both_ways, traced=True))
    if args.quick:
        places = places[1::3]
    grid = _grid(args, "links", len(places) * len(args.drafters))
    with ends(args.drafters, args.target) as both:
        rows = grid.cells(both, places)
    _tell(report, f"links, RTT {LINK_RTT_MS:g} ms and", rows)


def big(args: argparse.Namespace, report: Report) -> None:
    """Named artifacts, and the model."""
    places = [Place.rtt(ms) for ms in args.rtt or ((50.0,) if args.quick else (20.0, 50.0, 100.0))]
    grid = _grid(args, "big", len(places) * len(args.drafters))
    with ends(args.drafters, args.target) as both:
        rows = grid.cells(both, places)
    _tell(report, f"target {args.target.name}", rows, model=True)
    markdown("model and clock", forecasts(rows))


def paced(args: argparse.Namespace, report: Report) -> None:
    """A replayed target at several paces; the drafters are real."""
    paces = [_pace(text) for text in args.pace or (PACES_MS[1:2] if args.quick else PACES_MS)]
    places = [
        Place.rtt(ms) for ms in args.rtt or ((50.0,) if args.quick else (5.0, 20.0, 50.0, 100.0))
    ]
    grid = _grid(args, "paced", len(paces) * len(places) * len(args.drafters))
    rows: Rows = []
    for temperature in args.temperature:
        with tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as name:
            recorded = save(Path(name) / "texts.npz", _recorded(args, grid, temperature))
            for pace in paces:
                info: dict[str, Any] = {"recording": recorded, "pace": pace}
                info["counts"] = Path(name) / "counts"
                at_pace = dataclasses.replace(
                    grid, temperatures=[temperature], about={"pace": str(pace)}
                )
                with ends(args.drafters, args.target, BenchEdge, **info) as both:
                    rows += at_pace.cells(both, places)
    _tell(report, "replayed target by pace", rows, extra=("pace",))


TABLES: dict[str, Callable[[argparse.Namespace, Report], None]] = {
    "rtt": rtt, "paced": paced, "links": links, "big": big,
}  # fmt: skip
OTHERS: dict[str, Callable[[Bench], Measured]] = {
    "own": own_figures, "first": first, "fleet": fleets, "hostile": hostile,
}  # fmt: skip


def _grid(args: argparse.Namespace, table: str, cells: int) -> Grid:
    wanted = questions(args.questions, args.prompts)
    steps = Steps(cells * len(wanted) * len(args.temperature))
    return Grid(
        table, wanted, args.tokens, args.temperature, args.windows, args.protocol,
        Texts(args.target), steps,
    )  # fmt: skip


def _recorded(args: argparse.Namespace, grid: Grid, temperature: float) -> Any:
    drafter = next(iter(args.drafters.values()))
    return record(drafter, args.target, grid.questions, args.tokens, temperature)


def _drafter(name: str) -> Path:
    return Path(name) if "/" in name or name == TEXT else default_artifact(name)


def _pace(text: str) -> Pace:
    """From "130+9": milliseconds of a pass, and of each row more."""
    base, _, slope = text.partition("+")
    return Pace(float(base) * 1e-3, float(slope or 0) * 1e-3)


def _tell(
    report: Report, title: str, rows: Rows, extra: tuple[str, ...] = (), **wanted: bool
) -> None:
    report.add(rows, goals(rows, **wanted))
    markdown(title, table_rows(rows, extra))


def markdown(title: str, rows: Rows) -> None:
    """A table on stdout."""
    if not rows:
        return
    print(f"\n**{title}**\n")
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    sys.stdout.flush()


def _arguments() -> argparse.Namespace:
    parser = options(__doc__)
    pair_options(parser)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help="(default: rtt)")
    numbers: dict[str, Any] = {"type": float, "nargs": "+", "metavar": "MS"}
    parser.add_argument("--rtt", **numbers, help="round trips of rtt, paced, big, own, fleet")
    parser.add_argument("--pace", nargs="+", metavar="MS[+MS]", help="of a replayed pass, by row")
    parser.add_argument(
        "--drafter",
        nargs="+",
        metavar="PRECISION|DIR[+text]|text",
        help="(default: int4 int8); +text: with --draft-text",
    )
    parser.add_argument("--temperature", type=float, nargs="+", choices=(0.0, 1.0), default=[0.0])
    parser.add_argument("--windows", type=int, nargs="+", metavar="γ", help="of stop-and-wait")
    parser.add_argument("--prompts", type=int, metavar="N", help="(default: 8; 2 with --quick)")
    parser.add_argument("--tokens", type=int, metavar="N", help="(default: 96; 32 with --quick)")
    parser.add_argument("--questions", type=Path, metavar="FILE", help='lines with a "question"')
    parser.add_argument("--traces", type=Path, metavar="DIR", help="of links")
    parser.add_argument("--devices", type=int, nargs="+", metavar="N", help="of fleet")
    parser.add_argument("--protocol", default="ahead", help="in the place of ahead (%(default)s)")
    args = parser.parse_args()
    unknown = set(args.tables) - {*TABLES, *OTHERS}
    if unknown:
        parser.error(f"there is no table {min(unknown)}: {', '.join([*TABLES, *OTHERS])}")
    args.prompts = args.prompts or (2 if args.quick else 8)
    args.tokens = args.tokens or (32 if args.quick else 96)
    args.windows = args.windows or ((2, 4, 8) if args.quick else WINDOWS)
    args.target = args.target or default_artifact("fp32")
    names = args.drafter or (["int4"] if args.quick else ["int4", "int8"])
    args.drafters = {Path(name).name: _drafter(name.removesuffix(AND_TEXT)) for name in names}
    if args.draft:
        args.drafters = {args.draft.name: args.draft}
    return args


def main() -> int:
    args = _arguments()
    report = Report()
    for name in args.tables or ["rtt"]:
        if name in TABLES:
            TABLES[name](args, report)
            continue
        title, rows, for_people, wanted = OTHERS[name](Bench(args))
        report.add(rows, wanted)
        markdown(title, for_people)
    machine = args.company.report()
    print()
    for goal in report.goals:
        mark = "met   " if goal["met"] else "MISSED"
        print(f"{mark} {goal['name']} {goal['goal']:g}: {goal['value']:g}")
    print(in_words(machine))
    if args.json:
        write_json(args.json, {"rows": report.rows, "goals": report.goals, "machine": machine})
    return 0


if __name__ == "__main__":
    sys.exit(main())
