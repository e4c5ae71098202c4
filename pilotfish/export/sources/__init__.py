"""The sources of weights: the default model, a GGUF file, a Hugging Face directory or hub id.

`open_source` distinguishes the sources by the form of the text. To add a source, add a module here,
and two lines in that function.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from pilotfish.export.export_errors import ExportError
from pilotfish.export.source_names import DEFAULT, HUB_ID
from pilotfish.export.sources.default import open_default
from pilotfish.export.sources.gguf import GgufSource
from pilotfish.export.sources.hub import open_hub
from pilotfish.export.sources.huggingface import DirectorySource
from pilotfish.export.sources.source import Progress, WeightSource, silent

__all__ = ["DEFAULT", "Progress", "WeightSource", "open_source"]


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
    report, path = progress or silent, Path(source)
    if source == DEFAULT:
        return open_default(report, ignore_keys)
    if path.is_dir():
        return DirectorySource(path, report, ignored=ignore_keys)
    if path.is_file():
        return GgufSource(path, report, ignored=ignore_keys)
    if HUB_ID.fullmatch(source):
        return open_hub(source, report, ignore_keys)
    raise ExportError(
        f"{source!r} is neither {DEFAULT!r}, nor an existing file or directory, nor a hub id "
        "such as Qwen/Qwen2.5-0.5B-Instruct"
    )
