"""``pilotfish field paper``: a paper's closed forms and its figures as measured here."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.progress import ProgressDisplay
from pilotfish.cli.default_models import DEFAULT, drafter_folder, target_folder
from pilotfish.cli.export import default_artifact
from pilotfish.cli.field.paper_judge import SweepJudge
from pilotfish.cli.options import Commands, int_between, json_option, write_json
from pilotfish.lab.field.papers import PAPERS
from pilotfish.lab.field.papers.figure import Bench, Figure, default_prompts
from pilotfish.lab.field.papers.figure_file import FigureFile, shipped_figure
from pilotfish.lab.field.papers.figure_run import measure_figure, measured_before
from pilotfish.lab.field.papers.paper import Paper
from pilotfish.lab.field.papers.sheet import Sheet
from pilotfish.lab.pairs import OpenPair
from pilotfish.lab.prompts import read_prompts

_EXAMPLE = """\
example:
  pilotfish field paper dssd --out plots      tables here, pictures in plots/
  pilotfish field paper tslt --json -         every table as JSON, and nothing else
  pilotfish field paper tslt figure3          only this figure
  pilotfish field paper tslt figure4 --run    measure it on this machine, beside the printed one

FIGURE stands right after PAPER, before the options or after all of them.
"""
_CUT_TO = 27  # layers of the second default worker, of 30
_RUN_ONLY = ("draft", "target", "head", "worker", "prompts", "seed", "threads", "save")


def add_to(actions: Commands) -> None:
    """Register the action."""
    paper = actions.add_parser(
        "paper",
        help="show a paper's closed forms, and measure its figures",
        description="Evaluates a paper's equations for its own parameters, and compares them with\n"
        "the numbers that the paper prints. Each constant is marked as the paper's, or as ours if\n"
        "the paper has none. Shows the measured figures that the package ships beside the printed\n"
        "numbers; --run measures figures on this machine.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    paper.add_argument("paper", choices=PAPERS, metavar="PAPER", help=", ".join(PAPERS))
    paper.add_argument(
        "figure", nargs="?", metavar="FIGURE", help="only this figure or table (default: all)"
    )
    paper.add_argument(
        "--out", type=Path, metavar="DIR", help="draw into DIR (extra 'field': needs matplotlib)"
    )
    json_option(paper)
    _add_measuring(paper)
    paper.set_defaults(run=_run)


def _add_measuring(paper: argparse.ArgumentParser) -> None:
    group = paper.add_argument_group("measuring")
    group.add_argument(
        "--run",
        action="store_true",
        dest="measures",
        help="measure FIGURE (default: each one in turn that this version did not measure with "
        "this pair); after an interruption, the same command continues",
    )
    note = "(default: the one of `pilotfish demo`; wisv: of `pilotfish demo wisv`)"
    group.add_argument("--draft", type=Path, metavar="MODEL", help=f"the drafter {note}")
    group.add_argument("--target", type=Path, metavar="MODEL", help=f"the target {note}")
    group.add_argument(
        "--head", metavar="NAME", help="wisv: the decision head of the pair (default: the shipped)"
    )
    group.add_argument(
        "--worker",
        type=Path,
        action="append",
        metavar="MODEL",
        help="specfed: the second worker, beside the target; may be repeated, each "
        "is an experiment of its own (default: the default model in int8, with all of its layers "
        f"and with the first {_CUT_TO})",
    )
    group.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="prompts, one per line, or JSON lines with 'prompt' or 'question' "
        f"(default: {len(default_prompts())} built-in prompts; wisv has its own questions)",
    )
    group.add_argument(
        "--seed", type=int_between(0), metavar="N", help="seed of the first prompt (default: 0)"
    )
    group.add_argument(
        "--threads", type=int_between(1), metavar="N", help="CPU threads (default: one per core)"
    )
    group.add_argument(
        "--save",
        type=Path,
        metavar="DIR",
        help="folder for the measured rows, a file for each figure (default: this folder)",
    )


def _run(args: argparse.Namespace) -> int:
    paper = PAPERS[args.paper]
    figures = _chosen(args, paper)
    if args.measures:
        _expect_fitting_options(args, paper)
        results = _measure(args, paper, figures)
    else:
        _expect_no_measuring(args)
        results = {figure.key: shipped_figure(args.paper, figure.key) for figure in figures}
    measured = [_comparison(args.paper, figure, results[figure.key]) for figure in figures]
    closed = [] if args.measures else [s for s in paper.sheets() if args.figure in (None, s.key)]
    if args.json:
        write_json(args.json, _as_json(paper, [*closed, *measured], results))
    whole = args.figure is None and not args.measures
    if args.json != "-":
        _show(paper, [*closed, *measured], whole=whole)
    if args.out:
        notes = Console(stderr=True, highlight=False)
        args.out.mkdir(parents=True, exist_ok=True)
        closed_pictures = paper.draw(args.out) if whole else ()
        for picture in (*closed_pictures, *_draw(figures, results, args.out)):
            notes.print(f"drawn: {picture}", soft_wrap=True, markup=False)
    return 0


def _chosen(args: argparse.Namespace, paper: Paper) -> Sequence[Figure]:
    """Return the measurable figures that the command is about.

    Raises `UnsupportedError`, which lists the figures, if FIGURE is not one of them.
    """
    measurable = [figure.key for figure in paper.measurable]
    computed = [] if args.measures else [sheet.key for sheet in paper.sheets()]
    known = list(dict.fromkeys([*computed, *measurable]))
    if args.figure is not None and args.figure not in known:
        kind = "measurable figure" if args.measures else "figure"
        raise UnsupportedError(
            f"{args.paper} has no {kind} {args.figure!r}, but {', '.join(known) or 'none'}."
        )
    if args.measures and not measurable:
        raise UnsupportedError(f"No figure of {args.paper} can be measured.")
    return [figure for figure in paper.measurable if args.figure in (None, figure.key)]


def _expect_no_measuring(args: argparse.Namespace) -> None:
    for name in _RUN_ONLY:
        if getattr(args, name) is not None:
            raise UnsupportedError(f"--{name} can only be used with --run.")


def _expect_fitting_options(args: argparse.Namespace, paper: Paper) -> None:
    """Raise `UnsupportedError` if an option is for the measurements of other papers."""
    if args.worker is not None and args.paper != "specfed":
        raise UnsupportedError("--worker names a worker of a federation, as specfed measures it.")
    if args.head is not None and paper.head is None:
        raise UnsupportedError("--head names a decision head, as wisv measures it.")
    if args.prompts is not None and paper.head is not None:
        raise UnsupportedError(
            f"{args.paper} counts right answers to questions of the task facts, so it takes no "
            f"--prompts: `pilotfish judge sweep` measures a head on your own questions."
        )


def _measure(
    args: argparse.Namespace, paper: Paper, figures: Sequence[Figure]
) -> dict[str, FigureFile | None]:
    """Measure the figures on this machine; return them by key."""
    draft = drafter_folder(args.draft or Path(paper.drafter))
    target = target_folder(args.target or Path(DEFAULT))
    seed = args.seed or 0
    judge = None if paper.head is None else SweepJudge(args.head or paper.head, seed)
    prompts = default_prompts() if judge is None else judge.prompts
    if args.prompts is not None:
        prompts = read_prompts(args.prompts)
    results: dict[str, FigureFile | None] = {}
    for figure in figures:
        with ProgressDisplay() as display:
            display.print_above(f"{figure.title}: about {figure.minutes:.0f} min on two cores")
            bench = Bench(
                pair=OpenPair(draft, target),
                prompts=prompts,
                seed=seed,
                threads=args.threads,
                report=display.show,
                workers=lambda: [*map(target_folder, args.worker or ())] or _default_workers(),
                judge=judge,
            )
            place = args.paper, figure, bench, args.save or Path(), _command(args, figure)
            before = measured_before(*place) if args.figure is None else None
            if before is not None:
                display.print_above("measured already, by the same version with the same pair")
            results[figure.key] = before or measure_figure(*place)
    return results


def _draw(
    figures: Sequence[Figure], results: dict[str, FigureFile | None], folder: Path
) -> Iterator[Path]:
    """Draw the measured figures; yield the pictures' paths."""
    for figure in figures:
        result = results[figure.key]
        if figure.draw is not None and result is not None:
            yield from figure.draw(result.rows, folder)


def _default_workers() -> list[Path]:
    """Return a worker that hardly differs from the default target, and one that differs much."""
    return [default_artifact("int8"), default_artifact("int8", _CUT_TO)]


def _command(args: argparse.Namespace, figure: Figure) -> str:
    """Return the command that repeats the measurement, with the names of files and no folders."""
    words = ["pilotfish", "field", "paper", args.paper, figure.key, "--run"]
    for name in ("draft", "target", "prompts"):
        if (path := getattr(args, name)) is not None:
            words += [f"--{name}", path.name]
    if args.head is not None:
        words += ["--head", Path(args.head).name]
    for worker in args.worker or ():
        words += ["--worker", worker.name]
    for name in ("seed", "threads"):
        if (value := getattr(args, name)) is not None:
            words += [f"--{name}", str(value)]
    return " ".join(words)


def _comparison(paper: str, figure: Figure, result: FigureFile | None) -> Sheet:
    """Make the table of a figure's measured rows beside the printed ones."""
    if result is None:
        source = f"Not measured yet: run `pilotfish field paper {paper} {figure.key} --run`."
        return figure.comparison([], source)
    source, prompts = result.facts.sentences(), result.facts.prompts
    used = max((int(str(row["n"])) for row in result.rows), default=prompts)
    if used < prompts:
        source += f" The rows are of the first {used} prompts."
    return figure.comparison(result.rows, source)


def _as_json(
    paper: Paper, sheets: Sequence[Sheet], results: dict[str, FigureFile | None]
) -> dict[str, Any]:
    """Return constants, tables, remarks, and the facts of each measured figure.

    A table's rows are under its key.
    """
    tables = {sheet.key: [dict(row) for row in sheet.rows] for sheet in sheets}
    facts = {key: result.facts for key, result in results.items() if result is not None}
    return {
        "paper": paper.title,
        "constants": [asdict(constant) for constant in paper.constants],
        **tables,
        "measurements": msgspec.to_builtins(facts),
        "remarks": list(paper.remarks),
    }


def _show(paper: Paper, sheets: Sequence[Sheet], *, whole: bool) -> None:
    """Print the tables; whole: also the constants and the remarks."""
    screen = Console(highlight=False)
    screen.print(f"[bold]{paper.title}[/bold]\n")
    for sheet in (*([paper.constants_sheet()] if whole else []), *sheets):
        screen.print(f"[bold]{sheet.title}[/bold]")
        sheet.print(screen)
        if sheet.note:
            screen.print(sheet.note, end="\n\n", markup=False)
    for remark in paper.remarks if whole else ():
        screen.print(f"• {remark}", markup=False)
