"""``pilotfish device run`` answers one prompt; ``pilotfish device serve`` answers over HTTP.

Both draft here and have a target on the edge verify.
"""

import argparse
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pilotfish.cli.configuration import ConfiguredParser, again, config_option
from pilotfish.cli.options import (
    Commands,
    between,
    engine_options,
    generation_of,
    generation_options,
    json_option,
    keys_option,
    positive,
    write_json,
)
from pilotfish.cli.progress import FETCHING, Bars
from pilotfish.cli.screen import Screen
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.plan import AUTO, Options
from pilotfish.field.summary import report, summary
from pilotfish.wire.errors import UnsupportedError
from pilotfish.wire.protocols import LOCAL, Greedy

if TYPE_CHECKING:
    from pilotfish.device_runtime.service.config import ServiceConfig

_TEMPERATURE = 1.0  # of a request that names none, as at OpenAI
_EXTRA = ("fastapi", "prometheus_client", "uvicorn")
_SERVE = """\
Answers OpenAI's API over HTTP: /v1/chat/completions, /v1/completions, /v1/models; beside them
/health, /metrics (Prometheus), /status and, at /, a page to chat with. Ctrl-C or SIGTERM lets
running answers end and stops; SIGHUP reads keys and --config again.
"""
_SERVE_EXAMPLE = """\
example:
  pilotfish device serve --draft drafter --edge tcp://edge:7077 --keys
  curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

Beyond loopback clients need a key: a file with a NAME:KEY a line, which only you can read; and
keys need https: --tls-cert and --tls-key, or a proxy on this machine.
"""


def add_to(commands: Commands) -> None:
    """Register the commands."""
    parser = commands.add_parser("device", help="draft here", description="The drafting end.")
    actions = parser.add_subparsers(
        title="actions", metavar="ACTION", required=True, parser_class=ConfiguredParser
    )
    _add_run(actions)
    _add_serve(actions)


def _add_run(actions: "argparse._SubParsersAction[ConfiguredParser]") -> None:
    run = actions.add_parser(
        "run",
        help="answer one prompt",
        description="Answers one prompt; '-' reads it from stdin. The text goes to stdout, all "
        "else to stderr.",
    )
    run.add_argument("prompt", help="the user's message, or '-'")
    _add_ends(run, on_link_loss="fail")
    generation_options(run, protocol="auto", tokens=128)
    json_option(run)
    run.add_argument("--stats", action="store_true", help="print what happened, to stderr")
    run.set_defaults(run=_run)


def _add_serve(actions: "argparse._SubParsersAction[ConfiguredParser]") -> None:
    serve = actions.add_parser(
        "serve",
        help="answer over HTTP until told to stop",
        description=_SERVE,
        epilog=_SERVE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    config_option(serve)
    _add_ends(serve, on_link_loss="wait")
    add = serve.add_argument
    add("--listen", default="127.0.0.1:8080", metavar="HOST:PORT", help="(%(default)s)")
    add(
        "--api-keys",
        type=Path,
        metavar="FILE",
        help="who may ask; needed beyond loopback (default: $CREDENTIALS_DIRECTORY/api-keys)",
    )
    add("--tls-cert", type=Path, metavar="FILE", help="serve https with this certificate (PEM)")
    add("--tls-key", type=Path, metavar="FILE", help="and its key, not encrypted")
    add("--lanes", type=between(1, 64), default=2, help="answers made at once (%(default)s)")
    add("--queue", type=between(0, 10_000), default=16, help="that may wait (%(default)s)")
    add("--context", type=between(2), metavar="N", help="tokens of a conversation (the model's)")
    add("--model", default="pilotfish", metavar="NAME", help="what clients call it (%(default)s)")
    add(
        "--drain",
        type=positive,
        default=20.0,
        metavar="S",
        help="how long running answers may take when the service is told to stop (%(default)s)",
    )
    generation_options(serve, protocol="auto", tokens=0)
    serve.set_defaults(run=_serve, temperature=None)


def _add_ends(parser: argparse.ArgumentParser, *, on_link_loss: str) -> None:
    """Both ends, and what is between them."""
    add = parser.add_argument
    add("--draft", required=True, type=Path, metavar="DIR", help="drafter's artifact")
    add("--edge", metavar="ADDRESS", help="tcp://HOST:PORT; protocol local needs none")
    keys_option(parser, "the folder with device.key and edge.pub; needed beyond loopback")
    add(
        "--on-link-loss",
        choices=("wait", "local", "fail"),
        default=on_link_loss,
        help="when the edge is lost: wait for it, let the drafter go on alone until it is back, or "
        "end the answer (%(default)s)",
    )
    add(
        "--patience",
        type=positive,
        default=120.0,
        metavar="S",
        help="how long to wait for a lost edge (%(default)s)",
    )
    engine_options(parser)


def _run(args: argparse.Namespace) -> int:
    if args.edge is None and args.protocol not in (LOCAL, AUTO):
        raise UnsupportedError(
            f"Protocol {args.protocol} needs an edge: name it with --edge, or use --protocol local."
        )
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    screen = Screen(quiet=args.json == "-")
    with Bars() as bars:
        opened = Device(
            args.draft,
            args.edge,
            args.keys,
            provider=args.provider,
            threads=args.threads,
            on_fetch=partial(bars.show, FETCHING),
            on_link_loss=args.on_link_loss,
            patience_s=args.patience,
        )
    with opened as device:
        for piece in device.stream(prompt, **generation_of(args)):
            screen.show(piece)
        screen.end()
        assert device.last is not None
        figures = summary(device.last)
        choice = device.last.choice
    if args.json:
        write_json(args.json, figures)
    if args.stats:
        if choice is not None:
            screen.notes.print(f"auto: {choice.reason}")
        screen.notes.print(report([figures]))
    return 0


def _serve(args: argparse.Namespace) -> int:
    from pilotfish.device_runtime.service.serve import serve

    for name in _EXTRA:
        if find_spec(name) is None:
            raise UnsupportedError(
                f"The service needs {name}, which is not installed: pip install 'pilotfish[serve]'."
            )
    return serve(_config_of(args), reread=lambda: _config_of(again(args)), announce=_announce)


def _config_of(args: argparse.Namespace) -> "ServiceConfig":
    from pilotfish.device_runtime.service.config import ServiceConfig

    return ServiceConfig(
        draft=args.draft,
        edge=args.edge,
        keys=args.keys,
        listen=args.listen,
        api_keys=args.api_keys,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        lanes=args.lanes,
        queue=args.queue,
        on_link_loss=args.on_link_loss,
        patience_s=args.patience,
        options=_options_of(args),
        provider=args.provider,
        threads=args.threads,
        context=args.context,
        drain_s=args.drain,
        model=args.model,
    )


def _options_of(args: argparse.Namespace) -> Options:
    """What holds for a request that does not say otherwise."""
    options = generation_of(args)
    if args.edge is None and args.protocol in (AUTO, LOCAL):
        options["protocol"] = LOCAL
    elif args.edge is None:
        raise UnsupportedError(
            f"Protocol {args.protocol} needs an edge: name it with --edge, or use --protocol local."
        )
    if args.temperature is None:
        options["temperature"] = 0.0 if args.protocol == Greedy.name else _TEMPERATURE
    if not args.max_tokens:  # as many as fit
        del options["max_tokens"]
    return options


def _announce(address: str) -> None:
    print(f"pilotfish: the device serves on {address}", file=sys.stderr, flush=True)
