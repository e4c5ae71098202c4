"""``pilotfish probe``: measure RTT, jitter and goodput of the link to an edge."""

import argparse
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from pilotfish.base.errors import EdgeLostError, EdgeUnreachableError
from pilotfish.cli.options import (
    Commands,
    int_between,
    json_option,
    keys_option,
    positive,
    write_json,
)
from pilotfish.cli.probe_watch import ROWS, watch
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.link_group import connect
from pilotfish.device_runtime.link.probing import measure_rates, ping
from pilotfish.device_runtime.link.retry import CONNECT_S, SILENT_S
from pilotfish.wire.link.state import LinkState, Reading
from pilotfish.wire.link.train import FIRST_TRAIN, MAX_PROBE_BYTES

_SMALL_PINGS = 10
_LARGE_PINGS = 3


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "probe",
        help="measure the link to an edge",
        description="Measures RTT, jitter and goodput over the same kind of connection that "
        "carries windows and verdicts, as a device does. Needs no model.",
        epilog="example: pilotfish probe tcp://edge.example:7077 --keys --watch",
    )
    parser.add_argument("edge", metavar="ADDRESS", help="tcp://HOST:PORT")
    keys_option(parser, "the folder with device.key and edge.pub; needed beyond loopback")
    parser.add_argument(
        "--pings",
        type=int_between(1),
        default=_SMALL_PINGS,
        metavar="N",
        help="number of small pings (%(default)s)",
    )
    parser.add_argument(
        "--no-rates",
        action="store_true",
        help=f"measure RTT only, without trains of up to {MAX_PROBE_BYTES:,} bytes each way",
    )
    parser.add_argument(
        "--patience",
        type=positive,
        metavar="S",
        help="time limit, in seconds, for connecting and for each answer; raise it for a "
        f"satellite link or full queues (default: {CONNECT_S:g} for connecting, {SILENT_S:g} "
        "for an answer)",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="measure repeatedly until Ctrl-C, and print a line with the time for each ping; "
        "outages of the edge are lines, too. --json then writes a JSON object a line",
    )
    parser.add_argument(
        "--every",
        type=positive,
        default=1.0,
        metavar="S",
        help="interval of --watch in seconds (%(default)s)",
    )
    json_option(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    if args.watch:
        return watch(args)
    link = _connected(args)
    small_only: EdgeLostError | None = None
    try:
        _measure(link, args.pings, 0)
        try:
            _measure(link, 0, 0 if args.no_rates else _LARGE_PINGS)
        except EdgeLostError as error:
            small_only = error
        state, probing = link.state(), link.estimator.probing
    finally:
        link.close()
    if args.json:
        write_json(args.json, {"link": asdict(state), "probing": probing._asdict()})
    if args.json != "-":
        Console().print(_table(state))
        print(
            f"{probing.pings} pings, {probing.uplink_bytes:,} bytes up, "
            f"{probing.downlink_bytes:,} down",
            file=sys.stderr,
        )
    if small_only is not None:
        raise small_only
    return 0


def _connected(args: argparse.Namespace) -> EdgeLink:
    try:
        return connect(args.edge, args.keys, args.patience)
    except EdgeUnreachableError as error:
        if args.patience is not None:
            raise
        raise EdgeUnreachableError(
            f"{error} If the RTT may exceed {CONNECT_S:g} s, raise the time limit, as with "
            "--patience 20."
        ) from error


def _measure(link: EdgeLink, small: int, large: int) -> None:
    """Send small and large pings; if only large ones are lost, the `EdgeLostError` says so.

    A connection on which they stall may be replaced before the edge counts as lost.
    """
    for _ in range(small):
        ping(link)
    broken = 0
    for _ in range(large):
        connection = link.connection
        try:
            measure_rates(link)
        except EdgeLostError as error:
            raise _large_are_lost() from error
        broken += link.connection != connection
    if broken == _LARGE_PINGS:  # a single broken connection may have other causes
        raise _large_are_lost()


def _large_are_lost() -> EdgeLostError:
    return EdgeLostError(
        "Large messages do not arrive: the edge answered small pings, but not messages of "
        f"{FIRST_TRAIN[0]:,} bytes. If this persists, something on the path silently drops large "
        "packets (an MTU black hole): run `sysctl -w net.ipv4.tcp_mtu_probing=1` on both ends, or "
        "lower the MTU of the interface (`ip link set DEVICE mtu 1280`). If the link is very slow, "
        "raise --patience."
    )


def _table(state: LinkState) -> Table:
    table = Table("", "value", "unit", "age, s", "samples")
    for label, name, scale, unit in ROWS:
        reading: Reading | None = getattr(state, name)
        if reading is None:
            why = "no radio" if name == "signal" else "not measured"
            table.add_row(label, "-", f"{unit} ({why})", "", "")
        else:
            value = f"{reading.value * scale:.2f}"
            table.add_row(label, value, unit, f"{reading.age_s:.1f}", str(reading.samples))
    return table
