"""Run an unchanged graph of ONNX Runtime GenAI's model builder: tokens in, logits out.

The engine reads only chains, because the graph's mask has one row per slot. It returns hidden
states if the graph does. `engines.slots` implements slots, `rollback` and `keep_path`; each slot
needs a run.
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.engines.backends import Binding, Load, OpenedBackend, open_backend
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.genai.backend import GenaiBackend
from pilotfish.engines.manifest import GENAI
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.passes import Run

PROVIDERS = {"cpu": "pilotfish.engines.genai.backend:GenaiBackend"}


class GenaiDecoder(Decoder):
    """The engine for artifacts of the dialect genai; see `Decoder`."""

    engine_dialect = GENAI

    def _open(self, load: Load, provider: str) -> OpenedBackend:
        if provider not in ("auto", *PROVIDERS):
            raise ProviderError(
                f"Pilotfish runs graphs of ONNX Runtime GenAI only on the CPU, not on "
                f"{provider}: choose --provider cpu, or export the original checkpoint"
            )
        return open_backend(load, provider, self._probe, PROVIDERS)

    def _fill_inputs(self, binding: Binding, run: Run) -> int:
        [item] = run.passes
        binding.input(self._input_name("input_ids"), (1, len(item.tokens)))[0] = item.tokens
        return max(item.row_count, 1)

    def _fill_attention(self, binding: Binding, run: Run, lengths: Sequence[int]) -> None:
        [item], [length] = run.passes, lengths
        end = length + len(item.tokens)
        # Only the mask's sum matters. The mask is as wide as the buffers, so its shape seldom
        # changes.
        mask = binding.input(self._input_name("attention_mask"), (1, self._cache.capacity))
        mask[0, :end], mask[0, end:] = 1, 0
        if self._graph.form.positions:
            positions = binding.input(self._input_name("position_ids"), (1, len(item.tokens)))
            positions[0] = range(length, end)

    @property
    def _graph(self) -> GenaiBackend:
        assert isinstance(self._backend, GenaiBackend)
        return self._backend

    def _input_name(self, name: str) -> str:
        return self._graph.config.model.decoder.inputs[name]
