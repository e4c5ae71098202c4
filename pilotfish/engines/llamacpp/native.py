"""llama.cpp by its C interface: a model, and the cells of all sequences.

In: a GGUF file; then runs of at most RUN tokens, each with its position and its sequences. Out:
logits and hidden states of the last run. One pool of cells serves all sequences and grows by
doubling. What llama.cpp logs goes to the log of `pilotfish.engines`, at DEBUG.
"""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.extras import install_command
from pilotfish.engines.engine_errors import ProviderError

log = logging.getLogger("pilotfish.engines")

RUN = 256  # tokens at once
# Tokens at once of a run that is answered. Memory for logits is held for so many; and from 64 on
# flash attention takes another way on CPUs, which rounds otherwise.
ANSWERED = 48
MOST_SEQUENCES = 256  # LLAMA_MAX_SEQ
CELLS = 512  # to begin with
ERROR = 4  # GGML_LOG_LEVEL_ERROR
GUESSED = 1024  # added to a file's type where the file does not say it
FLOATS = (0, 1, 32)  # types of files in F32, F16, BF16
_complaints: deque[str] = deque(maxlen=4)  # llama.cpp says why it fails only in its log


def load_library() -> Any:
    """Return the module of llama.cpp's functions.

    Raises:
        ProviderError: if the package is missing, or its library cannot be loaded.
    """
    try:
        return _library()
    except ImportError:
        raise ProviderError(
            f"GGUF artifacts run on llama.cpp, which is not installed: {install_command('llamacpp')}"
        ) from None
    except (OSError, RuntimeError, AttributeError) as error:
        raise ProviderError(f"llama-cpp-python cannot be loaded: {error}") from None


@cache
def _library() -> Any:
    from llama_cpp import llama_cpp

    llama_cpp.llama_log_set(_log_callback(llama_cpp), ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


@cache  # so that it lives as long as the library
def _log_callback(api: Any) -> Any:
    def note(level: int, text: bytes, _: object) -> None:
        line = text.decode("utf-8", "replace").strip()
        if level == ERROR and line:
            _complaints.append(line)
        if line:
            log.debug("llama.cpp: %s", line)

    return api.llama_log_callback(note)


def _failure(problem: str) -> ProviderError:
    said = "; ".join(dict.fromkeys(_complaints))
    _complaints.clear()
    return ProviderError(f"{problem}: {said}" if said else problem)


class NativeModel:
    """The weights of a GGUF file.

    Attributes:
        vocabulary: width of the logits.
        width: of the hidden states.
        window: tokens that a layer attends to; 0 = all.
        blocks: whether the weights are quantised.

    Raises:
        ProviderError: if llama.cpp cannot load it, or what it loads cannot be rolled back.
    """

    def __init__(self, path: Path, *, gpu: bool) -> None:
        self.api = api = load_library()
        self.gpu = gpu
        _complaints.clear()
        options = api.llama_model_default_params()
        options.n_gpu_layers = -1 if gpu else 0
        self.handle = api.llama_model_load_from_file(os.fsencode(path), options)
        if not self.handle:
            raise _failure(f"llama.cpp cannot load {path}")
        weakref.finalize(self, api.llama_model_free, self.handle)
        self.vocabulary: int = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.handle))
        self.width: int = api.llama_model_n_embd_out(self.handle)
        self.window: int = api.llama_model_n_swa(self.handle)
        self.blocks = api.llama_model_ftype(self.handle) & ~GUESSED not in FLOATS
        if api.llama_model_is_recurrent(self.handle) or api.llama_model_is_hybrid(self.handle):
            raise ProviderError(
                f"{path} keeps a state that every token changes, and llama.cpp cannot roll it "
                "back: speculative decoding needs a model whose layers all attend"
            )
        if api.llama_model_has_encoder(self.handle) or api.llama_model_is_diffusion(self.handle):
            raise ProviderError(f"{path} does not write a text token by token")


class Cells:
    """Keys and values of all sequences, and the runs that append to them.

    Args:
        sequences: ids lie below it.
        limit: cells at most.
        threads: of one run.
    """

    def __init__(self, model: NativeModel, sequences: int, limit: int, threads: int) -> None:
        self._model, self._api = model, model.api
        self._sequences, self._limit, self._threads = sequences, limit, threads
        self._context: Any = None
        self._close: Callable[[], object] = lambda: None
        self.capacity = 0
        self._open(min(CELLS, limit))

    def reserve(self, cells: int) -> None:
        """Make room for so many cells of all sequences together.

        Raises:
            ProviderError: if there is no memory for them; then all is as before.
        """
        if cells > self.capacity:
            self._open(min(max(cells, 2 * self.capacity), max(cells, self._limit)))

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Let sequence `target` have the cells of `source` at start … end - 1."""
        self._api.llama_memory_seq_cp(self._memory, source, target, start, end)

    def cut(self, sequence: int, start: int) -> None:
        """Drop a sequence's positions from `start` on."""
        if not self._api.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise ProviderError("llama.cpp cannot roll this model back")

    def first(self, sequence: int) -> int:
        """Return the first position that every layer holds; -1 for an empty sequence."""
        found: int = self._api.llama_memory_seq_pos_min(self._memory, sequence)
        return found

    def run(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        sequences: Sequence[Sequence[int]],
        answered: bool,
    ) -> None:
        """Append at most RUN tokens (ANSWERED, if answered) to their sequences.

        Raises:
            ProviderError: if it fails; some of them may be there then.
        """
        api, size = self._api, len(tokens)
        counts = np.array([len(ids) for ids in sequences], np.int32)
        flat = np.array([one for ids in sequences for one in ids], np.int32)
        starts = np.concatenate([[0], np.cumsum(counts[:-1])]).astype(np.uintp)
        places = flat.ctypes.data + starts * np.uintp(flat.itemsize)
        wanted = np.full(size, answered, np.int8)
        batch = api.llama_batch(n_tokens=size)
        for name, array in (
            ("token", tokens),
            ("pos", positions),
            ("n_seq_id", counts),
            ("seq_id", places),
            ("logits", wanted),
        ):
            kind = dict(api.llama_batch._fields_)[name]
            setattr(batch, name, ctypes.cast(array.ctypes.data, kind))
        # with embeddings every token is answered, without them none is
        api.llama_set_embeddings(self._context, answered)
        if code := api.llama_decode(self._context, batch):
            raise _failure(f"llama.cpp could not run {size} tokens ({code})")

    def answers(self, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return views of the last run's logits [rows, V] and hidden states [rows, d]."""
        logits = self._api.llama_get_logits(self._context)
        hidden = self._api.llama_get_embeddings(self._context)
        if not logits or not hidden:
            raise _failure("llama.cpp ran the model, and has no answers")
        return (
            np.ctypeslib.as_array(logits, (rows, self._model.vocabulary)),
            np.ctypeslib.as_array(hidden, (rows, self._model.width)),
        )

    def _open(self, cells: int) -> None:
        """Make a context of so many cells; takes over what the last one holds."""
        api, model = self._api, self._model
        options = api.llama_context_default_params()
        options.n_ctx = -(-cells // 256) * 256
        options.n_batch = options.n_ubatch = RUN
        options.n_outputs_max = max(ANSWERED, self._sequences)
        options.n_seq_max = self._sequences
        options.n_threads = options.n_threads_batch = self._threads
        options.pooling_type = api.LLAMA_POOLING_TYPE_NONE
        options.attention_type = api.LLAMA_ATTENTION_TYPE_CAUSAL
        # Weights in blocks: activations are rounded to 8 bits, which makes much of the least
        # difference, and flash attention on a CPU computes a token alone as among others (up to
        # ANSWERED of them). Other weights: it would round to half precision, and plain attention
        # computes as our own engine does. GPUs have their own kernels for it.
        fused = model.gpu or model.blocks
        options.type_k = options.type_v = api.GGML_TYPE_F16 if fused else api.GGML_TYPE_F32
        options.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_AUTO if fused else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        options.embeddings = True
        options.offload_kqv = options.op_offload = model.gpu
        options.kv_unified = True  # else no cell is in two sequences
        options.swa_full = True  # else rollbacks fail
        made = api.llama_init_from_model(model.handle, options)
        if not made:
            raise _failure(f"llama.cpp has no room for a context of {options.n_ctx} tokens")
        closed = weakref.finalize(self, api.llama_free, made)
        if self.capacity:
            try:
                _take_over(api, self._context, made)
            except ProviderError:
                closed()
                raise
            self._close()
        self._context, self._close = made, closed
        self._memory = api.llama_get_memory(made)
        self.capacity = int(api.llama_n_ctx(made))


def _take_over(api: Any, old: Any, new: Any) -> None:
    """Copy all cells from one context to another."""
    size = api.llama_state_get_size(old)
    state = (ctypes.c_uint8 * size)()
    if api.llama_state_get_data(old, state, size) != size:
        raise _failure("llama.cpp could not read its own state")
    if not api.llama_state_set_data(new, state, size):
        raise _failure("llama.cpp could not take its state over")


def chunks(order: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    """Split into pieces of at most `size`."""
    return (order[start : start + size] for start in range(0, len(order), size))
