"""The measured figures that the package ships, and the page that lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.engines.artifact import Artifact
from pilotfish.lab.field import papers
from pilotfish.lab.field.papers import PAPERS
from pilotfish.lab.field.papers.figure_file import file_name, shipped_figure

FIGURES = [(paper, figure) for paper in PAPERS for figure in PAPERS[paper].measurable]
SHIPPED = [
    pytest.param(paper, figure, shipped, id=f"{paper}-{figure.key}")
    for paper, figure in FIGURES
    if (shipped := shipped_figure(paper, figure.key)) is not None
]
ENOUGH_PROMPTS = 30  # a row with fewer prompts needs an interval
PAGE = Path(__file__).parents[3] / "docs" / "figures.md"


@pytest.mark.parametrize(("paper", "figure", "shipped"), SHIPPED)
def test_shipped_figures_are_of_the_papers_drafter(
    paper, figure, shipped, default_artifacts, drafter_named
):
    assert (shipped.facts.paper, shipped.facts.figure) == (paper, figure.key)
    drafter = Artifact.open(drafter_named(PAPERS[paper].drafter)).manifest
    target = Artifact.open(default_artifacts.target).manifest
    assert shipped.facts.drafter.digest == drafter.digest, "another drafter: make figures"
    # the target's digest depends on the version of the runtime that the artifact is for
    assert shipped.facts.target.origin == target.origin
    assert shipped.facts.target.precision == target.precision


@pytest.mark.parametrize(("paper", "figure", "shipped"), SHIPPED)
def test_shipped_figures_are_of_the_papers_head(paper, figure, shipped):
    name = PAPERS[paper].head
    digest = None if name is None else DecisionHead.load(name).card.sha256
    assert shipped.facts.head == digest, f"another head: make figures PAPERS={paper}"


@pytest.mark.parametrize(("paper", "figure", "shipped"), SHIPPED)
def test_shipped_rows_have_enough_prompts_or_an_interval(paper, figure, shipped):
    assert shipped.rows
    assert len({figure.identify(row) for row in shipped.rows}) == len(shipped.rows)
    for row in shipped.rows:
        has_interval = any(row[name] is not None for name in row if name.endswith("_low"))
        assert row["n"] >= ENOUGH_PROMPTS or has_interval
        assert figure.columns.keys() & row.keys()


def test_every_shipped_file_belongs_to_a_figure():
    folder = Path(papers.__file__).parent / "measured"
    names = {file_name(paper, figure.key) for paper, figure in FIGURES}
    files = {path.name for path in folder.iterdir()}
    assert files <= names
    assert files


def test_the_page_lists_the_command_of_every_figure():
    page = PAGE.read_text(encoding="utf-8")
    for paper, figure in FIGURES:
        assert f"`field paper {paper} {figure.key} --run` | {figure.minutes:.0f} |" in page
