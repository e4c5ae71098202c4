"""When a run may go on: with the settings and the pair that it began with, and no others.

In:  a run's facts, and what is asked for or found now. Out: nothing, or a `RunFileError` that says
what differs. Where the drafter and the keys lie may differ; what the drafter is may not.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pilotfish.field.run import Facts
from pilotfish.wire.errors import RunFileError


def expect_same_settings(path: Path, facts: Facts, asked: Mapping[str, Any]) -> None:
    """asked: what was asked for, by name: settings, protocols' options, ``edge`` and ``note``."""
    settings = facts.settings
    began = {**vars(settings), **settings.options, "edge": facts.edge, "note": facts.note}
    for name, value in asked.items():
        if value == began.get(name):
            continue
        option = "--" + name.replace("_", "-")
        told = (
            "other prompts"
            if name == "prompts"
            else f"{_said(began.get(name))}, not {_said(value)}"
        )
        raise RunFileError(
            f"{path} was begun with {option} {told}: resume it without that option, or name "
            "another file."
        )


def expect_same_pair(path: Path, before: Facts, now: Facts) -> None:
    """Drafter and target are those that the run began with."""
    for what, was, found in (
        ("drafter", before.drafter, now.drafter),
        ("target", before.target, now.target),
    ):
        if was != found:
            said = [
                "none" if model is None else " ".join(filter(None, vars(model).values()))
                for model in (was, found)
            ]
            raise RunFileError(
                f"{path} was begun with the {what} {said[0]}, and this is {said[1]}: name another "
                "file."
            )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What of the host is not as it was when the run began, in words; None if all is."""
    found = [
        f"{name} {_said(before.get(name))} → {_said(now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    return ", ".join(found) or None


def _said(value: Any) -> str:
    if value is None or value == "":
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
