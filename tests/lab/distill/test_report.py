"""The report of a run: one page with its table and plots, in which no text is taken for HTML."""

from __future__ import annotations

import base64
import json
from html.parser import HTMLParser
from pathlib import Path

from pilotfish.lab.distill.distill_report import write
from pilotfish.lab.distill.outcome import Distilled
from pilotfish.lab.distill.training_rows import Agreement


def agreement(alpha: float) -> Agreement:
    return Agreement(positions=40, alpha=alpha, survival=[alpha**k for k in range(1, 9)])


def outcome(**changes: str) -> Distilled:
    names = {"drafter": "small", "target": "large", **changes}
    return Distilled(
        **names,
        artifact="out",
        learnt=3,
        held=2,
        tokens=80,
        left_out=1,
        kinds=["chat"],
        before={"all": agreement(0.5), "chat": agreement(0.5), "code <$x_{$>": agreement(0.4)},
        after={"all": agreement(0.75), "chat": agreement(0.75), "code <$x_{$>": agreement(0.3)},
        step=20,
        steps=40,
        curve=[{"step": 20, "alpha": 0.75}, {"step": 21, "loss": 1.0, "hard": 1.5}],
    )


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag == "img":
            self.sources.append(dict(attrs)["src"] or "")

    def handle_data(self, data: str) -> None:
        self.words += data.split()
        if self.rows and data.strip():
            self.rows[-1].append(data.strip())


def test_the_page_has_the_figures_and_the_plots(tmp_path: Path) -> None:
    page = Page(write(tmp_path, outcome()).read_text())
    text = " ".join(page.words)
    assert "small for large" in text
    assert "3 answers of the target were used for training, and 2 were held out" in text
    assert "(40 positions), α went from 0.500 to 0.750, and S(4) from 0.062 to 0.316" in text
    assert "Step 20 of 40 gave the best weights." in text
    assert page.rows[1] == ["chat", "40", "0.500", "0.750", "+0.250", "0.062", "0.316"]
    assert page.rows[2][:2] == ["code <$x_{$> (not learnt)", "40"]
    assert page.rows[3][0] == "all"
    pictures = [tmp_path / name for name in ("depths.png", "kinds.png", "learning.png")]
    assert page.sources == [
        f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" for path in pictures
    ]
    assert json.loads((tmp_path / "report.json").read_text())["after"]["all"]["alpha"] == 0.75


def test_names_are_no_html(tmp_path: Path) -> None:
    name = "<b>a & $x_{$</b>"
    text = write(tmp_path, outcome(drafter=name)).read_text()
    assert "<b>" not in text
    assert name in " ".join(Page(text).words)
