"""Architectures: how a family of models is put together. A new one is one file and a line."""

from __future__ import annotations

from collections.abc import Callable

from export.architectures.llama import llama
from export.architectures.opt import opt
from export.config import ModelConfig
from export.dialects import Dialect

ARCHITECTURES: dict[str, Callable[[Dialect, ModelConfig], None]] = {
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": llama,
    "opt": opt,
}
