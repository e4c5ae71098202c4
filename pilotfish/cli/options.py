"""Options that several commands share, so that they read the same everywhere."""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from wire.keys import default_directory
from wire.protocols import NAMES

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def between(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """An argparse type: a whole number within these bounds."""

    def number(text: str) -> int:
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return number


def positive(text: str) -> float:
    """An argparse type: a number above 0."""
    value = float(text)
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def keys_option(parser: argparse.ArgumentParser, what: str) -> None:
    """``--keys [DIR]``: absent means no keys, bare means the default folder."""
    parser.add_argument(
        "--keys",
        type=Path,
        nargs="?",
        const=default_directory(),
        metavar="DIR",
        help=f"{what}; without DIR: $PILOTFISH_KEYS or {default_directory()}",
    )


def json_option(parser: argparse.ArgumentParser) -> None:
    """``--json PATH``."""
    parser.add_argument(
        "--json", metavar="PATH", help="write the figures as JSON to PATH ('-' for stdout)"
    )


def engine_options(parser: argparse.ArgumentParser) -> None:
    """How a model is run."""
    parser.add_argument("--provider", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument(
        "--threads", type=between(1), metavar="N", help="CPU threads (default: all cores)"
    )


def generation_options(parser: argparse.ArgumentParser, *, protocol: str, tokens: int) -> None:
    """How to generate."""
    parser.add_argument(
        "--protocol", choices=NAMES, default=protocol, help="how a round is carried (%(default)s)"
    )
    parser.add_argument(
        "--window", type=int, default=4, metavar="N", help="draft tokens a round (%(default)s)"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=tokens, metavar="N", help="tokens at most (%(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="0: all tokens (default)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="nucleus mass; 1: all (default)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="makes a sampled run repeatable")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end there; may be repeated"
    )


def write_json(path: str, value: Any) -> None:
    """Write figures where ``--json`` says."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
