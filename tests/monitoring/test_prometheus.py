"""The real Prometheus scrapes an edge, a device service and a watch, and answers every panel."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from pilotfish.monitoring.dashboard import Dashboard, Panel
from pilotfish.monitoring.files import DASHBOARDS, monitoring_files
from tests.conftest import Pair
from tests.support.commands import command
from tests.support.daemons import free_port, running
from tests.support.prometheus import Prometheus, scraping, tool
from tests.support.serving import Serving, chat, serving

PROTOCOLS = ("stream", "ahead", "greedy", "coupled", "auto")
VARIABLES = {"$instance": ".+", "$__rate_interval": "2m"}

GROWING = (
    "pilotfish_edge_windows_total",
    "pilotfish_edge_hint_drafted_tokens_total",
    "pilotfish_hint_drafted_tokens_total",
    "pilotfish_time_to_first_token_seconds_count",
    "pilotfish_watch_rounds_total",
    "pilotfish_watch_choices_total",
)


def answers(device: Serving) -> None:
    for protocol in PROTOCOLS:
        chat(device.client(), max_tokens=24, extra_body={"pilotfish": {"protocol": protocol}})


@pytest.fixture(scope="module")
def prometheus(
    pair: Pair, key_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Prometheus after some answers and rounds of a watch."""
    tool("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    for name, text in monitoring_files().items():
        (folder / name).write_text(text)
    edge_port, watch_port = free_port(), free_port()
    flags = ("--keys", key_folders["edge"], "--metrics", edge_port, "--metrics-devices")
    with ExitStack() as stack:
        edge = stack.enter_context(running("--target", pair.target, "--threads", 1, *flags))
        device = stack.enter_context(
            serving(pair.draft, edge.endpoint, "--keys", key_folders["alice"])
        )
        words = ("field", "watch", "--edge", edge.endpoint, "--keys", key_folders["bob"])
        words += ("--every", "1s", "--metrics", watch_port, "--out", folder / "run.pilotfish")
        watch = subprocess.Popen(command(*words), stderr=subprocess.DEVNULL)
        stack.callback(watch.wait, 30)
        stack.callback(watch.send_signal, signal.SIGTERM)
        jobs = {
            "pilotfish-edge": edge_port,
            "pilotfish-device": device.port,
            "pilotfish-watch": watch_port,
        }
        started = stack.enter_context(scraping(folder, jobs, sorted(folder.glob("*.yml"))))

        def has_grown() -> bool:
            """Whether each counter has grown between two scrapes."""
            answers(device)
            return all(sum(started.values(f"increase({each}[2m])")) > 0 for each in GROWING)

        started.until(has_grown)
        yield started


def expressions_of(panel: Panel) -> list[str]:
    """The panel's expressions as Grafana asks them."""
    expressions = [query.expression for query in panel.queries]
    for name, value in VARIABLES.items():
        expressions = [each.replace(name, value) for each in expressions]
    return expressions


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_every_panel_has_its_values(prometheus: Prometheus, dashboard: Dashboard) -> None:
    # an expression that Prometheus does not understand is an error, whatever the panel needs
    values = {
        panel: [prometheus.values(each) for each in expressions_of(panel)]
        for panel in dashboard.panels
    }
    assert [panel.title for panel in values if not panel.needs and not any(values[panel])] == []


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_the_legends_name_labels_of_the_series(
    prometheus: Prometheus, dashboard: Dashboard
) -> None:
    for panel in dashboard.panels:
        for query, expression in zip(panel.queries, expressions_of(panel), strict=True):
            wanted = set(re.findall(r"{{(\w+)}}", query.legend))
            for each in prometheus.ask("query", query=expression)["result"]:
                assert panel.kind == "table" or wanted <= each["metric"].keys(), panel.title


def test_the_variable_finds_the_instances(prometheus: Prometheus) -> None:
    for dashboard in DASHBOARDS:
        series = prometheus.ask("series", **{"match[]": dashboard.instances})
        assert len({each["instance"] for each in series}) == 1


def test_the_rules_are_evaluated_and_nothing_is_wrong(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, str]]:
        return [rule for each in prometheus.ask("rules")["groups"] for rule in each["rules"]]

    prometheus.until(lambda: all(rule["health"] != "unknown" for rule in rules()))
    assert len(rules()) == sum(text.count("- alert:") for text in monitoring_files().values())
    assert [rule for rule in rules() if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in rules() if rule["state"] == "firing"] == []
