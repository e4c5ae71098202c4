"""Where weights come from: the default model, a GGUF file, a Hugging Face directory or hub id.

`open_source` tells them apart by their form. A new kind of source is one module here and one line
in OPENERS.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from export.errors import ExportError
from export.sources.default import DEFAULT, open_default
from export.sources.gguf import GgufSource
from export.sources.hub import HUB_ID, open_hub
from export.sources.huggingface import open_directory
from export.sources.source import Progress, WeightSource

__all__ = ["DEFAULT", "Progress", "WeightSource", "open_source"]

# What the text looks like → what opens it; the first that matches.
OPENERS: tuple[tuple[Callable[[str], bool], Callable[[str, Progress], WeightSource]], ...] = (
    (lambda source: source == DEFAULT, lambda _, progress: open_default(progress)),
    (lambda source: Path(source).is_dir(), open_directory),
    (lambda source: Path(source).is_file(), lambda source, p: GgufSource(Path(source), p)),
    (lambda source: HUB_ID.fullmatch(source) is not None, open_hub),
)


def open_source(source: str, progress: Progress | None = None) -> WeightSource:
    """Open "default", a GGUF file, a Hugging Face directory, or a hub id ("owner/name").

    Raises:
        ExportError: if there is nothing of that name, it cannot be fetched, or it is a model
            that is not supported; the text names the reason.
    """
    for matches, open_matching in OPENERS:
        if matches(source):
            return open_matching(source, progress or _silent)
    raise ExportError(
        f"{source!r} is neither {DEFAULT!r}, nor an existing file or directory, nor a hub id "
        "such as Qwen/Qwen2.5-0.5B-Instruct"
    )


def _silent(label: str, done: int, total: int | None) -> None:
    """Progress for those who did not ask for any."""
