"""Check that a run is resumed with the same settings and the same pair of models.

In: a run's facts; the requested settings, drafter and target. Out: nothing, or a `RunFileError`
that names the difference. The paths of drafter and keys may differ, but not the drafter itself.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from pilotfish.base.errors import RunFileError
from pilotfish.lab.field.run import Facts


def expect_same_settings(path: Path, facts: Facts, requested: Mapping[str, Any]) -> None:
    """Raise `RunFileError` if a requested setting differs from the run's.

    requested: values by name, for settings, protocols' options, ``edge`` and ``note``.
    """
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
            else f"{_format_value(original.get(name))}, not {_format_value(value)}"
        )
        raise RunFileError(
            f"The run in {path} was begun with {option} {difference}: resume it without that "
            "option, or name another file."
        )


def expect_same_pair(path: Path, before: Facts, now: Facts) -> None:
    """Raise `RunFileError` if the drafter or the target differs from the run's."""
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
                f"The run in {path} was begun with the {role} {descriptions[0]}, but now the "
                f"{role} is {descriptions[1]}: name another file."
            )


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the host's changes since the run began; return None if it has not changed."""
    changed = [
        f"{name} {_format_value(before.get(name))} → {_format_value(now.get(name))}"
        for name in sorted({*before, *now})
        if before.get(name) != now.get(name)
    ]
    return ", ".join(changed) or None


def _format_value(value: Any) -> str:
    if value is None or value == "":
        return "none"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
