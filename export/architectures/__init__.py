"""Architectures: how a family of models is put together. A new one is one file and a line."""

from __future__ import annotations

from collections.abc import Callable

from pilotfish.export.architectures.llama import llama
from pilotfish.export.architectures.opt import opt
from pilotfish.export.config import ModelConfig
from pilotfish.export.dialects import Dialect

ARCHITECTURES: dict[str, Callable[[Dialect, ModelConfig], None]] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": llama,
    "opt": opt,
}
