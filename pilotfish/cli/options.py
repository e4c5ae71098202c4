"""Options that several commands share, so that they read the same everywhere."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from msgspec import Meta

from pilotfish.cli.flags import add_flag, add_flags, bounded
from pilotfish.engines.settings import EngineSettings
from pilotfish.wire.settings import Setting, setting

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def between(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """An argparse type: a whole number within these bounds."""
    return bounded(int, Meta(ge=low, le=high))


positive = bounded(float, Meta(gt=0))  # argparse types: a number above 0,
share = bounded(float, Meta(ge=0, le=1))  # and one from 0 to 1


def keys_option(parser: argparse.ArgumentParser, what: str) -> None:
    """``--keys [DIR]``: absent means no keys, bare means the default folder."""
    add_flag(parser, Setting("keys", Path, None, setting(what, form="keys", metavar="DIR")))


def json_option(parser: argparse.ArgumentParser) -> None:
    """``--json PATH``."""
    parser.add_argument(
        "--json", metavar="PATH", help="write the figures as JSON to PATH ('-' for stdout)"
    )


def engine_options(parser: argparse.ArgumentParser) -> None:
    """How a model is run."""
    add_flags(parser, EngineSettings)


def write_json(path: str, value: Any) -> None:
    """Write figures where ``--json`` says."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")
