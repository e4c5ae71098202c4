"""``pilotfish selftest``: compare every provider of this machine with the CPU."""

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from pilotfish.base.errors import ConfigError
from pilotfish.base.progress import ProgressDisplay
from pilotfish.base.reading import read_content, reading_file
from pilotfish.cli.doctor import diagnose_this_machine
from pilotfish.cli.extras import export_tools
from pilotfish.cli.options import Commands, positive, write_json
from pilotfish.lab.doctor.doctor_page import count, show_findings
from pilotfish.lab.doctor.sharing import shared_block

_FILE = "pilotfish-selftest.json"
_DESCRIPTION = f"""\
Begins with the findings of `pilotfish doctor`. Then compares every available provider (ONNX Runtime
on the CPU and on CUDA, TensorRT, ONNX Runtime's TensorRT) with the plainest use of the CPU, on the
default model and on tiny models with random weights, one for each kind of attention.

  logits     logits and hidden states of a text in an empty slot
  chain      a text that several passes read in short and long pieces
  tree       a tree of drafts, and the same tree after more nodes were added
  rollback   another text after a shared prefix
  keep       the accepted path of a tree, and the tokens that follow it
  slots      passes over several sequences of different lengths
  growth     a text so long that keys and values move into larger buffers
  stages     a model that was cut into three stages
  greedy, coupled, ahead   whether both ends over loopback write the same tokens as stream

Then times passes of 1, 4, 8 and 16 tokens. A check passes, differs (by how much, and where), fails
(with the error; also if its process crashed or hung), or is left out. TensorRT builds an engine of
each model, which takes most of the time; the cache keeps them.

The results go to {_FILE} unless --json, --share or --out is given. Please send
us what --share prints, above all from a GPU or a board: one block for an issue, with the doctor's
findings, and without names, paths, addresses, keys and serial numbers. Needs an ONNX Runtime (the
extra 'cpu' or 'gpu') and the extra 'export'."""
_EPILOG = f"""\
examples:
  pilotfish selftest                          all available providers, in less than ten minutes
  pilotfish selftest --quick                  only tiny models: at most a minute on a CPU
  pilotfish selftest --provider tensorrt --minutes 30
  pilotfish selftest --json | jq .passed
  pilotfish selftest --share > block.md       runs it, and prints the block to send
  pilotfish selftest --share {_FILE}   prints the block of earlier results

exit codes: 0 nothing differs; 1 something differs or failed; 69 a named provider is not available;
74 a file that cannot be written; 78 a file of --share without results; 130 interrupted.
"""
_DIFFERS, _ABSENT = 1, 69
_NOW = Path("-")  # --share without a file: of the results of this run


def add_to(commands: Commands) -> None:
    """Register the command."""
    from pilotfish.engines.backends import PROVIDERS

    parser = commands.add_parser(
        "selftest",
        help="compare every provider of this machine with the CPU",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--provider",
        action="append",
        choices=tuple(PROVIDERS),
        help="check this provider; may be repeated (default: all available ones)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny models only, without the default model"
    )
    parser.add_argument(
        "--minutes",
        type=positive,
        default=10.0,
        metavar="M",
        help="time limit: leave out checks that have not begun by then (%(default)g)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the results as JSON instead of the page"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"write the results as JSON to this file (default without --json: {_FILE})",
    )
    parser.add_argument(
        "--share",
        type=Path,
        nargs="?",
        const=_NOW,
        metavar="FILE",
        help="print one block that fits into an issue, instead of the page; with FILE: of earlier "
        "results, without running anything",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.share is not None and args.share != _NOW:
        print(_block_of(args.share), end="")
        return 0
    with export_tools():
        import_module("pilotfish.export.model")  # a missing extra fails now, not after a minute
    from pilotfish.engines.backends import PROVIDERS
    from pilotfish.lab.selftest.providers import ORDER
    from pilotfish.lab.selftest.running import Runner
    from pilotfish.lab.selftest.selftest_page import show

    assert set(ORDER) == set(PROVIDERS)
    out = args.out or (None if args.json or args.share else Path(_FILE))
    if out is not None:
        out.open("a").close()  # an unwritable file shows now, not after the checks
    quiet = args.json or args.share is not None
    doctor = _examine(quiet=quiet)
    wanted = [name for name in ORDER if not args.provider or name in args.provider]
    with ProgressDisplay() as display:
        completed = Runner(display.show, minutes=args.minutes, quick=args.quick).run(wanted)
    completed.doctor = doctor
    figures = msgspec.to_builtins(completed)
    if out is not None:
        write_json(str(out), figures)
    if args.json:
        write_json("-", figures)
    elif args.share:
        print(_block(figures), end="")
    else:
        show(completed, Console(highlight=False), str(out))
    if not completed.passed:
        return _DIFFERS
    absent = [name for name in wanted if not completed.providers[name].there]
    return _ABSENT if args.provider and absent else 0


def _examine(*, quiet: bool) -> dict[str, Any]:
    """Let the doctor examine this machine; print its findings unless ``quiet``."""
    examination = diagnose_this_machine().examination
    if not quiet:
        console = Console(highlight=False)
        console.print(f"doctor: {count(examination)}", style="bold")
        show_findings(examination.findings, console)
        console.print()
    figures: dict[str, Any] = msgspec.to_builtins(examination)
    return figures


def _block_of(path: Path) -> str:
    """Return the block of an earlier self-test's results."""
    with reading_file(lambda problem: ConfigError(f"{path} has no results: {problem}.")):
        figures: dict[str, Any] = msgspec.json.decode(read_content(path), type=dict[str, Any])
        if "findings" not in figures or "machine" not in figures:
            raise ConfigError(f"{path} has no results of `pilotfish selftest`.")
        return _block(figures)


def _block(figures: dict[str, Any]) -> str:
    verdict = "nothing differs" if figures.get("passed") else "something differs"
    return shared_block(figures, f"pilotfish selftest: {verdict}")
