"""Check that a run is resumed with the settings and the pair that it began with.

In: a run's facts, and what is requested or found now. Out: nothing, or a `RunFileError` that says
what differs. Drafter and keys may have moved; the drafter itself must be the same.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from pilotfish.base.errors import RunFileError
from pilotfish.field.run import Facts


def expect_same_settings(path: Path, facts: Facts, requested: Mapping[str, Any]) -> None:
    """asked: what was asked for, by name: settings, protocols' options, ``edge`` and ``note``."""
    settings = facts.settings
    original = {
        **structs.asdict(settings),
        **settings.options,
        "edge": facts.edge,
        "note": facts.note,
    }
    for name, value in requested.items():
        if value == original.get(name):
            continue
        option = "--" + name.replace("_", "-")
        difference = (
            "other prompts"
            if name == "prompts"
            else f"{_said(original.get(name))}, not {_said(value)}"
        )
        raise RunFileError(
            f"{path} was begun with {option} {difference}: resume it without that option, or name "
            "another file."
        )


def expect_same_pair(path: Path, before: Facts, now: Facts) -> None:
    """Check that drafter and target are those that the run began with."""
    for role, original, model in (
        ("drafter", before.drafter, now.drafter),
        ("target", before.target, now.target),
    ):
        if original != model:
            descriptions = [
                "none" if each_model is None else " ".join(filter(None, vars(each_model).values()))
                for each_model in (original, model)
            ]
            raise RunFileError(
                f"{path} was begun with the {role} {descriptions[0]}, and this is {descriptions[1]}: name another "
                "file."
            )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe what has changed about the host since the run began, or None."""
    changed = [
        f"{name} {_said(before.get(name))} → {_said(now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    return ", ".join(changed) or None


def _said(value: Any) -> str:
    if value is None or value == "":
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
