"""The ``pilotfish`` command: parse, run one subcommand, turn typed errors into one line."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from pilotfish import wire
from pilotfish.engines.errors import EngineError
from pilotfish.wire.errors import BusyError, PilotfishError
from pilotfish.wire.prose import one_line
from pilotfish.wire.shortage import shortage

# each is a module of that name here
_COMMANDS = (
    *("demo", "device", "edge", "probe", "field", "judge", "distill", "emulate", "export"),
    *("bundle", "flash", "keys", "reload", "selftest"),
)
_PACKAGES = ("field", "judge")  # with a module for each action
_IO_ERROR = 74
_INTERRUPTED = 130

_EXAMPLES = """\
first steps:
  pilotfish demo                              both ends on this machine, nothing to prepare
  pilotfish export model default --out drafter --precision int4
  pilotfish export model default --out target
  pilotfish keys new edge; pilotfish keys new device; pilotfish keys allow device
  pilotfish edge serve --target target --keys
  pilotfish device run --draft drafter --edge tcp://127.0.0.1:7077 --keys "Why is the sky blue?"

exit codes: 0 done; 2 wrong usage; 64-78 as in sysexits.h (69 no edge, 75 edge full, 77 no access);
130 interrupted.
"""


def parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The command line: what these arguments may mean, or all of it.

    A daemon that starts again is waited for, so no command imports what others need.
    """
    top = argparse.ArgumentParser(
        prog="pilotfish",
        description="Speculative decoding across a link: a drafter here, a target on the edge.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=wire.SOFTWARE)
    top.add_argument("-v", "--verbose", action="store_true", help="log what happens, to stderr")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in named(_COMMANDS, arguments):
        told = (arguments,) if name in _PACKAGES else ()
        import_module(f"pilotfish.cli.{name}").add_to(commands, *told)
    return top


def named(names: Sequence[str], arguments: Sequence[str]) -> Sequence[str]:
    """Return the names that the arguments hold; all names if they hold no name."""
    return [name for name in names if name in arguments] or names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        args = parser(words).parse_args(words)
        logging.basicConfig(
            level=logging.INFO if args.verbose else logging.WARNING,
            format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            stream=sys.stderr,
        )
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except EngineError as error:  # it may quote a file that came from elsewhere, or a library
        print(f"pilotfish: {one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except PilotfishError as error:
        print(f"pilotfish: {error}", file=sys.stderr)
        return error.exit_code
    except (KeyboardInterrupt, ImportError) as error:
        # a module in C that is interrupted while it is imported makes an ImportError of it
        if not isinstance(error.__cause__ or error, KeyboardInterrupt):
            raise
        print("pilotfish: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, MemoryError, RuntimeError) as error:
        # a file that was named cannot be written, a disk is full, no thread can be started
        short, of_a_file = shortage(error), isinstance(error, OSError)
        if not (short or of_a_file):
            raise
        lacking = f"this machine has no {short} left for it: " if short else ""
        print(f"pilotfish: {lacking}{error}", file=sys.stderr)
        return _IO_ERROR if of_a_file else BusyError.exit_code
