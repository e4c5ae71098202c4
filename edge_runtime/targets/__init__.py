"""The kinds of target that an edge can have. A new one is one file and one line here."""

from collections.abc import Callable
from importlib import import_module

from pilotfish.edge_runtime.targets.target import Ask, Landing, Opening, Target

__all__ = ["KINDS", "Ask", "Landing", "Opening", "Target", "open_target"]

KINDS = {
    "local": "pilotfish.edge_runtime.targets.local",
    "federated": "pilotfish.edge_runtime.targets.federated",
    "pipeline": "pilotfish.edge_runtime.targets.pipeline",
    "cluster": "pilotfish.edge_runtime.targets.cluster",
}


def open_target(opening: Opening) -> Target:
    """The target of the kind that the configuration names, ready to fly.

    May take long. Raises what the kind's own ``open_target`` does.
    """
    kind: Callable[[Opening], Target] = import_module(KINDS[opening.config.kind]).open_target
    return kind(opening)
