"""``pilotfish emulate``: a slower, longer or lossier link in front of an edge."""

import argparse
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from time import monotonic

from pilotfish.cli.options import Commands, write_json
from pilotfish.cli.quantities import duration, rate, share
from pilotfish.wire.emulation.emulator import Conditions, Traffic
from pilotfish.wire.emulation.proxy import Proxy, take_precedence

_DESCRIPTION = """\
Passes TCP connections on to an edge, over a link that is like the options say. Up is from the
device to the edge. What is not given is not limited. Loss shows as stalls: this is TCP, which sends
a lost segment again and holds all behind it, for a round trip when more follows, else for a round
trip and 200 ms. Ctrl-C or SIGTERM stops it and says what has passed.
"""
_EXAMPLE = """\
example:
  pilotfish emulate --connect tcp://127.0.0.1:7077 --rtt 50ms --up 20mbit --down 100mbit
  pilotfish device run --draft drafter --edge tcp://127.0.0.1:7177 "Why is the sky blue?"
"""


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "emulate",
        help="put a slow link in front of an edge",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--listen", default="tcp://127.0.0.1:7177", metavar="ADDRESS", help="(%(default)s)")
    add(
        "--connect",
        default="tcp://127.0.0.1:7077",
        metavar="ADDRESS",
        help="the edge (%(default)s); it may come later",
    )
    add("--rtt", type=duration, default=0.0, metavar="TIME", help="round trip, as 50ms (0)")
    add(
        "--jitter",
        type=duration,
        default=0.0,
        metavar="TIME",
        help="a round trip takes up to so much more, half of it each way (0)",
    )
    for way in ("up", "down"):
        rates = parser.add_mutually_exclusive_group()
        rates.add_argument(
            f"--{way}", type=rate, metavar="RATE", help=f"payload {way} per second, as 20mbit"
        )
        rates.add_argument(
            f"--trace-{way}",
            metavar="FILE",
            help="or a Mahimahi trace: a line is the millisecond at which 1500 bytes can go",
        )
    add(
        "--loss",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="of the segments each way, as 1%% or 0.01; shows as stalls (0)",
    )
    add("--seed", type=int, default=0, metavar="N", help="of jitter and loss (%(default)s)")
    add(
        "--json",
        metavar="PATH",
        help="at the end, write what passed as JSON to PATH ('-' for stdout)",
    )
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    conditions = Conditions(
        rtt_s=args.rtt,
        jitter_s=args.jitter,
        up_bps=args.up,
        down_bps=args.down,
        loss=args.loss,
        trace_up=args.trace_up,
        trace_down=args.trace_down,
        seed=args.seed,
    )
    proxy = Proxy(args.listen, args.connect, conditions)
    started_s = monotonic()
    with _signals(proxy) as received:
        print(
            f"pilotfish: the link to {args.connect} begins at {proxy.endpoint}",
            file=sys.stderr,
            flush=True,
        )
        take_precedence()
        proxy.run()
    proxy.close()
    _tell(proxy.traffic(), conditions, monotonic() - started_s, args.json)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    return 0


@contextmanager
def _signals(proxy: Proxy) -> Iterator[list[int]]:
    """Have SIGINT and SIGTERM stop the proxy between two turns of its loop; which ones came."""
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


def _tell(traffic: Traffic, conditions: Conditions, seconds: float, path: str | None) -> None:
    print(
        f"pilotfish: passed {traffic.up_bytes:,} bytes up and {traffic.down_bytes:,} down in "
        f"{seconds:.1f} s over {traffic.connections} connections; lost and sent again: "
        f"{traffic.up_lost} segments up, {traffic.down_lost} down",
        file=sys.stderr,
    )
    if path:
        write_json(path, {"seconds": seconds, **asdict(traffic), "link": asdict(conditions)})
