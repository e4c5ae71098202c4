"""Write a run's report: a page with three plots, and a JSON file with the results."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pilotfish.base.files import PRIVATE, write_whole
from pilotfish.lab.distill.measuring import ALL
from pilotfish.lab.distill.outcome import DEPTH, Distilled
from pilotfish.lab.drawing import MARKERS, PALETTE, escape_math, legend_below, plot
from pilotfish.lab.page import Picture, Table, render_page

_HEADINGS = ("kind", "positions", "α before", "α after", "change", "S({}) before", "S({}) after")
_HEIGHT = 3.4  # height of a plot (inches)
_TEMPLATE = """\
{% extends "page" %}
{% from "parts" import table, pictures %}
{% block title %}
Pilotfish: {{ outcome.drafter }} for {{ outcome.target }}
{% endblock %}
{% block heading %}
{{ outcome.drafter }} for {{ outcome.target }}
{% endblock %}
{% block origin %}
Training of a drafter for its target, made {{ made }} by {{ software }}
{% endblock %}
{% block content %}
<p>{{ outcome.learnt }} answers of the target were used for training, and {{ outcome.held }} were
held out; all answers have {{ outcome.tokens }} tokens. {{ outcome.left_out }} prompts were too long
and left out. Step {{ outcome.step }} of {{ outcome.steps }} gave the best weights.</p>
<p>On the held-out answers ({{ after.positions }} positions), α went from
{{ "%.3f" | format(before.alpha) }} to {{ "%.3f" | format(after.alpha) }}, and S({{ depth }}) from
{{ "%.3f" | format(before.survival[depth - 1]) }} to
{{ "%.3f" | format(after.survival[depth - 1]) }}, measured with the artifacts before and after
training.</p>
{{ table(results) }}
<p class="soft">α: the share of positions at which the drafter's likeliest token equals the target's
token, at temperature 0, after the target's own text. S(k): the share of runs that begin with k
correct drafts; a new run begins at the start of an answer and after each wrong draft.</p>
{{ pictures(drawn) }}
{% endblock %}
"""


def write(folder: Path, outcome: Distilled) -> Path:
    """Write the report into the folder; return the path of the page."""
    write_whole(folder / "report.json", _json(outcome), PRIVATE)
    pictures = [draw(folder, outcome) for draw in (_depths, _kinds, _learning)]
    names = [name.format(DEPTH) for name in _HEADINGS]
    table = Table(headings=[("", name) for name in names], rows=outcome.cells)
    page = folder / "report.html"
    html = render_page(
        _TEMPLATE,
        outcome=outcome,
        before=outcome.before[ALL],
        after=outcome.after[ALL],
        depth=DEPTH,
        results=table,
        drawn=pictures,
    )
    write_whole(page, html.encode(), PRIVATE)
    return page


def _json(outcome: Distilled) -> bytes:
    return msgspec.json.format(msgspec.json.encode(outcome.figures())) + b"\n"


def _depths(folder: Path, outcome: Distilled) -> Picture:
    path = folder / "depths.png"
    places = outcome.before[ALL].positions
    title = f"Runs of correct drafts (n = {places} held-out positions)"
    with plot(path, title, "k, number of correct drafts in a row", "S(k), share of runs") as axes:
        for index, (name, figures) in enumerate(
            (("before", outcome.before[ALL]), ("after", outcome.after[ALL]))
        ):
            depths = range(1, len(figures.survival) + 1)
            label = f"{name}, S({DEPTH}) = {figures.survival[DEPTH - 1]:.3f}"
            axes.plot(
                depths, figures.survival, color=PALETTE[index], marker=MARKERS[index], label=label
            )
        axes.set_ylim(0.0, 1.0)
        axes.legend()
    return Picture(path=path, alt=title)


def _kinds(folder: Path, outcome: Distilled) -> Picture:
    path = folder / "kinds.png"
    rows = outcome.rows
    inches = (4.8, max(_HEIGHT, 1.2 + 0.35 * len(rows)))
    title = "α by kind of prompt (○ before, ● after training; * kind not in training)"
    with plot(
        path, title, "α, share of positions at which drafter and target agree", "", inches
    ) as axes:
        for row, (_, _, before, after, *_) in enumerate(reversed(rows)):
            colour = PALETTE[0] if after >= before else PALETTE[1]
            axes.plot([before, after], [row, row], color=colour)
            axes.plot([before], [row], marker="o", color=colour, fillstyle="none")
            axes.plot([after], [row], marker="o", color=colour)
        names = [
            escape_math(f"{kind}{'*' * outcome.unlearnt(kind)} (n = {places})")
            for kind, places, *_ in reversed(rows)
        ]
        axes.set_yticks(range(len(rows)), names)
    return Picture(path=path, alt=title)


def _learning(folder: Path, outcome: Distilled) -> Picture:
    path = folder / "learning.png"
    measured_alpha = [(line["step"], line["alpha"]) for line in outcome.curve if "alpha" in line]
    losses = [(line["step"], line["hard"]) for line in outcome.curve if "hard" in line]
    title = f"Learning ({outcome.learnt} answers; best at step {outcome.step})"
    with plot(path, title, "steps", "α on held-out answers") as axes:
        axes.plot(*zip(*measured_alpha, strict=True), color=PALETTE[0], marker="o", label="α")
        axes.axvline(outcome.step, color="#999999", linewidth=0.8)
        if losses:
            other = axes.twinx()
            other.plot(
                *zip(*losses, strict=True), color=PALETTE[1], linewidth=0.8, alpha=0.7, label="loss"
            )
            other.set_ylabel("loss, nats per token")
            other.grid(visible=False)
            other.spines["right"].set_visible(True)
        legend_below(axes)
    return Picture(path=path, alt=title)
