"""Tables 1 and 2 of decentralized as printed, and what follows from their numbers.

The paper defines none of the symbols in table 1: t, k, qx, topk, τ in a row, multi, r, and "system
level scaling (latency ratio)" with d. This module states how each is read, which option of
Pilotfish corresponds to it, and what the printed speed and length imply. Eagle-3 was never run with
Pilotfish: its numbers here are the paper's.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pilotfish.lab.field.papers.sheet import Row, Sheet, Value
from pilotfish.lab.statistics import share_interval
from pilotfish.speculation.theory import tokens_per_round

WINDOW = 8  # γ of table 2
PROBLEMS = {"HumanEval": 164, "GSM8K": 1319}
_LLAMA, _QWEN = "Llama3.1-8B", "Qwen3-8B"


class PrintedRow(NamedTuple):
    """A row of table 1. base, accuracy: columns "Base Acc" and "Eagle3 Acc"; speed, length: × and
    "Avg len"; None if the cell is empty. setting: key in `READINGS`."""

    task: str
    target: str
    printed: str
    setting: str
    base: float
    accuracy: float | None
    speed: float | None
    length: float | None


class Reading(NamedTuple):
    """How a setting of table 1 is read. option: flags of ``pilotfish device run``; "" for none."""

    meaning: str
    option: str = ""


READINGS = {
    "t=0, qx=1": Reading(
        "temperature 0; the draft token is the argmax",
        "--protocol greedy --window 8 --temperature 0",
    ),
    "t=1, qx=1": Reading(
        "q(x) = 1: the draft token is the argmax of q, accepted with probability p(x)",
        "--protocol tslt --window 8 --temperature 1 --draft-temperature 0",
    ),
    "t=1, qx=x": Reading(
        "the draft token is sampled from q, accepted with probability min(1, p/q)",
        "--protocol tslt --window 8 --temperature 1",
    ),
    "t=1, qx=x, topk": Reading(
        "q is truncated to its top k; k is not printed, 10 is ours",
        "--protocol tslt --window 8 --temperature 1 --draft-top-k 10",
    ),
    "t=1, qx=x, topk, τ": Reading(
        "and relaxed by τ, (8); neither τ nor λ is printed, the values are ours",
        "--protocol adaptive --window 8 --temperature 1 --draft-top-k 10 --tau 0.2",
    ),
    "multi": Reading("not defined: several candidates, or several nodes"),
    "r": Reading("not defined: a lower r accepts more, so it relaxes the acceptance"),
    "ratio": Reading("not defined; d = ln(ratio), so a threshold of a ratio of probabilities fits"),
    "t": Reading("only the temperature is printed"),
}
TABLE1 = (
    PrintedRow("HumanEval", _LLAMA, "t=0.0, qx=1", "t=0, qx=1", 0.6707, 0.6707, 4.80, 5.93),
    PrintedRow("HumanEval", _LLAMA, "t=1.0, qx=1", "t=1, qx=1", 0.5, 0.5915, 2.85, 5.26),
    PrintedRow(
        "HumanEval", _LLAMA, "t=1.0, qx=x, topk", "t=1, qx=x, topk", 0.5, 0.5549, 1.36, 1.98
    ),
    PrintedRow(
        "HumanEval", _LLAMA, "t=1.0, qx=x, topk, τ", "t=1, qx=x, topk, τ", 0.5, 0.5549, 1.33, 1.98
    ),
    PrintedRow("HumanEval", _LLAMA, "t=0.0, multi", "multi", 0.6707, 0.6890, None, None),
    PrintedRow("HumanEval", _LLAMA, "t=1.0, qx=x, multi", "multi", 0.5, 0.5061, 1.36, 1.98),
    PrintedRow("HumanEval", _QWEN, "t=1, k=1, qx=1", "t=1, qx=1", 0.8537, 0.8171, 2.31, 3.34),
    PrintedRow("HumanEval", _QWEN, "t=1, k=1, qx=x", "t=1, qx=x", 0.8537, 0.8476, 2.46, 3.55),
    PrintedRow("HumanEval", _QWEN, "t=1, k=1, qx=x, r=0.92", "r", 0.8537, 0.8598, 2.54, 3.81),
    PrintedRow("HumanEval", _QWEN, "t=1, k=1, qx=x, r=0.90", "r", 0.8537, 0.8476, 2.56, 3.86),
    PrintedRow("HumanEval", _QWEN, "t=1, k=1, qx=x, r=0.87", "r", 0.8537, 0.8049, 2.62, 3.88),
    PrintedRow("HumanEval", _QWEN, "t=1, k=1, qx=x, r=0.82", "r", 0.8537, 0.7988, 2.59, 3.92),
    PrintedRow("HumanEval", _QWEN, "ratio 1.2, d=0.1823", "ratio", 0.8537, 0.8354, 2.33, 3.58),
    PrintedRow("HumanEval", _QWEN, "ratio 1.3, d=0.2624", "ratio", 0.8537, 0.8537, 2.38, 3.61),
    PrintedRow("HumanEval", _QWEN, "ratio 1.4, d=0.3365", "ratio", 0.8537, 0.8598, 2.35, 3.59),
    PrintedRow("HumanEval", _QWEN, "ratio 1.8, d=0.5878", "ratio", 0.8537, 0.8598, 2.38, 3.59),
    PrintedRow("HumanEval", _QWEN, "ratio 2.0, d=0.6931", "ratio", 0.8537, 0.8719, 2.42, 3.62),
    PrintedRow("HumanEval", _QWEN, "ratio 2.2, d=0.7884", "ratio", 0.8537, 0.8719, 2.40, 3.61),
    PrintedRow("GSM8K", _LLAMA, "t=0.0", "t", 0.8704, 0.8681, 3.60, 5.51),
    PrintedRow("GSM8K", _LLAMA, "t=1.0", "t", 0.7695, 0.7915, 2.53, 4.89),
    PrintedRow("GSM8K", _QWEN, "t=1, k=1, qx=x", "t=1, qx=x", 0.9227, None, None, None),
    PrintedRow("GSM8K", _QWEN, "t=1, k=1, qx=x, r=0.90", "r", 0.9227, 0.9166, 2.59, 4.04),
)
# speed and length of Eagle-3, then of DSD
TABLE2 = {
    "AlpacaEval": (2.108, 2.790, 2.345, 3.593),
    "MT-Bench": (1.922, 2.706, 2.321, 3.432),
    "CNN/DailyMail": (1.643, 2.451, 1.905, 2.987),
    "HumanEval": (2.313, 3.340, 2.562, 3.855),
    "GSM8K": (2.274, 3.403, 2.517, 4.042),
}
REMARKS = (
    "Table 1's row `t=1, k=1, qx=1` of Qwen3-8B (2.31×, 3.34) is Eagle-3 in table 2 (2.313×, "
    "3.340), and r=0.90 (2.56×, 3.86) is DSD there (2.562×, 3.855). On GSM8K the same DSD has "
    "2.59× in table 1 and 2.517× in table 2. Eagle-3's numbers are published, not run here.",
    "r=0.90 gains 4.1 % in speed and 8.7 % in length over the same row without r (2.46×, 3.55), "
    "not the 15 to 20 % of the abstract. Over Eagle-3, table 2 has 10.7 to 20.8 %; its rounds "
    "cost 4 to 16 % more than Eagle-3's, so the speed rises less than the length.",
    "d is ln(ratio) to four digits. From ratio 1.2 to 2.2 the hops' share implied by (9) stays "
    "within 14 to 15 t₀, so the ratio is not one of the hops' latency, as its heading says.",
    "HumanEval has 164 problems, so an accuracy has a 95 % interval of 5 to 8 points to each side. "
    "The rows with r differ from their base by +1, −1, −8 and −9 problems: table 1 cannot show "
    "that accuracy is kept or gained.",
)


def acceptance(length: float, window: int = WINDOW) -> float:
    """Find α with (1 − α^{γ+1})/(1 − α) = ``length``, by bisection; 1 for length γ + 1 or more."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if tokens_per_round(middle, window) < length else (low, middle)
    return (low + high) / 2.0


def hops_by_eq_9(speed: float, length: float, window: int = WINDOW) -> float:
    """Return (N − 1)·t₁/t₀ for which equation 9 gives ``speed`` at k = ``length``.

    With c = k/S, the cost of a round in tokens, (9) is c = (γ + 1 + x)/(1 + x).
    """
    cost = length / speed
    return (window + 1 - cost) / (cost - 1.0)


def table1() -> Sheet:
    """Tabulate table 1 with what its numbers imply."""
    rows: list[Row] = []
    for row in TABLE1:
        values: dict[str, Value] = {
            "where": f"{row.task}, {row.target}",
            "setting": row.setting,
            "printed": row.printed,
            "base_accuracy": row.base,
            "accuracy": row.accuracy,
            "accuracy_low": None,
            "accuracy_high": None,
            "speed": row.speed,
            "length": row.length,
            "round_cost": None,
            "alpha": None,
            "hops_t0": None,
        }
        if row.accuracy is not None:
            problems = PROBLEMS[row.task]
            low, high = share_interval(round(row.accuracy * problems), problems)
            values |= {"accuracy_low": low, "accuracy_high": high}
        if row.speed is not None and row.length is not None:
            values |= {
                "round_cost": row.length / row.speed,
                "alpha": acceptance(row.length),
                "hops_t0": hops_by_eq_9(row.speed, row.length),
            }
        rows.append(values)
    columns: dict[str, tuple[str, int | None]] = {
        "where": ("task, target", None),
        "printed": ("setting", None),
        "base_accuracy": ("base", 2),
        "accuracy": ("acc.", 2),
        "speed": ("×", 2),
        "length": ("len", 2),
        "round_cost": ("len/×", 2),
        "alpha": ("α", 2),
        "hops_t0": ("(9)", 1),
    }
    note = (
        "len/×: the cost of a round in tokens of the baseline. α: acceptance that gives this "
        f"length at γ = {WINDOW}. (9): (N − 1)·t₁/t₀ for which equation 9 gives the speed-up. "
        "JSON has 95 % intervals of the accuracies (164 problems of HumanEval, 1,319 of GSM8K)."
    )
    return Sheet("table1", "Table 1 as printed, and what it implies", columns, rows, note)


def settings() -> Sheet:
    """Tabulate how each setting of table 1 is read, and the option that it corresponds to."""
    rows: list[Row] = [
        {"setting": setting, "meaning": reading.meaning, "option": reading.option or None}
        for setting, reading in READINGS.items()
    ]
    columns: dict[str, tuple[str, int | None]] = {
        "setting": ("setting", None),
        "meaning": ("our reading", None),
        "option": ("option of device run", None),
    }
    note = "The paper defines none of them. Rows without an option cannot be measured."
    return Sheet("settings", "The settings of table 1", columns, rows, note)


def table2() -> Sheet:
    """Tabulate table 2: DSD, and Eagle-3 as published."""
    rows: list[Row] = []
    for task, (eagle_speed, eagle_length, speed, length) in TABLE2.items():
        rows.append(
            {
                "task": task,
                "eagle_speed": eagle_speed,
                "eagle_length": eagle_length,
                "speed": speed,
                "length": length,
                "speed_ratio": speed / eagle_speed,
                "length_ratio": length / eagle_length,
                "eagle_round_cost": eagle_length / eagle_speed,
                "round_cost": length / speed,
            }
        )
    columns: dict[str, tuple[str, int | None]] = {
        "task": ("task", None),
        "eagle_speed": ("Eagle-3 ×", 3),
        "eagle_length": ("len", 3),
        "speed": ("DSD ×", 3),
        "length": ("len", 3),
        "speed_ratio": ("× ratio", 3),
        "length_ratio": ("len ratio", 3),
        "eagle_round_cost": ("Eagle-3 len/×", 2),
        "round_cost": ("DSD len/×", 2),
    }
    note = "All numbers are published, none was run here; len/× is the cost of a round in tokens."
    title = f"Table 2 as printed (K = 1, T = 1, γ = {WINDOW}): DSD and Eagle-3"
    return Sheet("table2", title, columns, rows, note)


def printed_settings() -> Sequence[Row]:
    """Return the first row of table 1 for each setting that Pilotfish has."""
    rows: dict[str, Mapping[str, Value]] = {}
    for row in TABLE1:
        if READINGS[row.setting].option and row.length is not None:
            rows.setdefault(
                row.setting,
                {
                    "setting": row.setting,
                    "printed_for": f"{row.target}, {row.task}",
                    "length_printed": row.length,
                    "speed_printed": row.speed,
                },
            )
    return list(rows.values())
