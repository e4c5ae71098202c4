"""Make a page of results: one HTML file that needs no network, no other file and no script.

In: a Jinja template that extends "page", and its values. It fills the blocks ``title``,
``heading``, ``origin`` (a line below the heading) and ``content``, and imports ``table`` and
``pictures`` from "parts". Out: HTML, in which all text of the values is escaped.

The page is legible at a width of 360 CSS pixels. Only tables are wider than a phone; each table
scrolls in a separate box. Colours follow the reader's light or dark scheme, also those of plots: a
dark scheme inverts their lightness and keeps their hues.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import jinja2

from pilotfish.base.version import SOFTWARE


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The file of a plot. alt: description of the plot in words, with units and counts.

    narrow: file of the same plot for a narrow screen. With it, ``path`` is as wide as the page.
    """

    path: Path
    alt: str
    narrow: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table. headings: group and heading of each column; a group's columns are adjacent."""

    headings: list[tuple[str, str]]
    rows: list[list[str]]
    best: int | None = None  # index of the row that is marked as the best


def render_page(template: str, **values: Any) -> str:
    """Render a page. ``made`` and ``software``: time and version, which every template may use."""
    # autoescape treats every value as text, unless the template marks the value as HTML
    environment = jinja2.Environment(
        autoescape=True,
        loader=jinja2.DictLoader({"page": _FRAME, "parts": _PARTS}),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["embedded"] = _embed
    environment.filters["groups"] = _groups
    made = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return environment.from_string(template).render(made=made, software=SOFTWARE, **values)


def _embed(path: Path) -> str:
    """Encode a PNG as a data URI."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()


def _groups(headings: Sequence[tuple[str, str]]) -> list[tuple[str, int]]:
    """Return each group of a table's headings, with the group's number of columns."""
    return [(name, len(list(columns))) for name, columns in groupby(headings, itemgetter(0))]


_PARTS = """\
{% macro table(content) %}
<div class="wide" tabindex="0"><table>
<thead>
{% if content.headings | map(attribute=0) | select | list %}
<tr>
{% for name, width in content.headings | groups %}
<th colspan="{{ width }}">{{ name }}</th>
{% endfor %}
</tr>
{% endif %}
<tr>{% for _, heading in content.headings %}<th scope="col">{{ heading }}</th>{% endfor %}</tr>
</thead>
<tbody>
{% for row in content.rows %}
<tr{% if loop.index0 == content.best %} class="best"{% endif %}>
<th scope="row">{{ row[0] }}</th>
{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}
</tr>
{% endfor %}
</tbody>
</table></div>
{% endmacro %}
{% macro pictures(found) %}
<div class="pictures">
{% for picture in found %}
{% if picture.narrow %}
<figure class="as-wide"><picture>
<source media="screen and (max-width: 48rem)" srcset="{{ picture.narrow | embedded }}">
<img src="{{ picture.path | embedded }}" alt="{{ picture.alt }}">
</picture></figure>
{% else %}
<figure><img src="{{ picture.path | embedded }}" alt="{{ picture.alt }}"></figure>
{% endif %}
{% endfor %}
</div>
{% endmacro %}
"""

_FRAME = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{% block title %}{% endblock %}</title>
<style>
:root { --ink: #1a1f24; --soft: #5a656f; --line: #d9dee3; --paper: #fbfbfa; --card: #fff;
  --mark: #e3f0e8; --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --soft: #9aa5af; --line: #343b42; --paper: #14181c; --card: #1c2126;
    --mark: #1e3a2c; --accent: #7cc4f0; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 4rem; max-width: 76rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif;
  overflow-wrap: break-word; }
header { border-bottom: 3px solid var(--accent); margin-bottom: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; padding-top: .5rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.4rem 0 .3rem; }
p { margin: .4rem 0 .8rem; max-width: 44rem; }
header p, .soft { color: var(--soft); font-size: .9rem; }
p.soft { margin: .4rem 0; }
dl { margin: .4rem 0; }
dt { font-weight: 600; }
dd { margin: 0 0 .6rem; }
.wide { overflow-x: auto; max-width: 100%; border: 1px solid var(--line); border-radius: 6px;
  background: var(--card); margin: .4rem 0 1rem; }
table { border-collapse: collapse; font-size: .84rem; font-variant-numeric: tabular-nums;
  min-width: 100%; }
th, td { padding: .28rem .6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
thead th { color: var(--soft); font-weight: 600; border-bottom-color: var(--soft); }
thead tr:not(:last-child) th { text-align: center; border-bottom-color: var(--line); }
tbody th, thead tr:last-child th:first-child { text-align: left; position: sticky; left: 0;
  background: var(--card); font-weight: 600; border-right: 1px solid var(--line); }
tbody tr:last-child > * { border-bottom: 0; }
tr.best > *, tr.best > th { background: var(--mark); }
.facts td, .facts thead th { text-align: left; white-space: normal; min-width: 11rem; }
.facts tbody th { white-space: normal; max-width: 8.5rem; font-weight: 500; color: var(--soft); }
.reasons th:last-child, .reasons td:last-child { text-align: left; white-space: normal;
  min-width: 18rem; }
.pictures { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
.pictures + .pictures { margin-top: 1rem; }
figure { margin: 0; padding: .5rem; background: #fff; border: 1px solid var(--line);
  border-radius: 6px; max-width: 30rem; }
figure img { display: block; width: 100%; height: auto; }
figure.as-wide { max-width: none; grid-column: 1 / -1; }
@media (prefers-color-scheme: dark) {
  figure { background: #16191c; }
  figure img { filter: invert(.91) hue-rotate(180deg); } /* keeps hues, turns white to the card */
}
summary { cursor: pointer; color: var(--accent); margin: .6rem 0; }
@media (max-width: 30rem) { body { padding: 1rem .7rem 3rem; } figure { padding: .25rem; } }
@page { margin: 14mm 12mm; }
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --card: #fff; --mark: #eee;
    --accent: #0072b2; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .wide { overflow: visible; border: 0; }
  table { font-size: 6.8pt; } th, td { padding: .12rem .25rem; }
  tbody th { position: static; }
  figure, tr, p, h2, h3 { break-inside: avoid; } h2, h3, h2 + p { break-after: avoid; }
  .pictures { grid-template-columns: 1fr 1fr; }
  p { max-width: none; }
  details:not([open]) { display: none; } /* a closed one has nothing to read on paper */
  figure { background: #fff; } figure img { filter: none; }
}
</style>
</head>
<body>
<header>
<h1>{% block heading %}{% endblock %}</h1>
<p>{% block origin %}{% endblock %}</p>
</header>
{% block content %}
{% endblock %}
</body>
</html>
"""
