"""The kinds of target that an edge can have. A new one is one file and one line here."""

from collections.abc import Callable
from importlib import import_module

from edge_runtime.config import EdgeConfig
from edge_runtime.targets.target import Ask, Landing, Target
from engines.artifact import Artifact

__all__ = ["KINDS", "Ask", "Landing", "Open", "Target", "open_target"]

# Opens a target; may take long, and calls the function that it is given all the while.
Open = Callable[[EdgeConfig, Artifact, Callable[[], None]], Target]

KINDS = {
    "local": "edge_runtime.targets.local",
}


def open_target(
    config: EdgeConfig, artifact: Artifact, meanwhile: Callable[[], None] = lambda: None
) -> Target:
    """The target that a configuration names, ready to fly.

    artifact: whose vocabulary and end tokens hold. meanwhile: called a few times a second while
    nodes are waited for. Raises what the kind's ``open_target`` does.
    """
    kind: Open = import_module(KINDS[config.kind]).open_target
    return kind(config, artifact, meanwhile)
