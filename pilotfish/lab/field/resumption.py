"""Check that a run is resumed with the same settings and the same pair of models.

In: a run's facts; the requested settings, drafter and target. Out: nothing, or a `RunFileError`
that names the difference. The paths of drafter and keys may differ, but not the drafter itself.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from pilotfish.base.errors import RunFileError
from pilotfish.lab.field.axes import all_axes, hashable
from pilotfish.lab.field.run_facts import Facts
from pilotfish.lab.runs import changes, format_value


def expect_same_settings(path: Path, facts: Facts, requested: Mapping[str, Any]) -> None:
    """Raise `RunFileError` if a requested setting differs from the run's.

    requested: values by name, for settings, protocols' options, ``edge`` and ``note``.
    """
    settings = facts.settings
    original = {
        **structs.asdict(settings),
        **{
            name: hashable(value)
            for group in (settings.options, settings.link, settings.varied)
            for name, value in group.items()
        },
        "edge": facts.edge,
        "note": facts.note,
    }
    for change in changes(original, requested):
        difference = "other prompts" if change.name == "prompts" else change
        axis = all_axes().get(change.name)
        flag = change.flag if axis is None else f"--{axis.setting.flag}"
        raise RunFileError(
            f"The run in {path} was begun with {flag} {difference}: resume it without that "
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


def host_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the host's changes since the run began; return None if it has not changed."""
    all_now = {name: now.get(name) for name in sorted({*before, *now})}
    changed = [
        f"{name} {format_value(original)} → {format_value(value)}"
        for name, original, value in changes(before, all_now)
    ]
    return ", ".join(changed) or None
