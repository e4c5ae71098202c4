"""Kinds of target; a new kind needs one file, and one line here."""

from collections.abc import Callable
from importlib import import_module

from pilotfish.edge_runtime.targets.target import Scores, Target, TargetOptions

__all__ = ["KINDS", "Scores", "Target", "TargetOptions", "open_target"]

KINDS = {
    "local": "pilotfish.edge_runtime.targets.local",
    "federated": "pilotfish.edge_runtime.targets.federated",
    "pipeline": "pilotfish.edge_runtime.targets.pipeline",
    "cluster": "pilotfish.edge_runtime.targets.cluster",
}


def open_target(options: TargetOptions) -> Target:
    """Open the target of the configured kind; this may take long.

    Raises the errors of the kind's ``open_target``.
    """
    kind: Callable[[TargetOptions], Target] = import_module(KINDS[options.config.kind]).open_target
    return kind(options)
