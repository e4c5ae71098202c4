"""Figure 3 of wisv, measured: right answers by the head's threshold, over a good and a poor link.

The paper's thresholds, up to 15 and more, are most likely indices of a head's 26 quantiles: 0 is
`greedy`, and the last one accepts every draft. In between are the thresholds of the head's curve.
"""

from collections.abc import Container, Iterator

from pilotfish.base.errors import UnsupportedError
from pilotfish.lab.field.papers.figure import Bench, Figure, Identity
from pilotfish.lab.field.papers.judged import JudgedSetting
from pilotfish.lab.field.papers.sheet import Row, interval_columns
from pilotfish.lab.field.papers.wisv_plots import draw_accuracy
from pilotfish.lab.field.papers.wisv_printed import ACCURACIES, RATES_MBPS
from pilotfish.lab.field.papers.wisv_runs import Comparison, link_of

WINDOW = 10  # the paper prints no window
LINKS = {mbps: link_of(mbps, rtt_ms) for mbps, rtt_ms in zip(RATES_MBPS, (5, 50), strict=True)}
POINTS = 26  # thresholds of a head's curve
INDICES = (0, 3, 5, 9, 12, 14, POINTS - 1)


def bound(index: int, curve: tuple[float, ...]) -> float:
    """Return the bound of ρ that the threshold of this index stands for."""
    ends = {0: 0.0, POINTS - 1: 1.0}
    return ends.get(index, curve[index])


def _measured(bench: Bench, done: Container[Identity]) -> Iterator[Row]:
    """Answer the questions under all missing thresholds together, then yield a row for each."""
    judge = bench.expect_judge()
    if len(judge.curve) != POINTS:
        raise UnsupportedError(
            f"Figure 3 needs the {POINTS} thresholds of a head's curve, but this head has "
            f"{len(judge.curve)}."
        )
    missing = [(index, mbps) for index in INDICES for mbps in LINKS if (index, mbps) not in done]
    if not missing:
        return
    settings = [
        JudgedSetting(WINDOW, bound(index, tuple(judge.curve)), LINKS[mbps])
        for index, mbps in missing
    ]
    greedy, *answers = judge.answer(bench, [JudgedSetting(WINDOW), *settings], costs=False)
    for (index, mbps), setting, each in zip(missing, settings, answers, strict=True):
        row = {"threshold": index, "rate_mbps": mbps, "rho": setting.threshold}
        yield {**row, **Comparison(each, greedy).counted()}


def _printed() -> list[Row]:
    strict = ACCURACIES[0]
    return [
        {
            "threshold": index,
            "rate_mbps": mbps,
            "right_printed": right,
            "gained_printed": right - before,
        }
        for index, values in ACCURACIES.items()
        for mbps, right, before in zip(RATES_MBPS, values, strict, strict=True)
    ]


FIGURE3 = Figure(
    key="figure3",
    title="Figure 3, measured: right answers by threshold",
    columns={
        "threshold": ("at", 0),
        "rate_mbps": ("Mbit/s", 0),
        "rho": ("ρ", 3),
        **interval_columns("right", "right, %", 1),
        "right_printed": ("paper", 1),
        **interval_columns("gained", "points", 1),
        "gained_printed": ("paper", 1),
        "forgiven": ("forgiven", 2),
        **interval_columns("aal", "AAL", 2),
        "n": ("n", 0),
    },
    identity=("threshold", "rate_mbps"),
    printed=_printed,
    measure=_measured,
    draw=draw_accuracy,
    minutes=1.0,
    note=(
        f"At: index of the threshold among the head's {POINTS}, ρ: its value. At 500 Mbit/s the "
        f"RTT is 5 ms, at 20 Mbit/s it is 50 ms; L = {WINDOW}. The paper's numbers are of "
        "Llama-3.2-1B and -3.1-8B on GSM8K, ours of the default pair of wisv on the task facts. "
        "Points: more than greedy, on the same questions."
    ),
)
