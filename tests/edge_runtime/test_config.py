"""What an edge's settings come to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from pilotfish.base.errors import ConfigError
from pilotfish.edge_runtime.edge_config import ClusterPlan, EdgeConfig

LOCAL = EdgeConfig(target=Path("target"))
LISTED = Path("nodes.toml")


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, "local"),
        ({"federate": LISTED}, "federated"),
        ({"pipeline": LISTED}, "pipeline"),
        ({"cluster": ClusterPlan(runner="ray", replicas=2)}, "cluster"),
    ],
)
def test_the_kind_of_target_follows_from_what_is_given(
    options: dict[str, object], kind: str
) -> None:
    config = replace(LOCAL, **options)
    assert config.kind == kind
    assert config.nodes == (LISTED if kind in ("federated", "pipeline") else None)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"federate": LISTED, "pipeline": LISTED}, "one kind of target"),
        ({"cluster": ClusterPlan(stages=2)}, "together with --cluster ray"),
        ({"draft_threads": 2}, "together with --draft"),
        ({"cluster": ClusterPlan(runner="ray", late_s=9, give_up_s=8)}, "--late is 9 s, more than"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        replace(LOCAL, **options)


def test_none_means_no_decision_heads_at_all() -> None:
    assert replace(LOCAL, heads=("none",)).head_names == ()
    assert replace(LOCAL, heads=("a", "b")).head_names == ("a", "b")
    assert LOCAL.head_names == ()
    assert replace(LOCAL, federate=LISTED).head_names == ()


def test_a_target_leaves_its_cores_to_a_drafter_beside_it() -> None:
    cores = len(os.sched_getaffinity(0))
    assert LOCAL.target_threads is None
    assert replace(LOCAL, threads=3, draft=Path("draft")).target_threads == 3
    assert replace(LOCAL, draft=Path("draft")).target_threads == max(1, cores - 1)
    assert replace(LOCAL, draft=Path("draft"), draft_threads=cores).target_threads == 1
