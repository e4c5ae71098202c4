"""The sources of weights: the default model, a GGUF file, a Hugging Face directory or hub id.

`open_source` distinguishes the sources by the form of the text. To add a source, add a module here,
and a line in OPENERS.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.default import DEFAULT, open_default
from pilotfish.export.sources.gguf import open_gguf
from pilotfish.export.sources.hub import HUB_ID, open_hub
from pilotfish.export.sources.huggingface import open_directory
from pilotfish.export.sources.source import Progress, WeightSource, silent

__all__ = ["DEFAULT", "Progress", "WeightSource", "open_source"]

# Pairs (predicate on the text, opener); the first predicate that is true decides.
Opener = Callable[[str, Progress, Collection[str]], WeightSource]
OPENERS: tuple[tuple[Callable[[str], bool], Opener], ...] = (
    (
        lambda source: source == DEFAULT,
        lambda _, progress, ignored: open_default(progress, ignored),
    ),
    (lambda source: Path(source).is_dir(), open_directory),
    (lambda source: Path(source).is_file(), open_gguf),
    (lambda source: HUB_ID.fullmatch(source) is not None, open_hub),
)


def open_source(
    source: str, progress: Progress | None = None, ignore_keys: Collection[str] = ()
) -> WeightSource:
    """Open "default", a GGUF file, a Hugging Face directory, or a hub id ("owner/name").

    Args:
        source: name, path or hub id.
        progress: called as progress(label, done, total).
        ignore_keys: unknown keys of the model's configuration to ignore.

    Raises:
        ExportError: if the source does not exist or cannot be fetched, the model is not supported,
            or its configuration and weights contradict each other; the message gives the reason.
    """
    for matches, open_matching in OPENERS:
        if matches(source):
            return open_matching(source, progress or silent, ignore_keys)
    raise ExportError(
        f"{source!r} is neither {DEFAULT!r}, nor an existing file or directory, nor a hub id "
        "such as Qwen/Qwen2.5-0.5B-Instruct"
    )
