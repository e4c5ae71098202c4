"""``pilotfish chat``: a conversation in the terminal, with both ends here or with an edge."""

import argparse
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

from msgspec import Struct, structs

from pilotfish.base.errors import InterruptedGenerationError, PilotfishError, UnsupportedError
from pilotfish.base.progress import FETCHING, ProgressDisplay
from pilotfish.base.prose import one_line
from pilotfish.base.settings import setting
from pilotfish.cli.default_models import DEFAULT, drafter_folder
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.generation import generation_of, generation_options
from pilotfish.cli.line_reader import LineReader
from pilotfish.cli.local_edge import both_ends, target_option
from pilotfish.cli.options import Commands
from pilotfish.cli.screen import AnswerScreen
from pilotfish.cli.streams import complain
from pilotfish.cli.summary import report, summary
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.device_config import DeviceConfig
from pilotfish.device_runtime.link.link_group import LINK_LOG
from pilotfish.engines.engine_errors import EngineError
from pilotfish.wire.protocols import LOCAL, names
from pilotfish.wire.request import AUTO, Request

_DESCRIPTION = """\
A chat in the terminal. Without --edge, the command runs an edge on this machine, too, and fetches
and exports the default model on its first start. The conversation continues when the link breaks:
the drafter answers alone, in another colour, until the edge is back (--on-link-loss).

Ctrl-C interrupts an answer, Ctrl-D ends the chat, the arrow keys bring back earlier lines. If stdin
is a pipe, each line is a message; the answers go to stdout, everything else to stderr.
"""
_EXAMPLE = """\
examples:
  pilotfish chat                                                 both ends on this machine
  pilotfish chat --draft drafter --edge tcp://edge:7077 --keys
  echo "Why is the sky blue?" | pilotfish chat --max-tokens 64
"""
_COMMANDS = """\
/new              begin a new conversation
/protocol [NAME]  show or choose the protocol of the next answers
/stats            statistics of the last answer
/help             this list
Ctrl-C interrupts an answer; Ctrl-D ends the chat."""
_HISTORY = "chat_history"  # name of the file of earlier lines


class ChatSettings(Struct, frozen=True, kw_only=True):
    """Settings of ``pilotfish chat`` that no other command has."""

    system: Annotated[
        str, setting("instructions for the model, before the first message", metavar="TEXT")
    ] = ""


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "chat",
        help="chat in the terminal, without preparations",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target_option(parser)
    add_flags(parser, DeviceConfig, draft=Path(DEFAULT), on_link_loss="local")
    add_flags(parser, ChatSettings)
    notes = {"temperature": " (default)", "max_tokens": " (default: 512)"}
    generation_options(parser, notes, protocol=AUTO, max_tokens=512)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    request, config = generation_of(args), from_args(args, DeviceConfig)
    if config.edge is not None and args.target != Path(DEFAULT):
        raise UnsupportedError("--target is for an edge on this machine: leave it out with --edge.")
    if config.edge is None and config.keys is not None:
        raise UnsupportedError("--keys is for another machine's edge: name it with --edge, too.")
    screen, lines = AnswerScreen(), LineReader("> ", _HISTORY)
    with ExitStack() as stack:
        if config.edge is None and request.protocol != LOCAL:
            ends = stack.enter_context(both_ends(config, args.target))
            config = structs.replace(
                config, draft=ends.draft, edge=ends.edge.endpoint, threads=ends.threads
            )
            await_target = ends.edge.await_target
        else:
            config = structs.replace(config, draft=drafter_folder(config.draft, config.provider))
            await_target = None
        stack.enter_context(_link_shown(screen))
        with ProgressDisplay() as display:
            display.show("loading the models", 0, None)
            opened = Device(**structs.asdict(config), on_fetch=partial(display.show, FETCHING))
            device = stack.enter_context(opened)
            if await_target is not None:
                await_target()
                device.probe()  # waits for the greeting, so that the edge answers from the start
        chat = Chat(device, request, screen, from_args(args, ChatSettings).system)
        if lines.interactive:
            where = "here alone" if config.edge is None else f"here, the target at {config.edge}"
            screen.note(f"the drafter runs {where}\n/help lists the commands, Ctrl-D ends the chat")
            screen.legend("drafted", "corrected", "bonus", "target", "local")
        _converse(chat, lines, screen)
    return 0


def _converse(chat: "Chat", lines: LineReader, screen: AnswerScreen) -> None:
    """Answer line by line until the input ends. At a terminal, Ctrl-C ends no more than a line."""
    running = True
    while running:
        try:
            running = _take_line(chat, lines)
        except SecondInterrupt:
            raise
        except KeyboardInterrupt:
            if not lines.interactive:
                raise
            screen.end()
            screen.note("Ctrl-D ends the chat")
    if lines.interactive:
        screen.end()  # the shell's prompt begins a line


def _take_line(chat: "Chat", lines: LineReader) -> bool:
    """Answer the next line; return whether there was one.

    An error is shown at a terminal; from a pipe, it ends the command.
    """
    line = lines.read()
    if line is None:
        return False
    try:
        chat.take(line.strip(), interruptible=lines.interactive)
    except (PilotfishError, EngineError) as error:
        if not lines.interactive:
            raise
        complain(one_line(str(error)))
    return True


class SecondInterrupt(KeyboardInterrupt):
    """Ctrl-C was pressed again while an interrupted answer had not ended: the command ends."""


class Chat:
    """One conversation at a time on a device; it keeps the messages, the device its cache.

    request: the options of every answer. system: instructions before the first message, or "".
    """

    def __init__(self, device: Device, request: Request, screen: AnswerScreen, system: str) -> None:
        self._device, self._request, self._screen = device, request, screen
        self._start = [{"role": "system", "content": system}] if system else []
        self._messages = self._start

    def take(self, line: str, *, interruptible: bool) -> None:
        """Answer a message, or run a command. interruptible: Ctrl-C ends the answer alone."""
        command, _, argument = line.partition(" ")
        if not line.startswith("/"):
            if line:
                self._answer(line, interruptible=interruptible)
        elif command == "/new":
            self._messages = self._start
            self._screen.note("a new conversation")
        elif command == "/protocol":
            self._choose_protocol(argument.strip())
        elif command == "/stats":
            self._show_statistics()
        elif command == "/help":
            self._screen.note(_COMMANDS)
        else:
            raise UnsupportedError(f"There is no command {command}; /help lists the commands.")

    def _answer(self, text: str, *, interruptible: bool) -> None:
        """Write the answer to a message, and add both to the conversation.

        An interrupted answer stays in the conversation as far as it came.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        content = ""
        try:
            with ExitStack() as stack:
                if interruptible:
                    stack.enter_context(_interrupting(self._device))
                for piece in stack.enter_context(self._device.answer(messages, self._request)):
                    content += piece.text
                    self._screen.show(piece)
            assert self._device.last is not None
            content = self._device.last.turn.content
            if self._device.last.finish_reason == "length":
                self._screen.note(f"cut after {len(self._device.last.tokens)} tokens")
        except InterruptedGenerationError:
            if not content:
                return
        finally:
            self._screen.end()
        self._messages = [*messages, {"role": "assistant", "content": content}]

    def _choose_protocol(self, name: str) -> None:
        choices = (AUTO, *names())
        if name and name not in choices:
            raise UnsupportedError(
                f"There is no protocol {name}; take one of {', '.join(choices)}."
            )
        if name:
            self._request = structs.replace(self._request, protocol=name)
        self._screen.note(f"protocol {self._request.protocol}")

    def _show_statistics(self) -> None:
        last = self._device.last
        if last is None:
            raise UnsupportedError("There is no answer yet.")
        if last.choice is not None:
            self._screen.note(f"auto: {last.choice.reason}")
        self._screen.notes.print(report([summary(last)]))


@contextmanager
def _interrupting(device: Device) -> Iterator[None]:
    """Let Ctrl-C interrupt the device's answer during the block; a second one ends the command."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SecondInterrupt

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, end)
        # in another thread, since this one may hold the lock that the device's token needs
        threading.Thread(target=device.interrupt).start()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class _LinkLines(logging.Handler):
    """A handler that shows each change of the link in a dim line, from the first loss on."""

    def __init__(self, screen: AnswerScreen) -> None:
        super().__init__()
        self._screen = screen
        self._lost = False

    def emit(self, record: logging.LogRecord) -> None:
        self._lost = self._lost or record.levelno >= logging.WARNING
        if self._lost:
            self._screen.note(record.getMessage())


@contextmanager
def _link_shown(screen: AnswerScreen) -> Iterator[None]:
    """Show the changes of the link on the screen, instead of logging them."""
    log, lines = logging.getLogger(LINK_LOG), _LinkLines(screen)
    level, propagates = log.level, log.propagate
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(lines)
        log.setLevel(level)
        log.propagate = propagates
