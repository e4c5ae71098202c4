"""Write a run's report: a Markdown page with three plots, and a JSON file with the results."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pilotfish.base.files import PRIVATE, write_whole
from pilotfish.lab.distill.measuring import ALL
from pilotfish.lab.distill.outcome import DEPTH, Distilled
from pilotfish.lab.field.drawing import MARKERS, PALETTE, plot
from pilotfish.lab.field.report.canvas import escape_math, legend_below

_HEIGHT = 3.4  # height of a plot (inches)


def write(folder: Path, outcome: Distilled) -> Path:
    """Write the report into the folder; return the path of the Markdown page."""
    write_whole(folder / "report.json", _json(outcome), PRIVATE)
    _depths(folder / "depths.png", outcome)
    _kinds(folder / "kinds.png", outcome)
    _learning(folder / "learning.png", outcome)
    page = folder / "report.md"
    write_whole(page, _page(outcome).encode(), PRIVATE)
    return page


def _json(outcome: Distilled) -> bytes:
    return msgspec.json.format(msgspec.json.encode(outcome.figures())) + b"\n"


def _page(outcome: Distilled) -> str:
    before, after = outcome.before[ALL], outcome.after[ALL]
    lines = [
        f"# {outcome.drafter} for {outcome.target}",
        "",
        f"{outcome.learnt} answers of the target were used for training, and {outcome.held} "
        f"were held out; all answers have {outcome.tokens} tokens. {outcome.left_out} prompts "
        f"were too long and left out. Step {outcome.step} of {outcome.steps} gave the best "
        "weights.",
        "",
        f"On the held-out answers ({after.positions} positions), α went from {before.alpha:.3f} "
        f"to {after.alpha:.3f}, and S({DEPTH}) from {before.survival[DEPTH - 1]:.3f} to "
        f"{after.survival[DEPTH - 1]:.3f}, measured with the artifacts before and after training.",
        "",
        f"| kind | positions | α before | α after | change | S({DEPTH}) before "
        f"| S({DEPTH}) after |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for kind, places, alpha_before, alpha_after, survival, survival_after in outcome.rows:
        name = f"{kind} (not learnt)" if outcome.unlearnt(kind) else kind
        lines.append(
            f"| {_cell(name)} | {places} | {alpha_before:.3f} | {alpha_after:.3f} | "
            f"{alpha_after - alpha_before:+.3f} | {survival:.3f} | {survival_after:.3f} |"
        )
    lines += [
        "",
        "α: the share of positions at which the drafter's likeliest token equals the target's "
        "token, at temperature 0, after the target's own text. S(k): the share of runs that "
        "begin with k correct drafts; a new run begins at the start of an answer and after "
        "each wrong draft.",
        "",
        "![acceptance by depth](depths.png)",
        "![acceptance by kind](kinds.png)",
        "![learning](learning.png)",
        "",
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _depths(path: Path, outcome: Distilled) -> None:
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


def _kinds(path: Path, outcome: Distilled) -> None:
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


def _learning(path: Path, outcome: Distilled) -> None:
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
