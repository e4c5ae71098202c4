"""Read a JSON object from a model's files: a configuration, tokenizer settings, an index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from pilotfish.base.reading import read_content, reading_file
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.mapped_file import refuse_pointer

# Infinity without quotes, which Python's json (and so transformers) writes; it is invalid JSON.
_BARE_INFINITY = re.compile(rb"(?<=[\s,\[:])Infinity(?=[\s,\]}])")
_INFINITY = rb'{"__float__": "Infinity"}'


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file is absent.

    Raises:
        ExportError: if the file cannot be read, or does not contain a JSON object.
    """
    with reading_file(lambda problem: ExportError(f"{path} cannot be read: {problem}")):
        try:
            data = read_content(path)
            refuse_pointer(path, data)
            return _decode(data)
        except FileNotFoundError:
            return {}


def _decode(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError:
        if _BARE_INFINITY.search(data) is None:
            raise
        return msgspec.json.decode(_BARE_INFINITY.sub(_INFINITY, data), type=dict[str, Any])
