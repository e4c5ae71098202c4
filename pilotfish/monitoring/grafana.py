"""Convert a dashboard to the JSON that Grafana imports (classic model, `_SCHEMA`).

The data source is a variable of the dashboard, so the same file can be imported on the page and
provisioned from a folder. The reader chooses the instances by a second variable.
"""

import json
from typing import Any, Final

from pilotfish.monitoring.dashboard import Dashboard, Panel, Query

_SCHEMA: Final = 39  # of Grafana 10.3; later versions convert it when they load it
_COLUMNS: Final = 24
_HEIGHTS: Final = {"timeseries": 8, "heatmap": 8, "stat": 4, "table": 6}
_SOURCE: Final = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
_TAGS: Final = ["pilotfish"]


def grafana_json(dashboard: Dashboard) -> str:
    """Return the JSON text of a dashboard."""
    return json.dumps(_model(dashboard), indent=2) + "\n"


def _model(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": _TAGS,
        "schemaVersion": _SCHEMA,
        "editable": True,
        "graphTooltip": 1,  # one crosshair in all panels
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": _variables(dashboard)},
        "annotations": {"list": []},
        "links": [_link_to_others()],
        "panels": _panels(dashboard),
    }


def _variables(dashboard: Dashboard) -> list[dict[str, Any]]:
    query = f"label_values({dashboard.instances}, instance)"
    return [
        {
            "type": "datasource",
            "name": "DS_PROMETHEUS",
            "label": "Prometheus",
            "query": "prometheus",
            "current": {},
            "hide": 0,
            "includeAll": False,
            "multi": False,
            "refresh": 1,
        },
        {
            "type": "query",
            "name": "instance",
            "label": "Instance",
            "datasource": _SOURCE,
            "definition": query,
            "query": {"query": query, "refId": "instance"},
            "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            "hide": 0,
            "includeAll": True,
            "multi": True,
            "refresh": 2,  # when the time range changes
            "sort": 1,
        },
    ]


def _link_to_others() -> dict[str, Any]:
    """Return the menu of all dashboards with the same tag."""
    return {
        "type": "dashboards",
        "title": "Pilotfish",
        "tags": _TAGS,
        "asDropdown": True,
        "includeVars": False,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def _panels(dashboard: Dashboard) -> list[dict[str, Any]]:
    """Return rows and panels. Panels stand side by side until the columns are full."""
    panels: list[dict[str, Any]] = []
    y = 0
    for section in dashboard.sections:
        panels.append(
            {
                "type": "row",
                "title": section.title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": _COLUMNS, "h": 1},
            }
        )
        x, y, height = 0, y + 1, 0
        for panel in section.panels:
            if x + panel.width > _COLUMNS:
                x, y, height = 0, y + height, 0
            grid = {"x": x, "y": y, "w": panel.width, "h": _HEIGHTS[panel.kind]}
            panels.append({**_panel(panel), "gridPos": grid})
            x, height = x + panel.width, max(height, grid["h"])
        y += height
    return [{"id": number, **panel} for number, panel in enumerate(panels, 1)]


def _panel(panel: Panel) -> dict[str, Any]:
    needs = f" Empty unless {panel.needs}." if panel.needs else ""
    custom, options = _settings(panel)
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description + needs,
        "datasource": _SOURCE,
        "targets": [
            _target(panel, letter, query)
            for letter, query in zip("ABCDEFGH", panel.queries, strict=False)
        ],
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": options,
        "transformations": _transformations(panel),
    }


def _target(panel: Panel, letter: str, query: Query) -> dict[str, Any]:
    now = panel.kind in ("stat", "table")
    formats = {"table": "table", "heatmap": "heatmap"}
    return {
        "refId": letter,
        "datasource": _SOURCE,
        "editorMode": "code",
        "expr": query.expression,
        "format": formats.get(panel.kind, "time_series"),
        "instant": now,
        "range": not now,
        "legendFormat": query.legend,
    }


def _settings(panel: Panel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the field's own settings and the options of a kind of panel."""
    if panel.kind == "timeseries":
        custom = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "auto",
            "spanNulls": False,  # a time without values is a gap
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        }
        legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
        return custom, {"legend": legend, "tooltip": {"mode": "multi", "sort": "desc"}}
    if panel.kind == "stat":
        reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
        return {}, {
            "reduceOptions": reduce,
            "colorMode": "none",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "auto",
        }
    if panel.kind == "heatmap":
        return {}, {
            "calculate": False,
            "cellGap": 1,
            "color": {"mode": "scheme", "scheme": "Oranges", "steps": 64, "reverse": False},
            "legend": {"show": True},
            "tooltip": {"mode": "single", "yHistogram": False},
            "yAxis": {"unit": panel.unit, "axisPlacement": "left"},
        }
    return {}, {"showHeader": True, "cellHeight": "sm"}


def _transformations(panel: Panel) -> list[dict[str, Any]]:
    """Return those of a table, which shows the labels of each instance and no time."""
    if panel.kind != "table":
        return []
    hidden = {"Time": True, "Value": True, "__name__": True, "job": True}
    return [{"id": "organize", "options": {"excludeByName": hidden}}]
