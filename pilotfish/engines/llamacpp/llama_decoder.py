"""Run a GGUF file of any architecture with llama.cpp: tokens in, logits and hidden states out.

One pool holds the cells of all slots. Each slot has several of llama.cpp's sequences, for its chain
and the branches of its tree (`branches`). This engine refuses models that llama.cpp cannot roll
back, and trees with more leaves than a slot has sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.cpus import usable_cpus
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.gpus import find_idle_gpu
from pilotfish.engines.language_model import LanguageModel, Output
from pilotfish.engines.llamacpp.branches import Branches, SlotGrowth
from pilotfish.engines.llamacpp.native import (
    MOST_ANSWERED,
    MOST_RUN_TOKENS,
    MOST_SEQUENCES,
    Cells,
    NativeModel,
    chunks,
    load_library,
    log,
)
from pilotfish.engines.passes import Pass, check_all

PROVIDERS = ("auto", "cpu", "cuda")
# maximum number of leaves of a slot's tree: more sequences per slot would waste memory
MOST_LEAVES = 64
# Maximum number of tokens without logits in a run with logits. llama.cpp computes the logits of all
# tokens of a run or of none. So more tokens than this maximum get a separate run without logits,
# although that run reads all weights again.
MOST_SPARE = 32


class LlamaDecoder(LanguageModel):
    """The engine for GGUF artifacts.

    Args:
        context: positions per slot; None = the model's.
        threads: CPU threads per run; None = one per core that this process may use.
        provider: "cpu"; "cuda": all layers on the GPU; "auto": the GPU if llama.cpp supports it.

    Raises:
        ArtifactError: if the file is not the one that was exported.
        ProviderError: if llama.cpp is missing, or cannot run the model here.
    """

    def __init__(
        self,
        artifact: Artifact,
        *,
        slots: int = 1,
        context: int | None = None,
        threads: int | None = None,
        provider: str = "auto",
    ) -> None:
        manifest = artifact.manifest
        self.artifact, self.slots = artifact, slots
        self.vocab_size = manifest.vocab_size
        longest = manifest.dimensions.context
        self.context = min(context or longest, longest)
        self._model = self._load_model(provider)
        self._leaves = leaves = min(MOST_LEAVES, MOST_SEQUENCES // slots)
        if not leaves:
            raise ProviderError(
                f"llama.cpp allows {MOST_SEQUENCES} sequences, which are too few for {slots} "
                "sessions: serve fewer sessions"
            )
        self.threads = threads or usable_cpus()
        self._cells = Cells(self._model, slots * leaves, slots * self.context, self.threads)
        self._slots = [
            Branches(self._cells, range(slot * leaves, (slot + 1) * leaves))
            for slot in range(slots)
        ]
        # Token ids in each slot, to recompute cells that layers with windows have overwritten.
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._rows = 0
        self._probe()

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self._model.width

    def length(self, slot: int) -> int:
        """Return the number of tokens in the slot."""
        return self._slots[slot].length

    def rollback(self, slot: int, length: int) -> None:
        """Drop all but the first `length` tokens of a slot.

        Raises:
            ValueError: if the slot has fewer tokens, or part of a tree with branches would remain.
        """
        self._slots[slot].rollback(length)
        del self._tokens[slot][length:]
        self._reread_lost(slot)

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep the nodes at `path` of the last tree (or chain), and drop its other nodes.

        This moves no cell. See `LanguageModel.keep_path`.
        """
        branches, tokens = self._slots[slot], self._tokens[slot]
        branches.keep_path(path)
        trunk = branches.length - len(path)
        tokens[trunk:] = [tokens[trunk + int(node)] for node in path]

    def check(self, passes: Sequence[Pass]) -> None:
        """Raise the error that `forward` would raise for these passes; run nothing."""
        lengths = [branches.length for branches in self._slots]
        check_all(passes, lengths, self.context, self.vocab_size)

    def forward(self, passes: Sequence[Pass]) -> list[Output]:
        """Append each pass to its slot and compute its output; at most one pass per slot.

        If this raises, nothing is appended.

        Raises:
            CapacityError: if a slot would exceed its context, or its tree has too many leaves.
            ValueError: if a pass is malformed or continues no tree of its slot, or a slot has two.
            ProviderError: if llama.cpp fails.
        """
        self.check(passes)
        growths = [self._slots[item.slot].plan(item) for item in passes]
        cells = sum(branches.length for branches in self._slots)
        self._cells.reserve(cells + sum(len(item.tokens) for item in passes))
        try:
            for item, growth in zip(passes, growths, strict=True):
                self._slots[item.slot].enter(growth)
            places = self._run(passes, growths)
        except BaseException:
            for item, growth in zip(passes, growths, strict=True):
                self._slots[item.slot].undo(growth)
            raise
        for item, growth in zip(passes, growths, strict=True):
            self._slots[item.slot].commit(growth)
            self._tokens[item.slot] += item.tokens.tolist()
        return [
            Output(self._logits[rows, : self.vocab_size], self._hidden[rows]) for rows in places
        ]

    # --- runs ------------------------------------------------------------------------------

    def _run(self, passes: Sequence[Pass], growths: Sequence[SlotGrowth]) -> list[slice]:
        """Run the tokens of all passes; return the output rows of each pass."""
        tokens = np.concatenate([item.tokens for item in passes]).astype(np.int32)
        positions = np.array([index for growth in growths for index in growth.positions], np.int32)
        sequences = [ids for growth in growths for ids in growth.sequences]
        wanted: list[int] = []
        places: list[slice] = []
        end = 0
        for item in passes:
            end += len(item.tokens)
            places.append(slice(len(wanted), len(wanted) + item.row_count))
            wanted += range(end - item.row_count, end)
        self._allocate(len(wanted))
        spare = sorted({*range(end)} - {*wanted})
        one_run = bool(wanted) and len(spare) <= MOST_SPARE
        if not one_run:
            for part in chunks(spare, MOST_RUN_TOKENS):
                index = np.array(part)
                self._cells.run(
                    tokens[index], positions[index], [sequences[i] for i in part], False
                )
        row = 0
        for part in chunks(range(end) if one_run else wanted, MOST_ANSWERED):
            index = np.array(part)
            self._cells.run(tokens[index], positions[index], [sequences[i] for i in part], True)
            logits, hidden = self._cells.answers(len(part))
            answered = np.isin(index, wanted)
            following = row + int(answered.sum())
            self._logits[row:following], self._hidden[row:following] = (
                logits[answered],
                hidden[answered],
            )
            row = following
        return places

    def _allocate(self, rows: int) -> None:
        """Allocate buffers for `rows` rows of outputs."""
        if rows > self._rows:
            self._rows = rows
            self._logits: NDArray[np.float32] = np.empty((rows, self._model.vocabulary), np.float32)
            self._hidden: NDArray[np.float32] = np.empty((rows, self._model.width), np.float32)

    def _reread_lost(self, slot: int) -> None:
        """Run a slot's tokens again if llama.cpp overwrote cells in the window of its last token.

        llama.cpp may overwrite cells outside the window of the next token. After a rollback, the
        window begins earlier and may include such cells.
        """
        length, window = self.length(slot), self._model.window
        if not window or not length:
            return
        first = self._cells.first(slot * self._leaves)
        if 0 <= first <= max(0, length - window):
            return
        text = np.array(self._tokens[slot], np.int64)
        self._slots[slot].rollback(0)
        self._tokens[slot].clear()
        for start in range(0, length, MOST_RUN_TOKENS):
            self.forward([Pass(slot, text[start : start + MOST_RUN_TOKENS], 0)])

    # --- opening ---------------------------------------------------------------------------

    def _load_model(self, provider: str) -> NativeModel:
        """Load the weights for the requested provider."""
        if provider not in PROVIDERS:
            raise ProviderError(
                f"GGUF artifacts run on llama.cpp, not on {provider}: choose {', '.join(PROVIDERS)}"
            )
        can_offload = bool(load_library().llama_supports_gpu_offload())
        if provider == "cuda" and not can_offload:
            raise ProviderError(
                "llama-cpp-python finds no GPU: install it with CMAKE_ARGS=-DGGML_CUDA=on, or "
                "choose --provider cpu"
            )
        gpu = can_offload and provider != "cpu"
        try:
            model = NativeModel(self.artifact.gguf_path, gpu=gpu)
        except ProviderError:
            self.artifact.verify()  # called because a damaged file is the most likely reason
            raise
        if model.vocabulary < self.vocab_size:
            raise self.artifact.altered_error(self.artifact.gguf_path.name)
        log.info("llama.cpp: all layers on the %s", "GPU" if gpu else "CPU")
        self.idle_gpu = None
        if provider == "auto" and not gpu:
            self.idle_gpu = find_idle_gpu(
                ["llama-cpp-python finds no GPU: install it with CMAKE_ARGS=-DGGML_CUDA=on"]
            )
        self.provider = f"llamacpp-{'gpu' if gpu else 'cpu'}"
        return model

    def _probe(self) -> None:
        """Run two tokens, and roll them back.

        Raises:
            ProviderError: if outputs contain NaN or infinite numbers.
        """
        pair = np.array([0, min(1, self.vocab_size - 1)])[: self.context]
        output = self.forward([Pass(0, pair)])[0]
        if not (np.isfinite(output.logits).all() and np.isfinite(output.hidden).all()):
            raise ProviderError(
                "llama.cpp ran the model, but its outputs contain NaN or infinite numbers"
            )
        self.rollback(0, 0)
