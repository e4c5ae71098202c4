"""A graph of ONNX Runtime GenAI's model builder, run unchanged: tokens in; logits out.

It reads chains only, since the graph's mask has one row per slot. It returns hidden states if the
graph has them. Slots, `rollback` and `keep_path` are those of `engines.slots`; slots run one after
the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.engines.backends import Backend, Binding, Load, open_backend
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.genai.backend import GenaiBackend
from pilotfish.engines.manifest import GENAI
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.passes import Pass

PROVIDERS = {"cpu": "pilotfish.engines.genai.backend:GenaiBackend"}


class GenaiDecoder(Decoder):
    """Runs an artifact of the dialect genai with `slots` sequences; see `Decoder`."""

    engine_dialect = GENAI

    def _open(self, load: Load, provider: str) -> tuple[Backend, str]:
        if provider not in ("auto", *PROVIDERS):
            raise ProviderError(
                f"graphs of ONNX Runtime GenAI run on the CPU here, not on {provider}: choose "
                "--provider cpu, or export the checkpoint itself"
            )
        return open_backend(load, provider, self._probe, PROVIDERS)

    def _fill_inputs(self, binding: Binding, passes: Sequence[Pass]) -> int:
        [item] = passes
        binding.input(self._input_name("input_ids"), (1, len(item.tokens)))[0] = item.tokens
        return max(item.row_count, 1)

    def _fill_attention(
        self, binding: Binding, passes: Sequence[Pass], first: int, lengths: Sequence[int]
    ) -> None:
        [item], [length] = passes, lengths
        end = length + len(item.tokens)
        # The mask is as wide as the buffers, which change seldom; only its sum matters.
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
