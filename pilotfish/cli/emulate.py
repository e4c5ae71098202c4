"""``pilotfish emulate``: forward connections to an edge over an emulated link."""

import argparse
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from time import monotonic
from typing import Annotated

from msgspec import Struct, structs

from pilotfish.base.settings import setting
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.options import Commands, write_json
from pilotfish.emulation.emulator import Conditions, Traffic
from pilotfish.emulation.proxy import Proxy, take_precedence

_DESCRIPTION = """\
Forwards TCP connections to an edge over an emulated link. Up is from the device to the edge.
Without an option there is no limit. Loss shows as stalls, as in TCP: a lost segment is sent again
and delays all later ones, by one round trip if more follows, else by one round trip and 200 ms.
Ctrl-C or SIGTERM stops it and prints the traffic.
"""
_EXAMPLE = """\
example:
  pilotfish emulate --connect tcp://127.0.0.1:7077 --rtt 50ms --up 20mbit --down 100mbit
  pilotfish device run --draft drafter --edge tcp://127.0.0.1:7177 "Why is the sky blue?"
"""


class EmulateSettings(Struct, frozen=True, kw_only=True):
    """The addresses of both ends of the link, and its conditions."""

    listen: Annotated[str, setting("address for devices to connect to", metavar="ADDRESS")] = (
        "tcp://127.0.0.1:7177"
    )
    connect: Annotated[
        str, setting("the edge's address; it may start later", metavar="ADDRESS")
    ] = "tcp://127.0.0.1:7077"
    conditions: Conditions = Conditions()
    json: (
        Annotated[
            str,
            setting(
                "at the end, write the traffic as JSON to PATH ('-' for stdout)", metavar="PATH"
            ),
        ]
        | None
    ) = None


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "emulate",
        help="emulate a slow link in front of an edge",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser, EmulateSettings)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    settings = from_args(args, EmulateSettings)
    proxy = Proxy(settings.listen, settings.connect, settings.conditions)
    started_s = monotonic()
    with _signals(proxy) as received:
        print(
            f"pilotfish: the link to {settings.connect} begins at {proxy.endpoint}",
            file=sys.stderr,
            flush=True,
        )
        take_precedence()
        proxy.run()
    proxy.close()
    _print_traffic(proxy.traffic(), settings, monotonic() - started_s)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    return 0


@contextmanager
def _signals(proxy: Proxy) -> Iterator[list[int]]:
    """Stop the proxy on SIGINT or SIGTERM, after an iteration of its loop.

    Yield the signals so far.
    """
    received: list[int] = []
    read, write = socket.socketpair()
    with read, write:
        write.setblocking(False)
        proxy.watch(read.fileno(), proxy.stop)
        before = {
            number: signal.signal(number, lambda number, frame: received.append(number))
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        try:
            yield received
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)


def _print_traffic(traffic: Traffic, settings: EmulateSettings, seconds: float) -> None:
    print(
        f"pilotfish: forwarded {traffic.up_bytes:,} bytes up and {traffic.down_bytes:,} down in "
        f"{seconds:.1f} s over {traffic.connections} connections; emulated losses, sent again: "
        f"{traffic.up_lost} segments up, {traffic.down_lost} down",
        file=sys.stderr,
    )
    if settings.json:
        link = structs.asdict(settings.conditions)
        write_json(settings.json, {"seconds": seconds, **asdict(traffic), "link": link})
