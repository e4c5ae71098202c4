"""Percentiles, and the search for the number of devices that an edge carries."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from pilotfish.cli.field.load_tables import points_tables
from pilotfish.lab.field.load.figures import capacity, figures, next_count, percentiles
from pilotfish.lab.field.load.picture import draw
from pilotfish.lab.field.load.results import Point
from pilotfish.lab.field.load.timed_answer import TimedAnswer


def answer(token_s, first_s=0.5, tokens=11, at_s=1.0, **changes):
    began = at_s + first_s
    usual = {"device": 0, "prompt": 0, "asked_s": at_s, "rounds": tokens, "verify_s": 0.02 * tokens}
    arrivals = [(began, 1), (began + token_s * (tokens - 1), tokens - 1)]
    return TimedAnswer(**{**usual, "arrivals": arrivals, **changes})


def measured_point(devices, token_ms, method="stream", *, for_s=10.0, **changes):
    """The figures of a point with an answer for each of these milliseconds per token."""
    answers = [answer(each * 1e-3) for each in token_ms]
    usual = {"began_unix_s": 0.0, "took_s": 10.0, "tokens": 400, "answers": answers}
    return figures(Point(method=method, devices=devices, **{**usual, **changes}), for_s)


def by_rank(values, share):
    """The percentile by its definition: the value at rank share · (n − 1), between neighbours."""
    ordered = sorted(values)
    rank = share * (len(ordered) - 1)
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (rank - low) * (ordered[high] - ordered[low])


@pytest.mark.parametrize("count", [20, 21, 37, 100])
def test_percentiles_by_enumeration(count):
    values = [((37 * number) % 101) * 1e-3 for number in range(count)]
    result = percentiles(values)
    assert result.p50 == pytest.approx(1e3 * by_rank(values, 0.5))
    assert result.p90 == pytest.approx(1e3 * by_rank(values, 0.9))


def test_fewer_than_twenty_answers_have_no_percentile():
    assert percentiles([0.05] * 19) is None
    few = measured_point(2, [50.0] * 19)
    assert few.n == 19
    assert few.token_ms is few.first_token_ms is None
    assert few.holds(1.0) is None
    assert str(capacity("stream", [few], 1.0)) == "–"
    assert str(capacity("stream", [few, measured_point(4, [50.0] * 20)], 1.0)) == "≥ 4"


def test_the_figures_of_a_point():
    result = measured_point(4, [40.0] * 18 + [90.0] * 2, edge_cpu_s=4.0)
    assert result.token_ms.p50 == pytest.approx(40.0)
    assert result.first_token_ms.p90 == pytest.approx(500.0)
    assert result.tokens_per_s == 40.0
    assert result.edge_ms == pytest.approx(20.0)
    assert result.edge_cpu_ms == pytest.approx(10.0)
    assert result.tokens_per_round == 1.0


def test_a_point_that_ended_early_has_no_rate():
    """Ten failed answers end it, and the tokens of a moment are no rate of the edge."""
    early = measured_point(4, [40.0] * 20, edge_cpu_s=4.0, took_s=0.4, for_s=10.0)
    assert early.tokens_per_s is early.edge_cpu_ms is None
    assert early.token_ms is not None
    [speed, edge] = points_tables([early])
    for table, heading in ((speed, "tokens/s"), (edge, "CPU, ms")):
        [column] = [each for each in table.columns if each.header == heading]
        assert [*column.cells] == ["–"]


def test_an_answer_that_failed_is_no_answer_and_no_point_holds_with_one():
    failed = TimedAnswer(device=1, prompt=0, asked_s=2.0, error="busy")
    answers = [*(answer(0.04) for _ in range(30)), failed]
    result = measured_point(2, [], answers=answers)
    assert (result.n, result.failed) == (30, 1)
    assert not result.holds(0.1)


def test_an_answer_without_a_token_has_failed():
    answers = [*(answer(0.04) for _ in range(30)), answer(0.04, arrivals=[])]
    result = measured_point(2, [], answers=answers)
    assert (result.n, result.failed) == (30, 1)
    assert not result.holds(0.1)


def test_an_answer_of_one_message_has_no_time_per_token():
    whole = answer(0.04, arrivals=[(1.5, 5)])
    result = measured_point(1, [], answers=[answer(0.04) for _ in range(19)] + [whole])
    assert result.first_token_ms is not None
    assert result.token_ms is None


@dataclass
class Edge:
    """Carries so many devices."""

    most: int

    def search(self, counts):
        held = {}
        while (count := next_count(counts, held)) is not None:
            assert count not in held
            held[count] = count <= self.most
        return held


@pytest.mark.parametrize("most", range(20))
def test_the_search_finds_every_limit(most):
    """Every edge that carries 0 to 19 devices, of which 16 are tried at most."""
    held = Edge(most).search((1, 2, 4, 8, 16))
    measured = [
        measured_point(count, [50.0 if holds else 150.0] * 20) for count, holds in held.items()
    ]
    result = capacity("stream", measured, 0.1)
    assert (result.devices, result.at_least) == (min(most, 16), most >= 16)
    assert str(result) == ("≥ 16" if most >= 16 else str(most))
    assert max(held) <= max(1, min(16, 2 * most))  # no edge is loaded beyond the first limit


def test_nothing_above_the_first_limit_counts():
    """A larger number that happens to hold is luck, or the machine's noise."""
    times = {1: 50.0, 2: 120.0, 4: 90.0}
    measured = [measured_point(count, [ms] * 20) for count, ms in times.items()]
    assert str(capacity("stream", measured, 0.1)) == "1"


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ({1: None, 2: False}, "–"),
        ({1: None, 2: None, 4: False}, "–"),
        ({1: True, 2: None, 4: False}, "≥ 1"),
        ({1: True, 2: None}, "≥ 1"),
        ({1: None, 2: True, 3: False}, "2"),
        ({1: True, 2: False, 4: None}, "1"),
        ({1: False, 2: None}, "0"),
    ],
)
def test_a_number_with_too_few_answers_is_neither_held_nor_too_large(held, expected):
    answers = {None: [50.0] * 5, True: [50.0] * 20, False: [150.0] * 20}
    measured = [measured_point(count, answers[holds]) for count, holds in held.items()]
    assert str(capacity("stream", measured, 0.1)) == expected


def test_the_ninetieth_percentile_decides():
    assert measured_point(2, [90.0] * 91 + [200.0] * 9).holds(0.1)
    assert not measured_point(2, [90.0] * 80 + [200.0] * 20).holds(0.1)


def test_nothing_is_drawn_of_fewer_than_twenty_answers(tmp_path):
    path = tmp_path / "load.png"
    assert not draw(path, [measured_point(1, [50.0] * 19)], 0.1, "the link as it is")
    assert not path.exists()
    many = [measured_point(2, [50.0] * 20)]
    assert draw(path, [measured_point(1, [50.0] * 19), *many], 0.1, "the link as it is")
    alone = path.read_bytes()
    assert draw(path, many, 0.1, "the link as it is")
    assert path.read_bytes() == alone  # the point of 19 answers has left no trace


def test_one_slow_point_does_not_hide_the_others(tmp_path):
    """The axis ends at four times the limit, so the picture is the same for all slower points."""
    pictures = []
    for slow_ms in (5000.0, 9000.0):
        path = tmp_path / f"{slow_ms}.png"
        points = [measured_point(1, [50.0] * 20), measured_point(1, [slow_ms] * 20, "ahead")]
        assert draw(path, points, 0.1, "the link as it is")
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1]
