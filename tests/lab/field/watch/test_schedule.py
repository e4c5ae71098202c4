"""When the rounds of a watch are due."""

from pilotfish.lab.field.watch.schedule import Schedule


def test_a_round_may_begin_in_the_first_half_of_its_interval():
    schedule = Schedule(300.0)
    assert schedule.due(0.0, -1) == 0
    assert schedule.due(0.1, 0) is None
    assert schedule.due(299.9, 0) is None
    assert schedule.due(449.0, 0) == 1
    assert schedule.due(451.0, 0) is None


def test_missed_rounds_are_not_made_up_for():
    schedule = Schedule(300.0)
    assert schedule.due(3000.0, 2) == 10
    assert schedule.due(3001.0, 10) is None
    assert schedule.left_s(3001.0) == 299.0


def test_the_end_comes_by_the_runs_clock():
    schedule = Schedule(300.0, 750.0)
    assert not schedule.is_over(749.9)
    assert schedule.is_over(750.0)
    assert schedule.left_s(700.0) == 50.0
    assert not Schedule(300.0).is_over(1e9)
