"""The files that an operator imports: a dashboard and alert rules for each program."""

from importlib import resources
from typing import Final

from pilotfish.monitoring.device_dashboard import DEVICE
from pilotfish.monitoring.edge_dashboard import EDGE
from pilotfish.monitoring.grafana import grafana_json
from pilotfish.monitoring.watch_dashboard import WATCH

DASHBOARDS: Final = (EDGE, DEVICE, WATCH)


def monitoring_files() -> dict[str, str]:
    """Return all files: name → text."""
    alerts = resources.files("pilotfish.monitoring") / "alerts"
    files = {f"{each.uid}.json": grafana_json(each) for each in DASHBOARDS}
    for each in DASHBOARDS:
        files[f"{each.uid}-alerts.yml"] = (alerts / f"{each.name}.yml").read_text("utf-8")
    return files
