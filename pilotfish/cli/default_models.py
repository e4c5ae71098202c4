"""The artifacts behind the names of models that commands take for `--target` and `--draft`.

A name is `default`, `default-28`, a hub id, a GGUF file or a checkpoint's folder. The cache has its
artifact, or gets it on first use (`export.model_cache`); the role chooses the precision. A file or
folder that exists takes precedence over a name.

`default` and `default-28` are made of the default model, SmolLM2-135M. As a target, `default` is
the model in fp32; as a drafter, it is the same model in int4, and hardly ever differs from the
target (for a GPU, it is fp16). `default-28` is a drafter in int4 without two of the 30 layers. It
differs from the target at about every third token, so it has mismatches for a decision head to
judge: the head `default` was trained for this drafter.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from pilotfish.base.supervisor import extend_start
from pilotfish.cli.extras import export_tools
from pilotfish.drafting.text_drafter import TEXT
from pilotfish.export.cached_models import ModelRequest
from pilotfish.export.model_cache import Role, fetch_model, find_or_export
from pilotfish.export.source_names import DEFAULTS

if TYPE_CHECKING:
    from pilotfish.base.progress import ProgressDisplay

DEFAULT, SHORT = DEFAULTS
SKIPPED_LAYERS = DEFAULTS[SHORT]
_START_S = 600.0  # time that a unit may take to start, counted from the last sign of progress
_EXTEND_EVERY_S = 5.0


def target_folder(target: Path, provider: str = "auto") -> Path:
    """Return the folder of a target's artifact; export it if the cache lacks it.

    provider: the provider that will run the model. Raises the errors of `fetch_model`.
    """
    return model_folder(str(target), "target", provider)


def drafter_folder(drafter: Path, provider: str = "auto") -> Path:
    """Return the folder of a drafter's artifact, or "text"; export it if the cache lacks it.

    provider: the provider that will run the model. Raises the errors of `fetch_model`.
    """
    return drafter if str(drafter) == TEXT else model_folder(str(drafter), "drafter", provider)


def model_folder(source: str, role: Role, provider: str, *, refresh: bool = False) -> Path:
    """Return the folder of an artifact, with the export's progress on stderr; see `fetch_model`."""
    with _exporting() as report:
        return fetch_model(
            source,
            role,
            provider=provider,
            refresh=refresh,
            progress=report.progress,
            notify=report.notify,
        )


def requested_folder(request: ModelRequest) -> Path:
    """Return the folder of a request's artifact, with the export's progress on stderr."""
    with _exporting() as report:
        return find_or_export(request, progress=report.progress, notify=report.notify)


@contextmanager
def _exporting() -> Iterator["_ExportReport"]:
    """Yield a report of an export; name the extra if a tool is missing."""
    report = _ExportReport()
    try:
        with export_tools():
            yield report
    finally:
        report.close()


class _ExportReport:
    """Shows an export on stderr, and asks systemd for more time to start meanwhile.

    The display is made at the first message: a start from the cache must be quick.
    """

    def __init__(self) -> None:
        self._display: ProgressDisplay | None = None
        self._extended_s = 0.0

    def progress(self, label: str, done: int, total: int | None) -> None:
        """Show the progress of a stage."""
        self._extend()
        self._open_display().show(label, done, total)

    def notify(self, sentence: str) -> None:
        """Print a line."""
        self._extend()
        self._open_display().print_above(f"pilotfish: {sentence}")

    def close(self) -> None:
        """End the display."""
        if self._display is not None:
            self._display.__exit__()

    def _extend(self) -> None:
        if time.monotonic() - self._extended_s > _EXTEND_EVERY_S:
            self._extended_s = time.monotonic()
            extend_start(_START_S)

    def _open_display(self) -> "ProgressDisplay":
        if self._display is None:
            from pilotfish.base.progress import ProgressDisplay  # late: a daemon must start quickly

            self._display = ProgressDisplay()
        return self._display
