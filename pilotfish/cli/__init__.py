"""The ``pilotfish`` command: parse arguments, run a subcommand, print typed errors as one line."""

import argparse
import errno
import sys
from collections.abc import Sequence
from importlib import import_module

from pilotfish.base.errors import SIGHUP_CODE, SIGINT_CODE, BusyError, PilotfishError
from pilotfish.base.prose import one_line
from pilotfish.base.shortage import shortage
from pilotfish.base.terminal import Terminal
from pilotfish.base.version import SOFTWARE
from pilotfish.cli import logs
from pilotfish.cli.options import choices_of
from pilotfish.cli.streams import abandon_unread, complain, repair
from pilotfish.engines.engine_errors import EngineError

# commands; each name is a module of this package
_COMMANDS = (
    *("up", "chat", "demo", "device", "edge", "probe", "field", "judge", "distill", "emulate"),
    *("export", "models", "bundle", "flash", "keys", "reload", "doctor", "selftest"),
    "dashboards",
)
_PACKAGES = ("field", "judge")  # commands that are packages, with a module for each action
_IO_ERROR = 74

_EXAMPLES = """\
first steps, with nothing to prepare:
  pilotfish up                                both ends here, with a chat page and OpenAI's API
  pilotfish chat                              a chat in this terminal
  pilotfish demo                              several protocols, compared in a table

two machines:
  pilotfish edge up                           on the server: prints a line for the device
  pilotfish device up LINE                    on the device: that line

exit codes: 0 done; 2 wrong usage; 64-78 as in sysexits.h (69 no edge, 75 edge full, 77 no access);
130 interrupted.
"""


def parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the commands that the arguments name, or of all commands.

    Only these commands are imported, since a daemon must start quickly.
    """
    top = argparse.ArgumentParser(
        prog="pilotfish",
        description="Speculative decoding across a link: a drafter here, a target on the edge.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=SOFTWARE)
    top.add_argument("-v", "--verbose", action="store_true", help="log what happens, to stderr")
    commands = choices_of(top, "command")
    for name in named_in(_COMMANDS, arguments):
        package_arguments = (arguments,) if name in _PACKAGES else ()
        import_module(f"pilotfish.cli.{name}").add_to(commands, *package_arguments)
    return top


def named_in(names: Sequence[str], arguments: Sequence[str]) -> Sequence[str]:
    """Return those names that occur among the arguments, or all names if none occurs."""
    return [name for name in names if name in arguments] or names


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    repair()
    terminal = Terminal()
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except EngineError as error:  # one line: the message may quote a file or a library
        complain(one_line(str(error)))
        return error.exit_code
    except PilotfishError as error:
        complain(str(error))
        return error.exit_code
    except (KeyboardInterrupt, ImportError) as error:
        # a C module raises an ImportError if it is interrupted during its import
        if not isinstance(error.__cause__ or error, KeyboardInterrupt):
            raise
        complain("interrupted")
        return SIGINT_CODE
    except BrokenPipeError:  # the reader of stdout has closed it
        abandon_unread()
        return 0
    except (OSError, MemoryError, RuntimeError) as error:
        return _failed(error, terminal)


def _failed(error: OSError | MemoryError | RuntimeError, terminal: Terminal) -> int:
    """Report a failed file operation, or that memory or threads ran out; return the exit code.

    terminal: that of the command; its end is no failure. Raises any other error again.
    """
    if isinstance(error, OSError) and error.errno == errno.EIO and terminal.closed:
        abandon_unread()
        return SIGHUP_CODE  # as SIGHUP, which comes a moment later
    short = shortage(error)
    lacking = "" if short is None else f"this machine has no {short} left for this command:  "
    if isinstance(error, OSError):
        named = error.filename is not None and error.strerror
        complain(lacking + (f"{error.filename}: {error.strerror}" if named else str(error)))
        return _IO_ERROR
    if short is None:
        raise error
    complain(f"{lacking}{error}")
    return BusyError.exit_code


def _run(words: Sequence[str]) -> int:
    try:
        args = parser(words).parse_args(words)
        logs.set_up(verbose=args.verbose)
        code: int = args.run(args)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # rich turns a closed pipe into SystemExit
            raise end.__context__ from None
        sys.stdout.flush()  # raises BrokenPipeError if the help's reader has closed the pipe
        raise
    return code
