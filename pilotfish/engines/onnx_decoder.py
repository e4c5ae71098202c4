"""Run an ONNX artifact: tokens in, logits and hidden states out.

`engines.slots` implements slots, chains, trees, `rollback` and `keep_path`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from pilotfish.engines.artifact import Artifact, check_whole
from pilotfish.engines.backends import Binding
from pilotfish.engines.engine_errors import ArtifactError, ProviderError
from pilotfish.engines.language_model import ENGINES, LanguageModel, Output
from pilotfish.engines.passes import Pass, Run, fill_positions, fill_rows, fill_tokens
from pilotfish.engines.slots import Slots

__all__ = ["Decoder", "Output", "Pass"]


class Decoder(Slots, LanguageModel):
    """The engine of models that are ONNX graphs; `open_model` chooses the engine of an artifact.

    Args:
        context: positions per slot; None = the model's, or the number that a TensorRT engine was
        built for.
        threads: CPU threads per run; None = one per core that this process may use.
        provider: a name of `engines.backends.PROVIDERS`, or "auto": the best provider that works
        without building an engine first (see docs/engines.md).

    Raises:
        ArtifactError: if the directory is not an artifact or is a stage of a model, or if graph and
        manifest contradict each other.
        ProviderError: if no inference runtime can run the model.
    """

    engine_dialect: ClassVar[str | None] = None  # the dialect in ENGINES that this class runs

    def __init__(
        self,
        artifact: Artifact | str | Path,
        *,
        slots: int = 1,
        context: int | None = None,
        threads: int | None = None,
        provider: str = "auto",
    ) -> None:
        opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
        check_whole(opened.path, opened.manifest)
        dialect = opened.manifest.dialect
        if dialect in ENGINES and dialect != self.engine_dialect:
            raise ProviderError(
                f"{opened.path} has dialect {dialect}, which another engine runs: open the "
                "artifact with open_model"
            )
        self.vocab_size = opened.manifest.vocab_size
        super().__init__(
            opened,
            slots=slots,
            context=context,
            threads=threads,
            provider=provider,
            vocabulary=opened.manifest.readable_tokens,
        )
        self._check_head()

    def _check_head(self) -> None:
        """Raise `ArtifactError` if the logits' width in the graph contradicts the manifest."""
        head_tokens, width = self.artifact.head_tokens, self._backend.widths["logits"]
        expected = self.vocab_size if head_tokens is None else len(head_tokens)
        if width < expected or (
            head_tokens is not None and width > expected
        ):  # only a whole head is padded
            raise ArtifactError(
                f"{self.artifact.path} is inconsistent: its graph computes logits of {width} "
                f"tokens, but its manifest states {expected}: export the model again"
            )

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states; 0 if the model returns none."""
        return self._backend.widths.get("hidden_states", 0)

    def forward(self, passes: Sequence[Pass]) -> list[Output]:
        """Append each pass to its slot and compute its output; at most one pass per slot.

        If this raises, nothing is appended.

        Raises:
            CapacityError: if a slot would exceed its context.
            ValueError: if a pass is malformed, or a slot has two.
        """
        self.check(passes)
        places = self._append(passes)
        logits, hidden = self._answers["logits"], self._answers.get("hidden_states")
        if hidden is None:
            hidden = np.empty((len(logits), 0), np.float32)
        return [Output(logits[rows, : self.vocab_size], hidden[rows]) for rows in places]

    def _fill_inputs(self, binding: Binding, run: Run) -> int:
        fill_tokens(binding, run)
        fill_positions(binding, run, self._cache.lengths)
        return fill_rows(binding, run)

    def _example_pass(self) -> Pass:
        return Pass(0, np.array([0, min(1, self.vocab_size - 1)]), 1)
