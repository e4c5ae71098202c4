"""The artifacts behind the names `default` and `default-28`, which commands take for a folder.

Both are made of the default model, SmolLM2-135M, on first use. As a target, `default` is the model
in fp32; as a drafter, it is the same model in int4, and hardly ever differs from the target.
`default-28` is a drafter in int4 without two of the 30 layers. It differs from the target at about
every third token, so it has mismatches for a decision head to judge: the head `default` was
trained for this drafter. A folder of such a name takes precedence.
"""

from collections.abc import Sequence
from pathlib import Path

from pilotfish.engines.manifest import Precision

DEFAULT = "default"
SHORT = "default-28"
SKIPPED_LAYERS = (20, 21)


def target_folder(target: Path) -> Path:
    """Return the folder of a target that may be named `default`; export it if it is missing."""
    return default_target() if _names(target, DEFAULT) else target


def drafter_folder(drafter: Path) -> Path:
    """Return the folder of a drafter that may have a default's name; export it if missing."""
    is_default = _names(drafter, DEFAULT) or _names(drafter, SHORT)
    return default_drafter(str(drafter)) if is_default else drafter


def default_target() -> Path:
    """Return the folder of the target `default`; export it if it is missing."""
    return _export("fp32")


def default_drafter(name: str) -> Path:
    """Return the folder of the drafter `default` or `default-28`; export it if it is missing."""
    return _export("int4", {DEFAULT: (), SHORT: SKIPPED_LAYERS}[name])


def _export(precision: Precision, skipped_layers: Sequence[int] = ()) -> Path:
    from pilotfish.cli.export import default_artifact  # late: a daemon must start quickly

    return default_artifact(precision, skipped_layers=skipped_layers)


def _names(folder: Path, name: str) -> bool:
    return str(folder) == name and not folder.exists()
