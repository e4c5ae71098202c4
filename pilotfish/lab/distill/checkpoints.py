"""Store and load weights during training; each file is written atomically."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from safetensors import SafetensorError, safe_open

from pilotfish.base.errors import RunFileError
from pilotfish.base.files import move_into_place, partial_path
from pilotfish.base.reading import reading_file

if TYPE_CHECKING:
    import torch


def store(path: Path, tensors: dict[str, torch.Tensor], facts: dict[str, float]) -> None:
    """Write tensors and facts about them (name, number) into one file, atomically."""
    from safetensors.torch import save_file

    partial = partial_path(path)
    try:
        metadata = {"facts": msgspec.json.encode(facts).decode()}
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata
        )
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        move_into_place(partial, path)
    except SafetensorError as error:  # safetensors raises this error when the disk is full
        partial.unlink(missing_ok=True)
        raise OSError(f"{path} cannot be written: {error}") from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def restore(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read a file's tensors and facts; raise `RunFileError` if the file is damaged."""
    facts = restore_facts(path)
    with safe_open(path, "pt") as file:
        names = file.keys()  # `file` itself cannot be iterated
        return {name: file.get_tensor(name) for name in names}, facts


def restore_facts(path: Path) -> dict[str, Any]:
    """Read a file's facts without its tensors."""

    def damaged(problem: object) -> RunFileError:
        return RunFileError(
            f"{path} cannot be read: {problem}. To train from the start, delete checkpoint-* "
            "and best.safetensors in that folder; the answers stay."
        )

    with reading_file(damaged):
        try:
            with safe_open(path, "pt") as file:
                return msgspec.json.decode(file.metadata()["facts"], type=dict[str, float])
        except (SafetensorError, KeyError, TypeError) as error:
            raise damaged(error) from error
