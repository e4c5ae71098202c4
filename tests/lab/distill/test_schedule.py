"""A step is settled by its number: which rows, at which rate."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pilotfish.lab.distill.schedule import rate_at, rows_at, steps_of_epoch
from pilotfish.lab.distill.training_rows import TrainingRow


def made(count: int) -> list[TrainingRow]:
    return [
        TrainingRow([number] * (1 + number * 7 % 13), 0, [], [], [], []) for number in range(count)
    ]


@given(st.integers(1, 90), st.integers(1, 9), st.integers(0, 3))
def test_an_epoch_reads_each_row_once(count: int, batch: int, seed: int) -> None:
    rows, steps = made(count), steps_of_epoch(count, batch)
    for epoch in range(2):
        read = Counter(
            row.ids[0]
            for step in range(epoch * steps, (epoch + 1) * steps)
            for row in rows_at(step, rows, batch, seed)
        )
        assert read == Counter(range(count))


def test_epochs_differ_and_a_step_is_always_the_same() -> None:
    rows = made(40)
    first, second = ([rows_at(step + past, rows, 4, 0) for step in range(10)] for past in (0, 10))
    assert first != second
    assert first == [rows_at(step, rows, 4, 0) for step in range(10)]


@given(st.integers(1, 500), st.integers(1, 500))
def test_the_rate_rises_falls_and_never_ends_at_nothing(total: int, more: int) -> None:
    rates = [rate_at(step, total, total + more) for step in range(total)]
    assert all(0.0 < rate <= 1.0 for rate in rates)
    highest = rates.index(max(rates))
    assert rates[: highest + 1] == sorted(rates[: highest + 1])
    assert rates[highest:] == sorted(rates[highest:], reverse=True)
