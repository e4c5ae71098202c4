"""``pilotfish dashboards``: write Grafana's dashboards and Prometheus's alert rules."""

import argparse
from pathlib import Path

from pilotfish.base.files import write_output
from pilotfish.cli.options import Commands
from pilotfish.monitoring.files import monitoring_files

_DESCRIPTION = """\
Writes a Grafana dashboard and a file of alert rules for Prometheus for each program: edge, device
and watch. Existing files of these names are replaced, so keep your own rules in other files.

  pilotfish-edge.json         import it in Grafana (Dashboards, New, Import), or put it into a
                              folder from which Grafana provisions dashboards
  pilotfish-edge-alerts.yml   name it under rule_files in prometheus.yml

docs/operations.md has the scrape configuration, whose names of jobs the alerts expect.
"""
_EXAMPLE = """\
examples:
  pilotfish dashboards --out monitoring
  sudo pilotfish dashboards --out /etc/prometheus/pilotfish
"""


def add_to(commands: Commands) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "dashboards",
        help="write dashboards for Grafana and alert rules for Prometheus",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="the folder, which is made if it is missing (default: this folder)",
    )
    parser.set_defaults(run=_write)


def _write(args: argparse.Namespace) -> int:
    folder: Path = args.out
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in monitoring_files().items():
        write_output(folder / name, text.encode())
        print(folder / name)
    return 0
