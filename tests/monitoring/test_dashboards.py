"""Dashboards: what Grafana imports, and that every metric and label in them is one of ours."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields
from itertools import pairwise, product
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from pilotfish import Device
from pilotfish.cli import main
from pilotfish.device_runtime.energy import rails
from pilotfish.device_runtime.service import service_metrics
from pilotfish.edge_runtime import metrics_sources
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.lab.field.watch import watch_metrics
from pilotfish.monitoring.dashboard import Dashboard
from pilotfish.monitoring.files import DASHBOARDS, monitoring_files
from pilotfish.monitoring.grafana import grafana_json
from tests.conftest import Pair
from tests.device_runtime.test_metrics import everything
from tests.lab.field.watch.test_watch_metrics import full_watch
from tests.lab.test_host import sensor
from tests.support.commands import command
from tests.support.daemons import exposition, free_port, running

COUNTED = (
    (EdgeMetrics(), metrics_sources.PREFIX),
    (service_metrics._Counts(), service_metrics.PREFIX),
    (watch_metrics._Counts(), watch_metrics.PREFIX),
)
SCRAPED = {"job", "instance"}  # labels that Prometheus adds
METRIC = re.compile(r"\b((?:pilotfish|process)_\w+)(?:\{([^}]*)\})?")
BY = re.compile(r"\b(?:by|on) \(([^)]*)\)")
UNITS = {"none", "s", "bytes", "Bps", "percentunit", "bool_yes_no", "dBm", "watt", "joule"}


def samples(family: Metric) -> list[str]:
    """The names of a family's samples."""
    if family.type == "histogram":
        return [f"{family.name}_{end}" for end in ("bucket", "sum", "count")]
    return [f"{family.name}_total"] if family.type == "counter" else [family.name]


@pytest.fixture(scope="module")
def exposed(
    pair: Pair, key_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, set[str] | None]:
    """Every metric of a real edge, of a device service and of a watch, with its labels.

    The labels of a metric that has no samples are those of its declaration, or None.
    """
    port = free_port()
    flags = ("--keys", key_folders["edge"], "--metrics", port, "--metrics-devices")
    with (
        running("--target", pair.target, "--threads", 1, *flags) as edge,
        Device(pair.draft, edge.endpoint, key_folders["alice"], threads=1) as device,
    ):
        device.generate([1, 2, 3], protocol="greedy", max_tokens=3)
        text = exposition(port)
    folder = tmp_path_factory.mktemp("board")
    sensor(folder, "1-0040", {1: ("VDD_IN", "5000", "2000")})
    with closing(service_metrics.ServiceMetrics(rails(folder))) as service:
        everything(service)
        end_s = time.monotonic() + 30.0
        while "power_watts" not in (metrics := service.exposition().decode()):
            assert time.monotonic() < end_s, "the sensor was not read"
            time.sleep(0.01)
        text += metrics
    labels_of: dict[str, set[str] | None] = {}
    for family in [*text_string_to_metric_families(text), *full_watch().families()]:
        labels_of |= dict.fromkeys(samples(family))
        labels_of |= {each.name: set(each.labels) for each in family.samples}
    for counts, prefix in COUNTED:
        for item in fields(counts):
            labels = set(item.metadata["labels"])
            for family in item.metadata["metrics"](prefix, getattr(counts, item.name)):
                for name in samples(family):
                    labels_of[name] = labels | ({"le"} if name.endswith("_bucket") else set())
    return labels_of


def expressions() -> Iterator[tuple[str, str]]:
    """Every expression of dashboards and alerts, with the place."""
    for dashboard in DASHBOARDS:
        for panel in dashboard.panels:
            for query in panel.queries:
                yield f"{dashboard.name}: {panel.title}", query.expression
    for name, text in monitoring_files().items():
        if name.endswith(".yml"):
            for block in text.split("- alert: ")[1:]:
                alert, _, rest = block.partition("\n")
                yield alert, re.split(r"\n +(?:for|labels):", rest)[0]


def test_every_metric_and_label_is_one_of_ours(exposed: dict[str, set[str] | None]) -> None:
    for place, expression in expressions():
        metrics = METRIC.findall(expression)
        assert metrics or expression.strip().startswith("expr: up{"), place
        for name, selector in metrics:
            assert name in exposed, place
            labels = exposed[name]
            matched = set(re.findall(r'(\w+)(?:=~|!~|!=|=)"', selector))
            assert labels is None or matched <= labels | SCRAPED, (place, name)
        every = [exposed[name] for name, _ in metrics]
        grouped = {each.strip() for words in BY.findall(expression) for each in words.split(",")}
        if None not in every:
            assert grouped <= SCRAPED.union(*filter(None, every)), place


@pytest.mark.parametrize(("place", "expression"), [*expressions()])
def test_counters_are_only_read_as_growth(place: str, expression: str) -> None:
    for match in re.finditer(r"\b\w+(?:_total|_bucket)(?:\{[^}]*\})?", expression):
        rest = expression[match.end() :]
        assert rest.startswith("["), (place, match[0])


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_each_panel_says_what_it_shows(dashboard: Dashboard) -> None:
    titles = [panel.title for panel in dashboard.panels]
    assert len(titles) == len({*titles})
    for panel in dashboard.panels:
        assert len(panel.description) > 20, panel.title
        assert panel.description.endswith("."), panel.title
        assert panel.unit in UNITS, panel.title
        assert all('instance=~"$instance"' in each.expression for each in panel.queries)


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_the_model_is_one_that_grafana_imports(dashboard: Dashboard) -> None:
    model = json.loads(grafana_json(dashboard))
    assert model["uid"] == f"pilotfish-{dashboard.name}"
    assert len(model["uid"]) <= 40  # Grafana's limit
    panels = model["panels"]
    assert [panel["id"] for panel in panels] == [*range(1, len(panels) + 1)]
    kinds = {panel["type"] for panel in panels}
    assert kinds <= {"row", "timeseries", "stat", "table", "heatmap"}  # none is deprecated
    for panel in panels:
        if panel["type"] != "row":
            targets = panel["targets"]
            assert len({each["refId"] for each in targets}) == len(targets) > 0
            sources = {each["datasource"]["uid"] for each in [panel, *targets]}
            assert sources == {"${DS_PROMETHEUS}"}
    variables = {each["name"]: each for each in model["templating"]["list"]}
    assert variables["DS_PROMETHEUS"]["type"] == "datasource"
    assert variables["instance"]["includeAll"] is True


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.name)
def test_panels_do_not_overlap(dashboard: Dashboard) -> None:
    grids = [panel["gridPos"] for panel in json.loads(grafana_json(dashboard))["panels"]]
    places = [
        place
        for grid in grids
        for place in product(
            range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"])
        )
    ]
    assert len(places) == len({*places})
    assert max(x for x, _ in places) < 24
    assert all(above["y"] <= below["y"] for above, below in pairwise(grids))


def test_the_command_writes_all_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "b"
    assert main(["dashboards", "--out", str(folder)]) == 0
    assert {path.name: path.read_text() for path in folder.iterdir()} == monitoring_files()
    assert len(capsys.readouterr().out.splitlines()) == 6
    (folder / "pilotfish-edge.json").write_text("old")
    assert main(["dashboards", "--out", str(folder)]) == 0
    assert json.loads((folder / "pilotfish-edge.json").read_text())["uid"] == "pilotfish-edge"


def test_the_command_says_where_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["dashboards", "--out", str(tmp_path / "file")]) == 74
    assert str(tmp_path / "file") in capsys.readouterr().err
    (tmp_path / "taken" / "pilotfish-edge.json").mkdir(parents=True)
    assert main(["dashboards", "--out", str(tmp_path / "taken")]) == 74
    assert "pilotfish-edge.json" in capsys.readouterr().err


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    (tmp_path / "pilotfish-edge.json").write_text("old")
    few_blocks = f"ulimit -f 8; {shlex.join(command('dashboards', '--out', tmp_path))}"
    ran = subprocess.run(["bash", "-c", few_blocks], capture_output=True, text=True, check=False)
    assert ran.returncode == 74
    assert str(tmp_path / "pilotfish-edge.json") in ran.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["pilotfish-edge.json"]
    assert (tmp_path / "pilotfish-edge.json").read_text() == "old"


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    provisioned, folder = tmp_path / "provisioned.json", tmp_path / "monitoring"
    provisioned.write_text("old")
    folder.mkdir()
    (folder / "pilotfish-edge.json").symlink_to(provisioned)
    assert main(["dashboards", "--out", str(folder)]) == 0
    assert (folder / "pilotfish-edge.json").is_symlink()
    assert json.loads(provisioned.read_text())["uid"] == "pilotfish-edge"
