"""Round a model's matrices to 4 bits by their inputs on a built-in text.

In: a source of weights that were not rounded before. Out: one matrix after the other, rounded so
that its outputs on the text change least (`export.error_compensation`). The text is read in
float32, one layer at a time, so only one layer's weights and second moments are in memory.

Matrices outside the layers, matrices that are wider than WIDEST, and all matrices if the text
cannot be read, are rounded with a search for scales instead. Weights that were rounded before keep
their values (`export.quantize`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.engine_errors import TemplateError
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export.blocks import BLOCK, LARGEST, Quantized
from pilotfish.export.error_compensation import BITS, round_compensated
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model_config import ModelConfig
from pilotfish.export.quantize import is_rounded, quantize
from pilotfish.export.reference import Reference
from pilotfish.export.sources import Progress, WeightSource
from pilotfish.export.weights import layer_of

log = logging.getLogger("pilotfish.export")
# The text has what drafters meet: chats, sums, code, prose, lists, data and other languages. It
# shares no sentence with the text on which the cost of a precision is measured (`export.cost`).
TEXTS = resources.files("pilotfish.export") / "texts"
PLAIN = (TEXTS / "calibration.txt").read_text("utf-8")
# Questions and answers, which the model reads in its own chat template.
CHATS: list[tuple[str, str]] = json.loads((TEXTS / "calibration_chats.json").read_text("utf-8"))
LONGEST = 2048  # maximum number of tokens of the text, for vocabularies of bytes
WIDEST = 12288  # maximum width of a matrix, since the Cholesky factor takes 8 · width² bytes

FINE = ("v_proj",)  # modules whose weights get 8 bits

Floats = NDArray[np.float32]


class Calibration:
    """A text's path through the layers, which rounds the matrices in the order of the layers.

    Args:
        source: the model's weights.
        config: the model's shape.
        vocabulary: the model's tokenizer and chat template.
        folder: folder for temporary graphs, one per layer.
        progress: called as progress(label, done, total).

    Attributes:
        matrices: number of matrices that were rounded by their inputs.
    """

    def __init__(
        self,
        source: WeightSource,
        config: ModelConfig,
        vocabulary: Vocabulary,
        folder: Path,
        progress: Progress | None = None,
    ) -> None:
        self._config, self._vocabulary, self._progress = config, vocabulary, progress
        self._reference = Reference(source, config, folder)
        self._layers: Iterator[dict[str, Floats]] | None = None
        self._layer, self._moments = -1, dict[str, Floats]()
        self._failed = False
        self.matrices = 0

    def round(self, product: str, name: str, weight: Floats) -> Quantized:
        """Round the weight [N, K] of the module `name`, in the order of the layers.

        product: the name of the module's product in `Dialect.products`.
        """
        fine = name.endswith(FINE)
        if fine or weight.shape[1] % BLOCK or is_rounded(weight, BITS):
            bits = 8 if fine and not is_rounded(weight, BITS) else BITS
            return quantize(f"{name}.weight", weight, bits, widest=LARGEST)
        moments = self._find_moments(product) if weight.shape[1] <= WIDEST else None
        self.matrices += moments is not None
        return round_compensated(weight, moments)

    def _find_moments(self, product: str) -> Floats | None:
        """Return the second moments [K, K] of a product's inputs; None if they are unknown."""
        layer = layer_of(product)
        if layer is None:
            return None
        try:
            while not self._failed and self._layer < layer:
                self._read_layer()
        except Exception as error:  # runtimes raise many error classes
            self._failed = True
            self._moments = {}
            reason = str(error).strip() or type(error).__name__
            log.warning(
                "%s: weights are rounded without a text, which could not be read: %s",
                self._config.name,
                reason,
            )
        return self._moments.get(product)

    def _read_layer(self) -> None:
        """Run the next layer on the text; keep the second moments of its products' inputs."""
        if self._layers is None:
            tokens = calibration_tokens(self._vocabulary, min(self._config.context, LONGEST))
            self._layers = self._reference.inputs(tokens)
        inputs = next(self._layers)
        self._layer += 1
        self._moments = {}
        for label, x in inputs.items():
            rows = x.reshape(-1, x.shape[-1])
            if rows.shape[1] > WIDEST:
                continue
            with np.errstate(over="ignore", invalid="ignore"):
                self._moments[label] = rows.T @ rows
            if not np.isfinite(self._moments[label]).all():
                raise ExportError(f"the inputs of {label} are NaN or too large")
        if self._progress:
            self._progress("calibration", self._layer + 1, self._config.layers)


def calibration_tokens(vocabulary: Vocabulary, most: int) -> NDArray[np.int64]:
    """Encode the built-in text, the chats in the model's template; i64 [at most `most`]."""
    tokenizer, ids = vocabulary.tokenizer, list[int]()
    for question, answer in CHATS:
        ids += _encode_chat(vocabulary, question, answer)
    ids += [*tokenizer.beginning, *tokenizer.encode(PLAIN)]
    return np.array(ids[:most], np.int64)


def _encode_chat(vocabulary: Vocabulary, question: str, answer: str) -> list[int]:
    """Encode a question and its answer, in the model's chat template if it has one."""
    tokenizer = vocabulary.tokenizer
    roles = {"user": question, "assistant": answer}
    turns = [{"role": role, "content": content} for role, content in roles.items()]
    if vocabulary.template is not None:
        try:
            chat = vocabulary.template.render(turns, add_generation_prompt=False)
            return tokenizer.encode(chat, special=True)
        except TemplateError:
            log.info("%s: the chat template cannot render a plain chat", vocabulary.model)
    return [*tokenizer.beginning, *tokenizer.encode(f"{question}\n\n{answer}\n\n")]
