"""``pilotfish selftest``: compare every provider of this machine with the CPU."""

import argparse
from importlib import import_module
from pathlib import Path

import msgspec
from rich.console import Console

from pilotfish.base.progress import ProgressDisplay
from pilotfish.cli.extras import export_tools
from pilotfish.cli.options import Commands, positive, write_json

_FILE = "pilotfish-selftest.json"
_DESCRIPTION = f"""\
Compares every available provider (ONNX Runtime on the CPU and on CUDA, TensorRT, ONNX Runtime's
TensorRT) with the plainest use of the CPU, on the default model and on tiny models with random
weights, one for each kind of attention.

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

The results go to {_FILE} unless --json or --out is given. Please send us that
file, above all from a GPU or a board. Needs an ONNX Runtime (the extra 'cpu' or 'gpu') and the
extra 'export'."""
_EPILOG = """\
examples:
  pilotfish selftest                          all available providers, in less than ten minutes
  pilotfish selftest --quick                  only tiny models: at most a minute on a CPU
  pilotfish selftest --provider tensorrt --minutes 30
  pilotfish selftest --json | jq .passed

exit codes: 0 nothing differs; 1 something differs or failed; 69 a named provider is not available;
74 a file that cannot be written; 130 interrupted.
"""
_DIFFERS, _ABSENT = 1, 69


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
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    with export_tools():
        import_module("pilotfish.export.model")  # a missing extra fails now, not after a minute
    from pilotfish.engines.backends import PROVIDERS
    from pilotfish.lab.selftest.providers import ORDER
    from pilotfish.lab.selftest.running import Runner
    from pilotfish.lab.selftest.selftest_page import show

    assert set(ORDER) == set(PROVIDERS)
    out = args.out or (None if args.json else Path(_FILE))
    if out is not None:
        out.open("a").close()  # an unwritable file shows now, not after the checks
    wanted = [name for name in ORDER if not args.provider or name in args.provider]
    with ProgressDisplay() as display:
        completed = Runner(display.show, minutes=args.minutes, quick=args.quick).run(wanted)
    figures = msgspec.to_builtins(completed)
    if out is not None:
        write_json(str(out), figures)
    if args.json:
        write_json("-", figures)
    else:
        show(completed, Console(highlight=False), str(out))
    if not completed.passed:
        return _DIFFERS
    absent = [name for name in wanted if not completed.providers[name].there]
    return _ABSENT if args.provider and absent else 0
