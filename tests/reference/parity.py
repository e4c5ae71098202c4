"""Compare artifacts with transformers: checkpoints, answers and artifacts, each made once.

A text is read as speculative decoding reads one: in uneven pieces, with wrong drafts behind them
that are rolled back, and once a long way back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.manifest import Precision
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from tests.reference.families import EVERY, ORIGINAL, write_checkpoint
from tests.support.small_checkpoints import TOKENS as VOCABULARY

Floats = NDArray[np.float32]
LENGTH = 200
TEXT = np.random.default_rng(1).integers(0, len(VOCABULARY), LENGTH)
UNROUNDED = "altup.modality_router"  # which streams are mixed by, as experts are chosen
BLOCK = 32  # inputs that share a scale
# Tokens of each piece, and wrong ones behind it: more than a window, too.
PIECES = ((1, 2), (2, 0), (9, 5), (1, 24), (30, 1), (5, 0), (17, 40), (1, 1), (25, 3))
FAR_BACK = (150, 70)  # at this length, all but so many tokens are read once more


class Answer(NamedTuple):
    """Logits [S, V] without padding rows, and hidden states [S, hidden] after the final norm."""

    logits: Floats
    hidden: Floats

    def worst(self, other: Answer) -> float:
        """The largest difference."""
        return max(float(np.abs(a - b).max()) for a, b in zip(self, other, strict=True))

    def error(self, exact: Answer) -> float:
        """The larger of ‖Δlogits‖ / ‖logits‖ and the same of hidden states."""
        return max(
            float(np.linalg.norm(a - b) / np.linalg.norm(b))
            for a, b in zip(self, exact, strict=True)
        )


def answer(model: Any, tokens: NDArray[np.int64]) -> Answer:
    """Ask transformers, in one pass without a cache. Hidden states are what the head is given."""
    import torch

    seen: list[Any] = []
    head = model.get_output_embeddings()
    with _hooks([head], lambda _, values: seen.append(values[0])), torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0]
    return Answer(logits.float().numpy()[:, : len(VOCABULARY)], seen[-1][0].float().numpy())


@contextmanager
def _hooks(modules: list[Any], hook: Callable[..., Any]) -> Iterator[None]:
    handles = [module.register_forward_pre_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Loaded(NamedTuple):
    """A model as transformers loads it; `clean` if no weight was missing, left over or misfit."""

    model: Any
    clean: bool
    complete: bool  # none was missing or misfit


def load(path: Path, auto: str) -> Loaded:
    """Load a directory in float32."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, result = getattr(transformers, auto).from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
    )
    odd = {key for key, value in result.items() if value}
    return Loaded(model.eval(), not odd, odd <= {"unexpected_keys"})


class Reference:
    """A checkpoint, and what transformers makes of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.family = EVERY[name]
        self.path = write_checkpoint(name, folder)
        self.text = TEXT[:ORIGINAL] if "longrope" in self.family.kinds else TEXT

    @cached_property
    def loaded(self) -> Loaded:
        return load(self.path, self.family.auto)

    @cached_property
    def exact(self) -> Answer:
        """The text in float32."""
        return answer(self.loaded.model, self.text)

    def continued(self, *parts: NDArray[np.int64]) -> Answer:
        """The parts, one behind the other."""
        return answer(self.loaded.model, np.concatenate(parts))

    @cached_property
    def in_half(self) -> Answer:
        """The text by a copy of transformers' model in float16."""
        import copy

        return answer(copy.deepcopy(self.loaded.model).half(), self.text)

    @cached_property
    def in_eighths(self) -> Answer:
        """The text in float32, but what enters a product is rounded to 8 bits by blocks.

        Not what enters an expert's second product.
        """
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        model = self.loaded.model
        products = [
            module
            for name, module in model.named_modules()
            if (isinstance(module, nn.Linear | Conv1D) and not name.endswith(UNROUNDED))
            or type(module).__name__.endswith("Experts")
        ]
        with _hooks(products, lambda _, values: (_rounded(values[0]), *values[1:])):
            return answer(model, self.text)


def _rounded(x: Any) -> Any:
    if x.shape[-1] % BLOCK:
        return x
    blocks = x.unflatten(-1, (-1, BLOCK))
    step = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((blocks / step).round() * step).flatten(-2)


class Library:
    """References and artifacts in a folder, made when first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._references: dict[str, Reference] = {}
        self._artifacts: dict[tuple[str, str, str], Artifact | ExportError] = {}

    def reference(self, name: str) -> Reference:
        if name not in self._references:
            self._references[name] = Reference(name, self._folder / name)
        return self._references[name]

    def artifact(self, name: str, dialect: str, precision: Precision = "fp32") -> Artifact:
        """Export, or raise the same refusal again."""
        key = (name, dialect, precision)
        if key not in self._artifacts:
            source, out = self.reference(name).path, self._folder / "-".join(key)
            try:
                self._artifacts[key] = export_model(
                    str(source), out, precision=precision, dialect=dialect
                )
            except ExportError as refusal:
                self._artifacts[key] = refusal
        result = self._artifacts[key]
        if isinstance(result, ExportError):
            raise result
        return result


def read_in_pieces(decoder: Decoder, text: NDArray[np.int64], slot: int = 0) -> Answer:
    """Read the text in PIECES over and over."""
    random = np.random.default_rng(2)
    logits = np.full((len(text), decoder.vocab_size), np.nan, np.float32)
    hidden = np.full((len(text), decoder.hidden_size), np.nan, np.float32)
    back, turn = FAR_BACK, 0
    while (done := decoder.length(slot)) < len(text):
        if back and done >= back[0]:
            decoder.rollback(slot, back[1])
            logits[back[1] :], back = np.nan, ()
            continue
        size, wrong = PIECES[turn % len(PIECES)]
        turn += 1
        piece = text[done : done + size]
        wrong = min(wrong, decoder.context - done - len(piece))
        drafted = np.concatenate([piece, random.integers(0, decoder.vocab_size, wrong)])
        out = decoder.forward([Pass(slot, drafted)])[0]
        logits[done : done + len(piece)] = out.logits[: len(piece)]
        hidden[done : done + len(piece)] = out.hidden[: len(piece)]
        decoder.rollback(slot, done + len(piece))
    return Answer(logits, hidden)
