"""What the benchmarks share: their options, the default pair, keys for a run, figures and goals.

Every benchmark takes ``--json PATH`` and ``--quick``, shows progress on stderr and its table on
stdout. The JSON is an object with ``rows`` (what was measured), ``goals`` (what it should be) and
``machine`` (how busy it was with something else, before and meanwhile; see `_company`).
"""

import argparse
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

from _company import Company, in_words
from rich.console import Console
from rich.table import Table

from pilotfish.cli.export import default_pair
from pilotfish.cli.options import json_option, write_json
from pilotfish.wire import keys

# A benchmark is run by its path, so Python does not search the folder above for `tests.support`.
sys.path.append(str(Path(__file__).parents[1]))

Rows = list[dict[str, Any]]

# What drafter and target are asked about. The answers differ in how well a small model drafts them.
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "List ten countries of Europe and their capitals.",
    "Tell me a short story about a fish that swims ahead of a shark.",
    "What is the difference between a process and a thread?",
    "Give me a recipe for pancakes, step by step.",
    "Summarise the causes of the First World War.",
    "Translate 'good morning, how are you?' into French, German and Spanish.",
)


class Goal(TypedDict):
    """One promise: ``met`` tells whether ``value`` keeps to ``goal``."""

    name: str
    value: float
    goal: float
    met: bool


def at_most(name: str, value: float, limit: float) -> Goal:
    """A goal that smaller values meet."""
    return Goal(name=f"{name}, at most", value=round(value, 4), goal=limit, met=value <= limit)


def at_least(name: str, value: float, limit: float) -> Goal:
    """A goal that larger values meet."""
    return Goal(name=f"{name}, at least", value=round(value, 4), goal=limit, met=value >= limit)


def options(description: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    json_option(parser)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, rougher figures")
    parser.set_defaults(company=Company())
    return parser


def pair_options(parser: argparse.ArgumentParser) -> None:
    """``--draft`` and ``--target``; `pair` gives their paths."""
    note = "(default: the one of `pilotfish demo`, exported on first use)"
    parser.add_argument("--draft", type=Path, metavar="DIR", help=f"the drafter's artifact {note}")
    parser.add_argument("--target", type=Path, metavar="DIR", help=f"the target's artifact {note}")


def pair(args: argparse.Namespace) -> tuple[Path, Path]:
    """The artifacts of drafter and target."""
    if args.draft is not None and args.target is not None:
        return args.draft, args.target
    drafter, target = default_pair()
    return args.draft or drafter, args.target or target


@contextmanager
def throwaway_keys() -> Iterator[Path]:
    """A folder with the keys of an edge and of one device that it lets in."""
    with tempfile.TemporaryDirectory(prefix="pilotfish-bench-") as name:
        folder = Path(name)
        keys.create(folder, keys.EDGE)
        keys.allow(folder, keys.create(folder, keys.DEVICE))
        yield folder


class Steps:
    """Says on stderr how far a long run is."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._alone = sys.stderr.isatty()

    def next(self, what: str) -> None:
        """The next of the steps begins."""
        self._done += 1
        line = f"[{self._done}/{self._total}] {what}"
        print(f"\r\x1b[K{line}" if self._alone else line, end="", file=sys.stderr)
        print(end="" if self._alone and self._done < self._total else "\n", file=sys.stderr)


def conclude(
    args: argparse.Namespace,
    title: str,
    columns: Sequence[str],
    rows: Rows,
    goals: list[Goal],
    table: Rows | None = None,
) -> int:
    """Show the columns of the rows, and the goals; write JSON if asked. Returns the exit code.

    Beside other work all of it is marked; what is missed there is missed, but proves less.
    shown: of the rows, where others were shown before.
    """
    show(args, title, columns, rows if table is None else table)
    console = _console(args)
    machine = args.company.report()
    neighbour = " [yellow](beside other work)[/]" if machine["beside_other_work"] else ""
    for goal in goals:
        mark = "[green]met   [/]" if goal["met"] else "[red]MISSED[/]"
        console.print(f"{mark} {goal['name']} {goal['goal']:g}: {goal['value']:g}{neighbour}")
    if neighbour:
        console.print(f"[yellow]{in_words(machine)}[/]")
    if args.json:
        write_json(args.json, {"rows": rows, "goals": goals, "machine": machine})
    return 0


def show(args: argparse.Namespace, title: str, columns: Sequence[str], rows: Rows) -> None:
    """Show the columns of the rows."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    _console(args).print(table)


def _console(args: argparse.Namespace) -> Console:
    # a line that the terminal wraps still tells its figures; a column cut to one letter does not
    return Console(stderr=args.json == "-", width=max(shutil.get_terminal_size().columns, 160))


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def free_port() -> int:
    """Find a port of this machine without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
