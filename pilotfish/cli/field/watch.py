"""``pilotfish field watch``: probe a link and answer over it again and again, for days."""

import argparse
import logging
import shlex
import signal
import sys
from contextlib import ExitStack, closing

from msgspec import structs

from pilotfish.base.errors import SIGINT_CODE
from pilotfish.base.supervisor import Supervisor
from pilotfish.cli.configuration import ConfiguredParser, config_option
from pilotfish.cli.default_models import drafter_folder
from pilotfish.cli.field.watch_screen import WatchLog, WatchScreen
from pilotfish.cli.flags import add_flags, from_args
from pilotfish.cli.logs import is_journal
from pilotfish.cli.options import Commands
from pilotfish.cli.stop_signals import Step, stopping_by
from pilotfish.device_runtime.link.link_group import LINK_LOG, load_keys
from pilotfish.edge_runtime.metrics_server import MetricsServer
from pilotfish.lab.field import matrix
from pilotfish.lab.field.watch.clock import Clock
from pilotfish.lab.field.watch.listener import Listeners, WatchListener
from pilotfish.lab.field.watch.watch_file import WatchFile, open_watch
from pilotfish.lab.field.watch.watch_metrics import WatchMetrics
from pilotfish.lab.field.watch.watch_settings import WatchSettings
from pilotfish.lab.field.watch.watching import Watching

_PRESENT_ROW_S = 2.5  # time for the present row after a signal
_END_S = 1.5  # then, time to end all waits and to close the file
_DESCRIPTION = """\
In each round measures RTT and goodput, and generates one short answer by each protocol. Records
when the edge was away. Neither the edge, the link, the clock nor a full disk ends a watch: it ends
with --for, Ctrl-C or SIGTERM. After a kill or a power cut the same command continues in the same
file.
"""
_EXAMPLE = """\
example:
  pilotfish field watch --edge tcp://edge:7077 --keys --every 5min --for 24h --out day.pilotfish
  pilotfish field report day.pilotfish --out day
"""


def add_to(actions: Commands) -> None:
    """Register the action."""
    parser = actions.add_parser(
        "watch",
        help="measure a link again and again for days, and write a run file",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    assert isinstance(parser, ConfiguredParser)
    config_option(parser, 'every = "5min"', reloads=False)
    add_flags(parser, WatchSettings)
    parser.set_defaults(run=lambda args: watch(from_args(args, WatchSettings)))


def watch(settings: WatchSettings, clock: Clock | None = None) -> int:
    """Run a watch to its end; return the exit code. clock: None: the machine's clocks."""
    clock = clock or Clock()
    supervisor = Supervisor.from_environment()
    # faults of the configuration end the command, so they are found before the watch begins
    load_keys(settings.edge, settings.keys)
    settings = structs.replace(settings, draft=drafter_folder(settings.draft, settings.provider))
    answers = settings.matrix
    matrix.check(answers)
    with ExitStack() as stack:
        server = None
        if settings.metrics is not None:
            server = MetricsServer(*settings.metrics, settings.metrics_hosts)
            stack.enter_context(closing(server))
        opened = open_watch(settings, answers, clock)
        logging.getLogger(LINK_LOG).setLevel(logging.ERROR)  # the watch tells outages itself
        _tell_begin(settings, opened)
        listeners: list[WatchListener] = [WatchLog() if is_journal() else WatchScreen()]
        if server is not None:
            metrics = WatchMetrics(settings.edge, opened.facts, clock)
            server.serve(metrics.families)
            listeners.append(metrics)
        watching = Watching(
            settings,
            opened,
            clock=clock,
            listener=Listeners(*listeners),
            supervisor=supervisor,
            on_fetch=lambda done, total: supervisor.feed(),
        )
        steps = Step(watching.stop, _PRESENT_ROW_S), Step(watching.interrupt, _END_S)
        with stopping_by(*steps, lost=lambda: _describe_lost(watching, settings)) as received:
            watching.run()
    _tell_end(settings, watching)
    if lost := _describe_lost(watching, settings):
        raise OSError(lost)
    return SIGINT_CODE if signal.SIGINT in received else 0


def _describe_lost(watching: Watching, settings: WatchSettings) -> str:
    """Tell how many rows the file does not have; "" for none."""
    number = watching.rows.waiting + watching.rows.dropped
    if not number:
        return ""
    return f"{number} rows are lost, because they could not be written to {settings.out}."


def _tell_begin(settings: WatchSettings, opened: WatchFile) -> None:
    if opened.last >= 0:
        missed = int(opened.off_s // settings.every_s)
        _tell(
            f"continuing the watch in {settings.out}, which last ran {opened.off_s:.0f} s ago"
            + (f"; rounds missed: about {missed}" if missed else "")
        )
    else:
        _tell(f"watching {settings.edge} in {settings.out}; Ctrl-C ends the watch")


def _tell_end(settings: WatchSettings, watching: Watching) -> None:
    rows = watching.rows
    report = shlex.join(["pilotfish", "field", "report", str(settings.out), "--out", "report"])
    _tell(f"{rows.written} rows were written to {settings.out}. To report them, run: {report}")


def _tell(sentence: str) -> None:
    """Print a line for people; in the journal it needs no priority."""
    print(f"pilotfish: {sentence}", file=sys.stderr, flush=True)
