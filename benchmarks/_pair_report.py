"""The tables that lines of answers add up to."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import nan
from statistics import median
from typing import Any

import numpy as np
from _common import Goal, Rows, at_most
from _pair_partings import partings
from _pair_runs import ALONE, BRIDGED, Line, Run

from pilotfish.device_runtime.record import STAGES

GROUPS = {"questions": ("question",), "chats": ("chat",), "all": ("question", "chat")}
SPEED = (
    *("prompts", "run", "answers", "equal", "tie", "shape", "differ", "alpha"),
    *("tokens_per_round", "tokens_per_s", "ratio", "q1", "q3", "whole_per_s", "whole_ratio"),
)
PARTS = (
    *("run", *(f"{stage}_ms" for stage in STAGES)),
    *(f"bridge_{name}_ms" for name in BRIDGED),
    *("bridge_ms", "bridge_p99_ms"),
)
Said = Mapping[str, Any]


def rows(lines: Sequence[Line], partings: Sequence[Line], every: Sequence[Run]) -> Rows:
    """A row for each group of prompts and run. partings: the verdicts on differing answers."""
    verdicts = {(item["parting"], item["run"]): item["verdict"] for item in partings}
    made: Rows = []
    for group, kinds in GROUPS.items():
        members = [line for line in lines if line["kind"] in kinds]
        made += [_row(group, members, run, verdicts) for run in every if members]
    return made


def _row(
    group: str, lines: Sequence[Line], run: Run, verdicts: Mapping[tuple[str, str], str]
) -> dict[str, Any]:
    answers = [line["runs"][run.name] for line in lines]
    alone = [line["runs"][ALONE[run.temperature]] for line in lines]
    row: dict[str, Any] = {"prompts": group, "run": run.name, "answers": len(answers)}
    row |= dict.fromkeys(("tie", "shape", "differ"), 0)
    for line in lines:
        for parting, _ in partings(line, [run]):
            row[verdicts.get((line["prompt"], parting.name), "differ")] += 1
    row["equal"] = len(answers) - row["tie"] - row["shape"] - row["differ"]
    steady = _steady(answers)
    speeds = [_after_first(answer) for answer in answers]
    whole = [_whole(line, run) for line in lines]
    whole_alone = [_whole(line, Run(run.temperature)) for line in lines]
    ratios = _ratios(speeds, map(_after_first, alone))
    return row | {
        "alpha": _acceptance(answers) if run.window is not None else "",
        "tokens_per_round": float(np.mean(steady["committed"])) if steady["committed"] else nan,
        "tokens_per_s": _quantile([answer for answer in speeds if answer], 0.5),
        "ratio": _quantile(ratios, 0.5),
        "q1": _quantile(ratios, 0.25),
        "q3": _quantile(ratios, 0.75),
        "whole_per_s": median(whole),
        "whole_ratio": median(_ratios(whole, whole_alone)),
        **{f"{stage}_ms": _quantile(steady[stage], 0.5) for stage in STAGES},
        **{f"bridge_{name}_ms": _quantile(steady[name], 0.5) for name in BRIDGED},
        "bridge_ms": _quantile(steady["bridge"], 0.5),
        "bridge_p99_ms": _quantile(steady["bridge"], 0.99),
    }


def _quantile(values: Sequence[float], share: float) -> float:
    """NaN of nothing: answers may be too short to have a round in their middle."""
    return float(np.quantile(values, share)) if values else nan


def _steady(answers: Iterable[Said]) -> dict[str, list[float]]:
    """Of all rounds but each answer's first and last: tokens, stages and the bridge's cost."""
    results: dict[str, list[float]] = {}
    for answer in answers:
        spent = answer["bridge_ms"]
        columns: dict[str, Sequence[float]] = {
            "committed": answer["committed"],
            **answer["stages_ms"],
            **spent,
            "bridge": [sum(parts) for parts in zip(*spent.values(), strict=True)],
        }
        for name, values in columns.items():
            results.setdefault(name, []).extend(values[1:-1])
    return results


def _acceptance(answers: Iterable[Said]) -> float:
    """α of all rounds but each answer's last (tslt Definition 2.1)."""
    rounds = list(
        chain.from_iterable(
            list(zip(answer["window"], answer["accepted"], strict=True))[:-1] for answer in answers
        )
    )
    verified = sum(min(window, accepted + 1) for window, accepted in rounds)
    return sum(accepted for _, accepted in rounds) / verified if verified else 0.0


def _after_first(answers: Said) -> float:
    """Tokens a second after the first round; 0 for an answer of one round."""
    tokens = sum(answers["committed"][1:])
    return tokens / (answers["total_s"] - answers["first_token_s"]) if tokens else 0.0


def _whole(line: Line, run: Run) -> float:
    """Tokens a second of an answer whose prompt has to be read first.

    Of the drafter's reading, which a device does while the edge reads, nothing is left out: here
    both have the same cores.
    """
    reply = line["runs"][run.name]
    read_s = line["target_read_s"]
    if run.window is not None:
        read_s += line["drafter_read_s"]
    return float(len(reply["tokens"]) / (read_s + reply["total_s"]))


def _ratios(ours: Iterable[float], theirs: Iterable[float]) -> list[float]:
    """Prompt by prompt, where there are both."""
    return [a / b for a, b in zip(ours, theirs, strict=True) if a and b]


def shape_rows(lines: Sequence[Line]) -> Rows:
    """How much reading several tokens at once changes the lead of the best one."""
    made: Rows = []
    for width in sorted({item["width"] for item in lines}):
        same = [item for item in lines if item["width"] == width]
        leads = np.concatenate([item["leads"] for item in same])
        changes = np.abs(np.concatenate([item["changes"] for item in same]))
        changed = leads + np.concatenate([item["changes"] for item in same]) < 0
        made.append(
            {
                "width": width,
                "positions": len(leads),
                "change_p50": float(np.quantile(changes, 0.5)),
                "change_p99": float(np.quantile(changes, 0.99)),
                "change_max": float(changes.max()),
                "closest_lead": float(leads.min()),
                "overturned": int(changed.sum()),
            }
        )
    return made


SHAPES = (
    *("width", "positions", "change_p50", "change_p99", "change_max"),
    *("closest_lead", "overturned"),
)


def goals(made: Rows) -> list[Goal]:
    """That texts are equal, and what the bridge may cost."""
    drafting = [row for row in made if row["prompts"] == "all" and row["alpha"] != ""]
    return [
        at_most(
            "answers that part otherwise than by a pass's shape",
            sum(row["differ"] for row in drafting),
            0,
        ),
        at_most(
            "the bridge's milliseconds a round (the largest p50)",
            max(row["bridge_ms"] for row in drafting),
            0.5,
        ),
    ]
