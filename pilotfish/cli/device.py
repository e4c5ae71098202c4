"""``pilotfish device run`` answers one prompt; ``serve`` and ``up`` answer over HTTP.

All commands draft on this machine; the target on the edge verifies. ``up`` first enrols this device
at the edge by an invitation.
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.progress import FETCHING, ProgressDisplay
from pilotfish.base.reading import reading_file
from pilotfish.bridge import read_talk
from pilotfish.cli.announcement import announce_service
from pilotfish.cli.configuration import ConfiguredParser, config_option, reread_args
from pilotfish.cli.default_models import DEFAULT, drafter_folder
from pilotfish.cli.enrolment import accept
from pilotfish.cli.extras import require_service
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.generation import (
    generation_of,
    generation_options,
    prediction_of,
    prediction_option,
    talk_of,
    talk_options,
)
from pilotfish.cli.options import Commands, choices_as, json_option, write_json
from pilotfish.cli.screen import AnswerScreen
from pilotfish.cli.summary import report, summary
from pilotfish.device_runtime.choice import check
from pilotfish.device_runtime.default_temperature import (
    OPENAI_TEMPERATURE,
    greedy_names,
    with_default_temperature,
)
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.device_config import DeviceConfig, ServiceConfig
from pilotfish.device_runtime.draft_advice import check_grammar
from pilotfish.device_runtime.enrolment import stored_address
from pilotfish.device_runtime.link.link_group import LINK_LOG
from pilotfish.wire.keys import default_directory
from pilotfish.wire.protocols import LOCAL
from pilotfish.wire.request import AUTO, Request

_SERVE = """\
Serves OpenAI's API over HTTP: /v1/chat/completions, /v1/completions, /v1/responses, /v1/models.
Also serves /health, /metrics (Prometheus), /status and a chat page at /. Ctrl-C or SIGTERM stops
the service after the running answers; SIGHUP makes it read keys and --config again.
"""
_SERVE_EXAMPLE = """\
example:
  pilotfish device serve --draft drafter --edge tcp://edge:7077 --keys
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

Beyond loopback, clients need an API key (--api-keys: a file with one NAME:KEY per line, readable
by you alone), and keys need https (--tls-cert and --tls-key, or a proxy on this machine).
"""


_UP = """\
Enrols this device at an edge by the line that `pilotfish edge up` prints there, then serves a chat
page and OpenAI's API, as `device serve` does. The line makes device.key if it is missing, checks
that the edge has the key that the line names, and stores edge.pub and edge.address in the key
folder. Later starts need no line.
"""
_UP_EXAMPLE = """\
example:
  pilotfish device up pf1_…      the line from the edge; `ps` shows it to other users, to whom it is
                                 worthless once it is used
  pilotfish device up -          reads the line from stdin, so that it is not in `ps` and history
  pilotfish device up            starts again
"""


def add_to(commands: Commands) -> None:
    """Register the commands."""
    parser = commands.add_parser(
        "device",
        help="run the device",
        description="The device is the end of the link that drafts.",
    )
    actions = choices_as(ConfiguredParser, parser)
    _add_run(actions)
    _add_serve(actions)
    _add_up(actions)


def _add_run(actions: "argparse._SubParsersAction[ConfiguredParser]") -> None:
    run = actions.add_parser(
        "run",
        help="answer one prompt",
        description="Answers one prompt. The text goes to stdout, everything else to stderr.",
    )
    run.add_argument(
        "prompt", nargs="?", help="the user's message (default, and '-': read it from stdin)"
    )
    add_flags(run, DeviceConfig, on_link_loss="fail")
    generation_options(run, {"temperature": " (default)"}, protocol=AUTO, max_tokens=128)
    talk_options(run)
    prediction_option(run)
    json_option(run)
    run.add_argument("--stats", action="store_true", help="print statistics to stderr")
    run.set_defaults(run=_run, usage=run.error)


def _add_serve(actions: "argparse._SubParsersAction[ConfiguredParser]") -> None:
    serve = actions.add_parser(
        "serve",
        help="answer over HTTP until stopped",
        description=_SERVE,
        epilog=_SERVE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _service_options(serve)
    serve.set_defaults(run=_serve)


def _add_up(actions: "argparse._SubParsersAction[ConfiguredParser]") -> None:
    up = actions.add_parser(
        "up",
        help="enrol this device by a line from `edge up`, and serve a chat page and OpenAI's API",
        description=_UP,
        epilog=_UP_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    up.add_argument(
        "line",
        nargs="*",
        metavar="LINE",
        help="the line that `pilotfish edge up` or `pilotfish keys invite` printed; '-' reads it "
        "from stdin; without it: the edge at which this device was enrolled before",
    )
    up.add_argument(
        "--name", help="this device's name in the edge's allow-list (default: its host name)"
    )
    _service_options(up, draft=Path(DEFAULT), keys=default_directory())
    up.set_defaults(run=_up)


def _service_options(parser: ConfiguredParser, **defaults: Any) -> None:
    """Add the options of the HTTP service. defaults: setting → its default here."""
    config_option(parser, "lanes = 2")
    add_flags(parser, ServiceConfig, **defaults)
    generation_options(
        parser,
        {
            "max_tokens": " (default: 0); 0: as many as the context holds",
            "temperature": _temperature_note(),
        },
        protocol=AUTO,
        max_tokens=0,
    )


def _run(args: argparse.Namespace) -> int:
    if args.edge is None and args.protocol not in (LOCAL, AUTO):
        raise UnsupportedError(
            f"Protocol {args.protocol} needs an edge: name it with --edge, or use --protocol local."
        )
    request = structs.replace(generation_of(args), prediction=prediction_of(args))
    prompt, _ = read_talk(_prompt_of(args), talk_of(args))
    screen = AnswerScreen(quiet=args.json == "-")
    with ProgressDisplay() as display:
        config = structs.asdict(from_args(args, DeviceConfig))
        config["draft"] = drafter_folder(config["draft"], config["provider"])
        opened = Device(**config, on_fetch=partial(display.show, FETCHING))
    ends_by_loss = config["on_link_loss"] == "fail"
    with opened as device, _without_link_log(ends_by_loss and not args.verbose):
        for piece in device.answer(prompt, request):
            screen.show(piece)
        screen.end()
        assert device.last is not None
        if device.last.finish_reason == "length":
            screen.notes.print(_cut_short(len(device.last.tokens), args.max_tokens))
        figures = summary(device.last)
        choice = device.last.choice
        turn = device.last.turn
    if args.json:
        calls = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
        answer = {"content": turn.content, "reasoning": turn.reasoning, "calls": calls}
        write_json(args.json, {**figures, "answer": answer})
    if args.stats:
        if choice is not None:
            screen.notes.print(f"auto: {choice.reason}")
        screen.notes.print(report([figures]))
    return 0


def _prompt_of(args: argparse.Namespace) -> str:
    """Return the prompt, from stdin without the last line's end."""
    if args.prompt is None and sys.stdin.isatty():
        args.usage("give the prompt as an argument, or pipe it into the command")
    if args.prompt in (None, "-"):
        with reading_file(lambda problem: UnsupportedError(f"stdin cannot be read: {problem}.")):
            text = sys.stdin.read().removesuffix("\n")
        if args.prompt is None and not text:
            args.usage("stdin is empty: give the prompt as an argument, or pipe it in")
        return text
    prompt: str = args.prompt
    return prompt


@contextmanager
def _without_link_log(quiet: bool) -> Iterator[None]:
    """Suppress the link's warnings if ``quiet``, since the command's error says the same."""
    log = logging.getLogger(LINK_LOG)
    before = log.level
    if quiet:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _cut_short(tokens: int, most: int) -> str:
    """Say why an answer was cut short before the model ended it."""
    if tokens < most:
        return f"the answer was cut after {tokens} tokens, because the context is full"
    return f"the answer was cut after {tokens} tokens: allow more tokens with --max-tokens"


def _up(args: argparse.Namespace) -> int:
    require_service()  # before the line is used up
    if args.line:
        accept(args.line, args.keys, args.name)
    elif args.name is not None:
        raise UnsupportedError("--name is for a line: the edge knows this device by its name.")
    announce = partial(
        announce_service,
        needs_key=args.api_keys is not None,
        stop="Ctrl-C; `pilotfish device up` starts it again",
    )
    return _serve(args, lambda args: args.edge or stored_address(args.keys), announce)


def _announce(address: str) -> None:
    # one write call, so that no other thread's log line gets into it
    sys.stderr.write(f"pilotfish: the device serves on {address}\n")
    sys.stderr.flush()


def _serve(
    args: argparse.Namespace,
    edge_of: Callable[[argparse.Namespace], str | None] = lambda args: args.edge,
    announce: Callable[[str], None] = _announce,
) -> int:
    """Serve over HTTP. edge_of: returns the edge's address, also at each reload."""
    require_service()
    from pilotfish.device_runtime.service.serve import serve

    def config_of(args: argparse.Namespace) -> ServiceConfig:
        args = argparse.Namespace(**{**vars(args), "edge": edge_of(args)})
        return from_args(args, ServiceConfig, request=_defaults_of(args))

    named = config_of(args)
    config = structs.replace(named, draft=drafter_folder(named.draft, named.provider))

    def reread() -> ServiceConfig:
        """Read the configuration again; another drafter needs a restart, so it is not looked up."""
        now = config_of(reread_args(args))
        return structs.replace(now, draft=config.draft) if now.draft == named.draft else now

    return serve(config, reread=reread, announce=announce)


def _defaults_of(args: argparse.Namespace) -> Request:
    """Return the default options of requests; raise an error if no request could have them."""
    request = generation_of(args)
    if args.edge is None and args.protocol in (AUTO, LOCAL):
        request = structs.replace(request, protocol=LOCAL)
    elif args.edge is None:
        raise UnsupportedError(
            f"Protocol {args.protocol} needs an edge: name it with --edge, or use --protocol local."
        )
    if not args.max_tokens:  # 0: as many tokens as fit the context
        request = structs.replace(request, max_tokens=None)
    if args.temperature is None:  # a request may name another protocol, with another default
        request = structs.replace(request, temperature=None)
    check(with_default_temperature(request))
    check_grammar(request.grammar)
    return request


def _temperature_note() -> str:
    *first, last = greedy_names()
    return (
        f" (default: {OPENAI_TEMPERATURE:g}, as in OpenAI's API; 0 under {', '.join(first)} and "
        f"{last}, which decode at temperature 0 alone)"
    )
