"""A replica that loaded fast at first, and slowly later, stands again: its disk is slower now."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pilotfish.edge_runtime.edge_config import ClusterPlan
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.node.actor import ActorInfo
from pilotfish.edge_runtime.targets import cluster
from pilotfish.edge_runtime.targets.cluster import ClusterTarget
from tests.edge_runtime.targets.test_standing_still import Hands, hands

__all__ = ["hands"]


class Actor:
    """One that takes a while to load its weights after each start. loads_s: how long."""

    def __init__(self, hands: Hands) -> None:
        self._hands = hands
        self.loads_s = 0.0
        self.starts = 0
        self.waiting: list[tuple[float, Callable[[Any], None]]] = []
        self.hold = SimpleNamespace(remote=self._hold)

    def _hold(self, incarnation: bytes) -> Any:
        done_s = self._hands.now_s + self.loads_s

        def told(tell: Callable[[Any], None]) -> None:
            self.waiting.append((done_s, tell))

        return SimpleNamespace(future=lambda: SimpleNamespace(add_done_callback=told))

    def restart(self) -> None:
        self.starts += 1
        self.waiting.clear()

    def go_on(self) -> None:
        for done_s, tell in self.waiting:
            if self._hands.now_s >= done_s:
                held = ActorInfo("", 64, 1)
                tell(SimpleNamespace(exception=lambda: None, result=lambda held=held: held))
        self.waiting = [one for one in self.waiting if one[0] > self._hands.now_s]


@pytest.mark.parametrize("loads_s", [90.0, 300.0])
def test_a_replica_that_loads_more_slowly_than_at_first_has_more_time_at_each_try(
    hands: Hands, monkeypatch: pytest.MonkeyPatch, loads_s: float
) -> None:
    actor = Actor(hands)
    monkeypatch.setattr(cluster, "restart", lambda one: one.restart())
    monkeypatch.setattr(cluster, "leave", lambda: None)
    plan = ClusterPlan(replicas=1, stages=1, late_s=10.0, give_up_s=60.0)
    opening: Any = SimpleNamespace(
        metrics=EdgeMetrics(),
        config=SimpleNamespace(limits=SimpleNamespace(context=64, sessions=1)),
        artifact=SimpleNamespace(manifest=SimpleNamespace(dimensions=SimpleNamespace(context=64))),
    )
    target = ClusterTarget(plan, [[actor]], None, opening, "")

    def until_it_stands(most_s: float) -> None:
        until_s = hands.now_s + most_s
        while not target.attached:
            assert hands.now_s < until_s
            hands.now_s += 0.25
            actor.go_on()
            target.collect_scores()

    actor.loads_s = 2.0
    until_it_stands(5.0)
    actor.loads_s = loads_s
    target._lose_actor(0, RuntimeError("killed"))
    assert not target.attached
    until_it_stands(1000.0)
    assert actor.starts <= 3
    target.close()
