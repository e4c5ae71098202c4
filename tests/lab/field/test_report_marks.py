"""Each line, bar, median and share of the report's pictures rests on at least 20 points of its own.

Every kind of picture is painted of runs whose configurations have 9 to 25 answers. What the axes
then hold is compared with medians and counts that are computed from the answers by other means.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest

from pilotfish.device_runtime.record import RttSample
from pilotfish.lab.drawing import panels
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.report import (
    choice_plots,
    choice_times,
    distribution_plots,
    latency_plots,
    link_plots,
    plots,
    quantity_plots,
)
from pilotfish.lab.field.report.canvas import PlotStyle, left_out
from pilotfish.lab.field.report.figures import by_series
from pilotfish.lab.field.report.measured import read_run
from pilotfish.lab.field.report.pictures import Gallery
from tests.support.made_answers import answer, chain, chosen, facts, linked
from tests.support.made_watches import record

ENOUGH = 20
# answers of each configuration (protocol, window), and the rounds of each of these answers
NUMBERS = {
    ("greedy", 2): (25, 2), ("greedy", 4): (19, 2), ("greedy", 8): (20, 2), ("greedy", 16): (9, 2),
    ("coupled", 2): (20, 2), ("coupled", 6): (4, 3), ("dssd", 4): (12, 3),
    ("stream", None): (19, 3),
}  # fmt: skip
AUTO = 22  # answers under `auto`
FORECASTS = {("greedy", 2): 22, ("greedy", 8): 19, ("stream", None): 20, ("coupled", 2): 3}


def run(path, seed, *, less=()):
    """A run with these answers, of random times; less: configurations with one answer less."""
    rng = np.random.default_rng(seed)
    made = []
    for (protocol, window), (number, rounds) in NUMBERS.items():
        for repeat in range(number - ((protocol, window) in less)):
            drafted = [
                chain(window or 0, int(rng.integers(0, (window or 0) + 1)),
                      ms=float(rng.lognormal(3.0, 0.3)), protocol=protocol,
                      up=int(rng.integers(50, 90)))
                for _ in range(rounds)
            ]  # fmt: skip
            link = linked(rtt=0.02, jitter=0.001) if protocol == "greedy" else linked(signal=-60.0)
            rtts = [RttSample(0.0, float(rng.lognormal(-3, 0.3)))]
            made.append(
                answer(drafted, protocol=protocol, window=window, repeat=repeat, link=link,
                       rtts=rtts, clock_s=30.0 * len(made), started_unix_s=1.8e9 + 30 * len(made),
                       energy_j=float(rng.lognormal()) if window == 2 else None)
            )  # fmt: skip
    for repeat in range(AUTO - (("auto", None) in less)):
        plans = [
            (protocol, window or 0, float(rng.lognormal(-4, 0.3)))
            for (protocol, window), number in FORECASTS.items()
            if repeat < number
        ]
        choice = chosen("greedy", 2, plans[0][2], plans)
        rounds = [chain(2, 1, ms=float(rng.lognormal(3.0, 0.3))) for _ in range(2)]
        made.append(
            answer(rounds, protocol="auto", window=None, repeat=repeat, choice=choice,
                   clock_s=30.0 * len(made), started_unix_s=1.8e9 + 30 * len(made))
        )  # fmt: skip
    with Recorder.create(path, facts()) as recorder:
        for item in made:
            record(recorder, item)
    return read_run(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("marks")
    return [run(folder / "north.pilotfish", 1), run(folder / "south.pilotfish", 2, less=NUMBERS)]


def name(key):
    protocol, window = key
    return protocol if window is None else f"{protocol} γ={window}"


def token_ms(measured):
    """The ms a token of each configuration's answers, computed from the rounds."""
    values = {}
    for item in measured.answers:
        rounds = item.rounds[1:]
        ms = 1e3 * sum(r.timings.total for r in rounds) / sum(len(r.tokens) for r in rounds)
        values.setdefault(name((item.protocol, item.window)), []).append(ms)
    return values


def medians(measured):
    return {each: (float(np.median(ms)), len(ms)) for each, ms in token_ms(measured).items()}


def painted(plot, tmp_path, wide=True):
    """The axes of a plot, after it was painted."""
    heading = ("title", plot.xlabel, plot.ylabels, (10.0, 4.0))
    with panels(tmp_path / "plot.png", *heading, side_by_side=plot.side_by_side) as axes:
        plot.paint(axes, wide)
    return axes


def offsets(axes, dimension):
    """The coordinates of all scattered points."""
    return [
        float(at)
        for points in axes.collections
        if len(getattr(points, "get_sizes", list)())  # a scatter, not a bar or an area
        for at in np.asarray(points.get_offsets())[:, dimension]
    ]


def rows(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


def expect_medians(drawn, known):
    """The drawn medians are all those of enough values, and no others."""
    enough = sorted(median for median, number in known if number >= ENOUGH)
    assert sorted(drawn) == pytest.approx(enough)
    assert 0 < len(enough) < len(known)


def expect_named(plot, few):
    """The sentence below the picture names what is left out, with its number of points."""
    words = left_out(plot)
    for each, number in few.items():
        assert f"{each} ({number} " in words, words
        assert number < ENOUGH
    assert words.count("(") == len(few), words


def few_medians(measured):
    return {each: n for each, (_, n) in medians(measured).items() if n < ENOUGH}


def style(measured):
    return PlotStyle([*by_series(measured.figures), "greedy", "coupled", "dssd", "stream", "auto"])


def latency(runs, tmp_path):
    plot = latency_plots.latency("north", runs[0].figures, style(runs[0]))
    (axes,) = painted(plot, tmp_path)
    values = [y for line in axes.lines for y in line.get_ydata() if line.get_linestyle() == "-"]
    expect_medians(sorted({float(y) for y in values if len(values)}), medians(runs[0]).values())
    expect_named(plot, few_medians(runs[0]))


def compared(runs, tmp_path):
    plot = latency_plots.compare_runs([(r.name, r.figures) for r in runs], style(runs[0]))
    (axes,) = painted(plot, tmp_path)
    best = {}
    for measured in runs:
        for each, (median, number) in medians(measured).items():
            if number >= ENOUGH:
                key = measured.name, each.split()[0]
                best[key] = min(median, best.get(key, np.inf))
    assert sorted(offsets(axes, 0)) == pytest.approx(sorted(best.values()))
    # coupled has 20 answers in one run and 19 in the other
    few = {f"{r} {p}": n for r, p, n in (
        ("north", "stream", 19), ("north", "dssd", 12), ("south", "coupled", 19),
        ("south", "stream", 18), ("south", "dssd", 11),
    )}  # fmt: skip
    expect_named(plot, few)


def stages(runs, tmp_path):
    plot = plots.stages("north", runs[0].figures)
    (axes,) = painted(plot, tmp_path)
    steady = Counter({name(k): n * (rounds - 1) for k, (n, rounds) in NUMBERS.items()})
    steady["auto"] = AUTO
    assert sorted(rows(axes)) == sorted(each for each, n in steady.items() if n >= ENOUGH)
    expect_named(plot, {each: n for each, n in steady.items() if n < ENOUGH})


def bytes_per_token(runs, tmp_path):
    plot = plots.bytes_per_token("north", runs[0].figures)
    (axes,) = painted(plot, tmp_path)
    rounds = Counter({name(k): n * rounds for k, (n, rounds) in NUMBERS.items()})
    rounds["auto"] = 2 * AUTO
    assert sorted(rows(axes)) == sorted(each for each, n in rounds.items() if n >= ENOUGH)
    expect_named(plot, {each: n for each, n in rounds.items() if n < ENOUGH})


def depths(runs, tmp_path):
    plot = plots.depths("north", runs[0].figures, style(runs[0]))
    reached, accepted = painted(plot, tmp_path)
    pooled = {}  # drafted, reached and accepted rounds by protocol and depth
    for round_protocol, round_ in (
        (item.protocol, round_) for item in runs[0].answers for round_ in item.rounds
    ):
        for depth in range(1, round_.window + 1):
            counts = pooled.setdefault((round_protocol, depth), [0, 0, 0])
            counts[0] += 1
            counts[1] += round_.accepted >= depth - 1
            counts[2] += round_.accepted >= depth
    for axes, of, part in ((reached, 0, 1), (accepted, 1, 2)):
        drawn = Counter(round(float(y), 6) for line in axes.lines for y in line.get_ydata())
        assert drawn == Counter(
            round(100 * counts[part] / counts[of], 6)
            for counts in pooled.values()
            if counts[of] >= ENOUGH
        )
    words = left_out(plot)
    for protocol in ("greedy", "coupled"):
        for what, of in (("reached", 0), ("accepted", 1)):
            few = [(d, c[of]) for (p, d), c in pooled.items() if p == protocol and c[of] < ENOUGH]
            depth, number = min(few)
            assert f"{protocol} {what} from depth {depth} ({number} " in words, words


def expect_lines(plot, tmp_path, numbers, few):
    """The legend has a line for each label of enough values."""
    lines = {
        label for axes in painted(plot, tmp_path) for label in axes.get_legend_handles_labels()[1]
    }
    assert lines == {label for label, number in numbers.items() if number >= ENOUGH}
    expect_named(plot, few)


def distribution(runs, tmp_path):
    plot = distribution_plots.distributions(
        "north", runs[0].values, runs[0].figures, style(runs[0])
    )
    known = medians(runs[0])
    best = min((n for n in known if n.startswith("greedy") and known[n][1] >= 20), key=known.get)
    few = {"stream": 19, "dssd γ=4": 12}
    if best == "greedy γ=8":  # its energy was not measured
        assert "J a token" not in str(few)
    expect_lines(plot, tmp_path, {best: 20, "coupled γ=2": 20, "auto": AUTO}, few)


def distribution_compared(runs, tmp_path):
    plot = distribution_plots.compare_distributions([(r.name, r.values, r.figures) for r in runs])
    axes = painted(plot, tmp_path)
    lines = [[line.get_label() for line in each.lines] for each in axes]
    assert dict(zip(plot.xlabel, lines, strict=True)) == {
        "coupled: time per token (ms)": ["north"],
        "greedy: time per token (ms)": ["north", "south"],
        "auto: time per token (ms)": ["north", "south"],
    }
    expect_named(plot, {"north stream": 19, "south stream": 18, "north dssd": 12, "south dssd": 11,
                        "south coupled": 19})  # fmt: skip


def alternatives(runs, tmp_path):
    plot = choice_plots.alternatives("north", runs[0].hindsight)
    (axes,) = painted(plot, tmp_path)
    (auto,) = (line for line in axes.lines if line.get_label().startswith("auto"))
    known = medians(runs[0])
    assert auto.get_xdata()[0] == pytest.approx(known.pop("auto")[0])
    forecasts = {}
    for item in runs[0].answers:
        for each in item.choice.forecasts if item.choice else ():
            forecasts.setdefault(name((each.protocol, each.window or None)), []).append(
                1e3 * each.token_s
            )
    known |= {f"{k}'s forecast": (float(np.median(v)), len(v)) for k, v in forecasts.items()}
    expect_medians(offsets(axes, 0), known.values())
    expect_named(plot, {
        each if each.endswith("forecast") else f"fixed {each}": n
        for each, (_, n) in known.items() if n < ENOUGH
    })  # fmt: skip
    assert choice_plots.alternatives("few", _less_auto(tmp_path).hindsight).selection.drawn == []


def _less_auto(tmp_path):
    """A run with 19 answers under `auto`."""
    answers = [
        answer([chain(2, 1)] * 2, repeat=i, **more)
        for more in ({"window": 2}, {"protocol": "auto", "window": None,
                                     "choice": chosen("greedy", 2, 0.01, [("greedy", 2, 0.01)])})
        for i in range(19 if "choice" in more else 20)
    ]  # fmt: skip
    with Recorder.create(tmp_path / "few.pilotfish", facts()) as recorder:
        for item in answers:
            record(recorder, item)
    return read_run(tmp_path / "few.pilotfish")


def predictions(runs, tmp_path):
    """A scatter: each point is one answer, so the picture needs 20."""
    (axes,) = painted(choice_plots.predictions("north", runs[0].hindsight), tmp_path)
    assert len(offsets(axes, 0)) == AUTO
    few = choice_plots.predictions("few", _less_auto(tmp_path).hindsight)
    assert (few.selection.drawn, few.selection.few) == ([], {"": 19})


def choices(runs, tmp_path):
    """Each bar is one answer, and a row's share is of all of them."""
    measured = runs[0]
    plot = choice_times.choices_over_time(
        "north", measured.answers, measured.history, style(measured)
    )
    (axes,) = painted(plot, tmp_path)
    assert rows(axes) == ["greedy\n100 %"]
    few = _less_auto(tmp_path)
    plot = choice_times.choices_over_time("few", few.answers, few.history, style(few))
    assert (plot.selection.drawn, plot.selection.few) == ([], {"": 19})


def rtt(runs, tmp_path):
    plot = link_plots.rtt_over_time("north", runs[0].history)
    number = sum(n for n, _ in NUMBERS.values())
    assert plot.selection.few == {}
    (axes,) = painted(plot, tmp_path)
    assert axes.get_legend_handles_labels()[1] == ["rounds of answers"]
    assert f"n = {number} RTT samples" in plot.n


def rtt_distribution(runs, tmp_path):
    plot = link_plots.rtt_distribution([(each.name, each.history) for each in runs])
    number = sum(n for n, _ in NUMBERS.values())
    expect_lines_alone = {"north": number, "south": number - len(NUMBERS)}
    (axes,) = painted(plot, tmp_path)
    assert set(axes.get_legend_handles_labels()[1]) == set(expect_lines_alone)
    assert left_out(plot) is None


def link(runs, tmp_path):
    plot = quantity_plots.quantities_over_time("north", runs[0].history)
    greedy = sum(n for (protocol, _), (n, _) in NUMBERS.items() if protocol == "greedy")
    others = sum(n for n, _ in NUMBERS.values()) - greedy
    assert plot.ylabels == ["jitter\n(ms)", "signal\n(dBm)"]
    assert min(greedy, others) >= ENOUGH
    assert left_out(plot) is None
    assert len(painted(plot, tmp_path)) == 2


KINDS = [latency, compared, stages, bytes_per_token, depths, distribution, distribution_compared,
         alternatives, predictions, choices, rtt, rtt_distribution, link]  # fmt: skip


def test_every_kind_of_picture_is_here():
    assert {kind.__name__ for kind in KINDS} == {kind.name for kind in fields(Gallery)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_mark_rests_on_enough_points(runs, tmp_path, kind):
    kind(runs, tmp_path)
