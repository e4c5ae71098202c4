"""Define options that several commands share, with the same help everywhere."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from msgspec import Meta

from pilotfish.base.files import write_output
from pilotfish.base.settings import Setting, setting
from pilotfish.cli.flags import add_flag, bounded

_WRONG_USAGE = 2  # exit code, as in argparse

_Parser = TypeVar("_Parser", bound=argparse.ArgumentParser)
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def choices_of(parser: argparse.ArgumentParser, what: str = "action") -> Commands:
    """Add commands or actions to a parser; return argparse's object that makes their parsers."""
    return choices_as(argparse.ArgumentParser, parser, what)


def choices_as(
    parser_class: type[_Parser], parser: argparse.ArgumentParser, what: str = "action"
) -> "argparse._SubParsersAction[_Parser]":
    """Add actions, with parsers of this class, to a parser; see `choices_of`.

    Without an action, the command prints its help instead of an error.
    """

    def show_help(_: argparse.Namespace) -> int:
        parser.print_help()
        return _WRONG_USAGE

    parser.set_defaults(run=show_help)
    return parser.add_subparsers(title=f"{what}s", metavar=what.upper(), parser_class=parser_class)


def int_between(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """Return an argparse type: a whole number within these bounds."""
    return bounded(int, Meta(ge=low, le=high))


positive = bounded(float, Meta(gt=0))  # an argparse type: a number above 0


def keys_option(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--keys [DIR]``. Without the flag: no keys; flag without DIR: the default folder."""
    add_flag(parser, Setting("keys", Path, None, setting(what, form="keys", metavar="DIR")))


def json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json PATH``."""
    parser.add_argument(
        "--json", metavar="PATH", help="write the results as JSON to PATH ('-' for stdout)"
    )


def write_json(path: str, value: Any) -> None:
    """Write results to the path of ``--json``."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        write_output(Path(path), text.encode())
