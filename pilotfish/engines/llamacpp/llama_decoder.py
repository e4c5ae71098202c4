"""A GGUF file of any architecture, run by llama.cpp: tokens in; logits and hidden states out.

Cells of all slots lie in one pool; each slot has sequences of its own for its chain and the
branches of its tree (`branches`). What cannot be done is refused: models that cannot be rolled
back, and trees with more leaves than a slot has sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.cpus import usable_cpus
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.gpus import warn_of_idle_gpu
from pilotfish.engines.language_model import LanguageModel, Output
from pilotfish.engines.llamacpp.branches import Branches, SlotGrowth
from pilotfish.engines.llamacpp.native import (
    ANSWERED,
    MOST_SEQUENCES,
    RUN,
    Cells,
    NativeModel,
    chunks,
    load_library,
    log,
)
from pilotfish.engines.passes import Pass, check_all

PROVIDERS = ("auto", "cpu", "cuda")
LEAVES = 64  # of a slot's tree at most, so that few slots do not hold memory for 256 sequences
# A run computes logits of all its tokens or of none, and a second run reads all weights again:
# tokens that need no logits run apart if there are more.
SPARE = 32


class LlamaDecoder(LanguageModel):
    """Runs a GGUF artifact with `slots` sequences.

    Args:
        context: positions per slot; None = the model's.
        threads: per run; None = the cores that this process may use.
        provider: "cpu"; "cuda": all layers on the GPU; "auto": so, if llama.cpp was built with one.

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
        self._model = self._load(provider)
        self._leaves = leaves = min(LEAVES, MOST_SEQUENCES // slots)
        if not leaves:
            raise ProviderError(
                f"llama.cpp has {MOST_SEQUENCES} sequences, which are too few for {slots} sessions"
            )
        self.threads = threads or usable_cpus()
        self._cells = Cells(self._model, slots * leaves, slots * self.context, self.threads)
        self._slots = [
            Branches(self._cells, range(slot * leaves, (slot + 1) * leaves))
            for slot in range(slots)
        ]
        # What each slot holds, for layers that forget what leaves their window.
        self._texts: list[list[int]] = [[] for _ in range(slots)]
        self._rows = 0
        self._try_out()

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
            ValueError: if it has not so many, or a part of a tree with branches would be left.
        """
        self._slots[slot].rollback(length)
        del self._texts[slot][length:]
        self._mend(slot)

    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep only the nodes at `path` of the last tree (or of the last pass, a chain).

        See `LanguageModel.keep_path`. No cell moves.
        """
        branches, text = self._slots[slot], self._texts[slot]
        branches.keep_path(path)
        trunk = branches.length - len(path)
        text[trunk:] = [text[trunk + int(node)] for node in path]

    def check(self, passes: Sequence[Pass]) -> None:
        """Raise like `forward` for passes that could not be run."""
        lengths = [branches.length for branches in self._slots]
        check_all(passes, lengths, self.context, self.vocab_size)

    def forward(self, passes: Sequence[Pass]) -> list[Output]:
        """Append each pass to its slot and answer it; at most one pass per slot.

        Nothing is appended if it raises.

        Raises:
            CapacityError: if a slot would exceed its context, or its tree has too many leaves.
            ValueError: if a pass is malformed or continues no tree of its slot, or a slot has two.
            ProviderError: if llama.cpp fails.
        """
        self.check(passes)
        growths = [self._slots[item.slot].plan(item) for item in passes]
        held = sum(branches.length for branches in self._slots)
        self._cells.reserve(held + sum(len(item.tokens) for item in passes))
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
            self._texts[item.slot] += item.tokens.tolist()
        return [
            Output(self._logits[rows, : self.vocab_size], self._hidden[rows]) for rows in places
        ]

    # --- runs ------------------------------------------------------------------------------

    def _run(self, passes: Sequence[Pass], growths: Sequence[SlotGrowth]) -> list[slice]:
        """Run all tokens; return which rows of the answers belong to each pass."""
        tokens = np.concatenate([item.tokens for item in passes]).astype(np.int32)
        positions = np.array([at for growth in growths for at in growth.positions], np.int32)
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
        together = bool(wanted) and len(spare) <= SPARE
        if not together:
            for part in chunks(spare, RUN):
                at = np.array(part)
                self._cells.run(tokens[at], positions[at], [sequences[i] for i in part], False)
        row = 0
        for part in chunks(range(end) if together else wanted, ANSWERED):
            at = np.array(part)
            self._cells.run(tokens[at], positions[at], [sequences[i] for i in part], True)
            logits, hidden = self._cells.answers(len(part))
            asked = np.isin(at, wanted)
            following = row + int(asked.sum())
            self._logits[row:following], self._hidden[row:following] = logits[asked], hidden[asked]
            row = following
        return places

    def _allocate(self, rows: int) -> None:
        """Make room for the answers of so many rows."""
        if rows > self._rows:
            self._rows = rows
            self._logits: NDArray[np.float32] = np.empty((rows, self._model.vocabulary), np.float32)
            self._hidden: NDArray[np.float32] = np.empty((rows, self._model.width), np.float32)

    def _mend(self, slot: int) -> None:
        """Read a slot again, if cells within its last tokens' window were given to other slots.

        llama.cpp may overwrite what no token behind a slot's last one would attend to; a rollback
        makes it the past of tokens again.
        """
        length, window = self.length(slot), self._model.window
        if not window or not length:
            return
        first = self._cells.first(slot * self._leaves)
        if 0 <= first <= max(0, length - window):
            return
        text = np.array(self._texts[slot], np.int64)
        self._slots[slot].rollback(0)
        self._texts[slot].clear()
        for start in range(0, length, RUN):
            self.forward([Pass(slot, text[start : start + RUN], 0)])

    # --- opening ---------------------------------------------------------------------------

    def _load(self, provider: str) -> NativeModel:
        """Load the weights where the provider asks for them."""
        if provider not in PROVIDERS:
            raise ProviderError(
                f"GGUF artifacts run on llama.cpp, not on {provider}: choose {', '.join(PROVIDERS)}"
            )
        able = bool(load_library().llama_supports_gpu_offload())
        if provider == "cuda" and not able:
            raise ProviderError(
                "llama-cpp-python finds no GPU: install it with CMAKE_ARGS=-DGGML_CUDA=on, or "
                "choose --provider cpu"
            )
        gpu = able and provider != "cpu"
        try:
            model = NativeModel(self.artifact.gguf_path, gpu=gpu)
        except ProviderError:
            self.artifact.verify()  # a damaged file is the likeliest reason
            raise
        if model.vocabulary < self.vocab_size:
            raise self.artifact.altered(self.artifact.gguf_path.name)
        log.info("llama.cpp: all layers on the %s", "GPU" if gpu else "CPU")
        if provider == "auto" and not gpu:
            warn_of_idle_gpu(
                "llama-cpp-python finds none: install it with CMAKE_ARGS=-DGGML_CUDA=on"
            )
        self.provider = f"llamacpp-{'gpu' if gpu else 'cpu'}"
        return model

    def _try_out(self) -> None:
        """Run two tokens, and roll them back.

        Raises:
            ProviderError: if the answers are no numbers.
        """
        pair = np.array([0, min(1, self.vocab_size - 1)])[: self.context]
        output = self.forward([Pass(0, pair)])[0]
        if not (np.isfinite(output.logits).all() and np.isfinite(output.hidden).all()):
            raise ProviderError("llama.cpp ran the model, but the answers are no numbers")
        self.rollback(0, 0)
