"""``pilotfish export model … --precision auto``: choose the fastest drafter by trial."""

import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Struct
from rich.console import Console
from rich.table import Table

from pilotfish.base.progress import ProgressDisplay
from pilotfish.base.settings import setting
from pilotfish.cli.default_models import target_folder
from pilotfish.cli.extras import export_tools
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import EngineError
from pilotfish.engines.manifest import STORED, Precision
from pilotfish.speculation.speeds import pick_drafter

if TYPE_CHECKING:
    from pilotfish.device_runtime.drafter_trial import DrafterTrial

AUTO: Final = "auto"
_UNTRIED: Precision = "int8"
_REFERENCE: Precision = "fp32"
# Precisions to try, the smallest first; `stored` is tried only if the source has blocks.
_CANDIDATES: tuple[Precision, ...] = (STORED, "int4", "int8", "fp16", _REFERENCE)
_COLUMNS = ("precision", "MiB", "α", "greedy", "ms per draft", "window", "tokens/s", "× stream")
_RTT_S = 0.02
_Export = Callable[[Precision, Path], None]


GROUP = setting(
    "Tries stored, int4, int8 and fp32 as drafters and keeps the one with the most tokens/s, "
    "which is predicted from the acceptance and times measured here. The trial takes a minute "
    "or two, and memory for all these drafters and the target at once. Without --target and "
    "--target-ms, there is no trial and int8 is taken.",
    title="--precision auto",
)


class TrialSettings(Struct, frozen=True, kw_only=True):
    """The target and the link of the trial that chooses a precision."""

    target: (
        Annotated[Path, setting("the target, as for `edge serve`, to run here", metavar="MODEL")]
        | None
    ) = None
    target_ms: (
        Annotated[
            float,
            setting(
                "duration of a target's pass on its future machine, in milliseconds; without "
                "--target, acceptance is measured against the source model itself in fp32",
                gt=0,
                metavar="T",
            ),
        ]
        | None
    ) = None
    rtt_s: (
        Annotated[
            float,
            setting(
                "round trip of the link, e.g. 50ms (default: 20ms)", form="duration", metavar="TIME"
            ),
        ]
        | None
    ) = None

    @property
    def requested(self) -> bool:
        """Whether the options name a target and thus request a trial."""
        return self.target is not None or self.target_ms is not None

    @property
    def link_s(self) -> float:
        """The round trip of the link, in seconds."""
        return _RTT_S if self.rtt_s is None else self.rtt_s

    def problem(self, precision: str) -> str:
        """Say what is wrong with these options at this precision; "" if nothing is."""
        options = {"--target": self.target, "--target-ms": self.target_ms, "--rtt": self.rtt_s}
        named = [name for name, value in options.items() if value is not None]
        if named and precision != AUTO:
            return f"{named[0]} goes with --precision auto"
        if named == ["--rtt"]:
            return (
                "--rtt needs a target with which the drafters are tried: --target DIR or "
                "--target-ms T"
            )
        return ""


def default_choice() -> Precision:
    """Return the precision for an export without a trial, and print why."""
    print(
        f"pilotfish: chose {_UNTRIED} without a trial, since its acceptance is close to fp32's "
        "for all weights; a trial needs --target DIR or --target-ms T",
        file=sys.stderr,
    )
    return _UNTRIED


def export_fastest(out: Path, dialect: str, pair: TrialSettings, export: _Export) -> None:
    """Export the candidates, try them, print the measured values, and move the fastest to `out`."""
    with export_tools():
        from pilotfish.export.atomic import replacing
    from pilotfish.device_runtime.drafter_trial import (
        try_drafters,  # imports the engines
    )
    from pilotfish.lab.prompts import BUILT_IN

    target = None if pair.target is None else Artifact.open(target_folder(pair.target))
    with replacing(out) as partial:
        folder = partial / "candidates"
        candidates = _export_candidates(folder, dialect, export)
        with ProgressDisplay() as display:
            trials = try_drafters(
                candidates,
                target or candidates[_REFERENCE],
                BUILT_IN,
                rtt_s=pair.link_s,
                target_s=None if pair.target_ms is None else pair.target_ms * 1e-3,
                progress=display.show,
            )
        best = pick_drafter({name: trial.tokens_per_s for name, trial in trials.items()})
        _print_trials(trials, candidates, best, pair, target)
        for file in candidates[best].path.iterdir():
            file.rename(partial / file.name)
        shutil.rmtree(folder)


def _export_candidates(folder: Path, dialect: str, export: _Export) -> dict[str, Artifact]:
    """Export the candidates that the dialect and the weights allow."""
    from pilotfish.export.dialects import DIALECTS

    if dialect == AUTO:  # no fp16: CPUs compute it in float32, with casts
        allowed: Sequence[str] = [name for name in _CANDIDATES if name != "fp16"]
    else:
        allowed = DIALECTS[dialect].precisions
    candidates: dict[str, Artifact] = {}
    for precision in _CANDIDATES:
        if precision not in allowed:
            continue
        try:
            export(precision, folder / precision)
        except EngineError as error:
            if precision == _REFERENCE:
                raise
            if precision != STORED:
                print(f"pilotfish: {precision} is not tried: {error}", file=sys.stderr)
            continue
        candidates[precision] = Artifact.open(folder / precision)
    return candidates


def _print_trials(
    trials: "dict[str, DrafterTrial]",
    candidates: dict[str, Artifact],
    best: str,
    pair: TrialSettings,
    target: Artifact | None,
) -> None:
    console = Console(stderr=True, highlight=False)
    table = Table(title=f"predicted speed of the drafters at RTT {pair.link_s * 1e3:g} ms")
    for heading in _COLUMNS:
        table.add_column(heading, justify="right")
    for name, trial in trials.items():
        table.add_row(
            f"[bold]{name}[/]" if name == best else name,
            f"{sum(file.stat().st_size for file in candidates[name].path.iterdir()) / 2**20:.0f}",
            f"{trial.acceptance:.3f}",
            f"{trial.agreement:.3f}",
            f"{trial.draft_s * 1e3:.2f}",
            f"{trial.window}",
            f"{trial.tokens_per_s:.1f}",
            f"{trial.tokens_per_s / trial.streamed_per_s:.2f}",
        )
    console.print(table)
    for line in _reasons(trials, best, pair, target):
        console.print(line, markup=False)


def _why(trials: "dict[str, DrafterTrial]", best: str) -> str:
    fastest = max(trials, key=lambda name: trials[name].tokens_per_s)
    return "" if fastest == best else f", as fast as {fastest} and smaller"


def _reasons(
    trials: "dict[str, DrafterTrial]", best: str, pair: TrialSettings, target: Artifact | None
) -> list[str]:
    """Explain in sentences what α is measured against, and the choice."""
    winner = trials[best]
    along = f"on {winner.positions} tokens of its answers to five prompts"
    if target is None:
        lines = [
            f"α is the acceptance by the same model in {_REFERENCE}, {along}: it shows only "
            "the loss by rounding. A real target accepts less from every precision, and the "
            "precisions differ less: name it by --target DIR if you can."
        ]
    else:
        lines = [
            f"α: the share of draft tokens that {target.manifest.model} accepts at temperature 1, "
            f"{along}; greedy: at temperature 0."
        ]
    others = ", ".join(
        f"{name} {trial.tokens_per_s:.1f}" for name, trial in trials.items() if name != best
    )
    lines.append(
        f"{best} is taken{_why(trials, best)}: {winner.tokens_per_s:.1f} tokens/s with window "
        f"{winner.window}{f' ({others})' if others else ''}; the target alone streams "
        f"{winner.streamed_per_s:.1f}."
    )
    if winner.tokens_per_s <= winner.streamed_per_s:
        lines.append(
            "No precision beats the target alone: drafting does not pay with this pair and link."
        )
    return lines
