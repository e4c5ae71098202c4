"""llama.cpp's C interface: a model, and the cells of all sequences.

In: a GGUF file; then runs of at most MOST_RUN_TOKENS tokens, each with its position and its
sequences. Out: logits and hidden states of the last run. One pool of cells serves all sequences and
grows by doubling. llama.cpp's log goes to the log of `pilotfish.engines`, at DEBUG.
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

MOST_RUN_TOKENS = 256  # maximum number of tokens per run
# Maximum number of tokens of a run with logits; memory for all these logits is allocated. From 64
# tokens on, flash attention on the CPU uses another algorithm, which rounds differently.
MOST_ANSWERED = 48
MOST_SEQUENCES = 256  # maximum number of sequences in llama.cpp, LLAMA_MAX_SEQ
FIRST_CELLS = 512  # initial capacity (cells)
ERROR_LEVEL = 4  # GGML_LOG_LEVEL_ERROR
GUESSED_TYPE = 1024  # flag in a file's type if llama.cpp guessed it
FLOAT_TYPES = (0, 1, 32)  # file types F32, F16, BF16
_error_lines: deque[str] = deque(
    maxlen=4
)  # llama.cpp reports the cause of a failure only in its log


def load_library() -> Any:
    """Return the module of llama.cpp's functions.

    Raises:
        ProviderError: if the package is missing, or its library cannot be loaded.
    """
    try:
        return _library()
    except ImportError:
        raise ProviderError(
            "GGUF artifacts run on llama.cpp, which is not installed: "
            f"{install_command('llamacpp')}"
        ) from None
    except (OSError, RuntimeError, AttributeError) as error:
        raise ProviderError(f"llama-cpp-python cannot be loaded: {error}") from None


@cache
def _library() -> Any:
    from llama_cpp import llama_cpp

    llama_cpp.llama_log_set(_log_callback(llama_cpp), ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


@cache  # the cache keeps the callback alive as long as the library
def _log_callback(api: Any) -> Any:
    def log_line(level: int, text: bytes, _: object) -> None:
        line = text.decode("utf-8", "replace").strip()
        if level == ERROR_LEVEL and line:
            _error_lines.append(line)
        if line:
            log.debug("llama.cpp: %s", line)

    return api.llama_log_callback(log_line)


def _failure(problem: str) -> ProviderError:
    messages = "; ".join(dict.fromkeys(_error_lines))
    _error_lines.clear()
    return ProviderError(f"{problem}: {messages}" if messages else problem)


class NativeModel:
    """The weights of a GGUF file.

    Attributes:
        vocabulary: width of the logits.
        width: width of the hidden states.
        window: size (tokens) of the attention window; 0 = none.
        blocks: whether the weights are quantised.

    Raises:
        ProviderError: if llama.cpp cannot load the file, or cannot roll the model back.
    """

    def __init__(self, path: Path, *, gpu: bool) -> None:
        self.api = api = load_library()
        self.gpu = gpu
        _error_lines.clear()
        options = api.llama_model_default_params()
        options.n_gpu_layers = -1 if gpu else 0
        self.handle = api.llama_model_load_from_file(os.fsencode(path), options)
        if not self.handle:
            raise _failure(f"llama.cpp cannot load {path}")
        weakref.finalize(self, api.llama_model_free, self.handle)
        self.vocabulary: int = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.handle))
        self.width: int = api.llama_model_n_embd_out(self.handle)
        self.window: int = api.llama_model_n_swa(self.handle)
        self.blocks = api.llama_model_ftype(self.handle) & ~GUESSED_TYPE not in FLOAT_TYPES
        if api.llama_model_is_recurrent(self.handle) or api.llama_model_is_hybrid(self.handle):
            raise ProviderError(
                f"{path} has recurrent states, which llama.cpp cannot roll back: choose a "
                "model in which every layer has attention"
            )
        if api.llama_model_has_encoder(self.handle) or api.llama_model_is_diffusion(self.handle):
            raise ProviderError(f"{path} is not an autoregressive text model")


class Cells:
    """Keys and values of all sequences, and the runs that append to them.

    Args:
        sequences: number of sequence ids.
        limit: largest number of cells, over all sequences.
        threads: threads per run.
    """

    def __init__(self, model: NativeModel, sequences: int, limit: int, threads: int) -> None:
        self._model, self._api = model, model.api
        self._sequences, self._limit, self._threads = sequences, limit, threads
        self._context: Any = None
        self._close: Callable[[], object] = lambda: None
        self.capacity = 0
        self._open(min(FIRST_CELLS, limit))

    def reserve(self, cells: int) -> None:
        """Make room for this many cells of all sequences together.

        Raises:
            ProviderError: if there is not enough memory; then nothing changes.
        """
        if cells > self.capacity:
            self._open(min(max(cells, 2 * self.capacity), max(cells, self._limit)))

    def copy(self, source: int, target: int, start: int, end: int) -> None:
        """Add the cells of `source` at start … end − 1 to sequence `target`."""
        self._api.llama_memory_seq_cp(self._memory, source, target, start, end)

    def cut(self, sequence: int, start: int) -> None:
        """Drop a sequence's positions from `start` on."""
        if not self._api.llama_memory_seq_rm(self._memory, sequence, start, -1):
            raise ProviderError("llama.cpp cannot roll this model back")

    def first(self, sequence: int) -> int:
        """Return the first position that is present in every layer; -1 for an empty sequence."""
        position: int = self._api.llama_memory_seq_pos_min(self._memory, sequence)
        return position

    def run(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        sequences: Sequence[Sequence[int]],
        answered: bool,
    ) -> None:
        """Append at most MOST_RUN_TOKENS tokens to their sequences; compute outputs if `answered`.

        Raises:
            ProviderError: if the run fails; some of the tokens may then be in the cells.
        """
        api, size = self._api, len(tokens)
        counts = np.array([len(ids) for ids in sequences], np.int32)
        flat = np.array([sequence for ids in sequences for sequence in ids], np.int32)
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
        # With embeddings on, llama.cpp computes outputs for every token; otherwise for none.
        api.llama_set_embeddings(self._context, answered)
        if code := api.llama_decode(self._context, batch):
            raise _failure(f"llama.cpp failed to run {size} tokens (error code {code})")

    def answers(self, rows: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return views of the last run's logits [rows, V] and hidden states [rows, d]."""
        logits = self._api.llama_get_logits(self._context)
        hidden = self._api.llama_get_embeddings(self._context)
        if not logits or not hidden:
            raise _failure("llama.cpp ran the model, but returned no outputs")
        return (
            np.ctypeslib.as_array(logits, (rows, self._model.vocabulary)),
            np.ctypeslib.as_array(hidden, (rows, self._model.width)),
        )

    def _open(self, cells: int) -> None:
        """Open a llama.cpp context with room for `cells`.

        Copy the previous context's cells into it.
        """
        api, model = self._api, self._model
        options = api.llama_context_default_params()
        options.n_ctx = -(-cells // 256) * 256
        options.n_batch = options.n_ubatch = MOST_RUN_TOKENS
        options.n_outputs_max = max(MOST_ANSWERED, self._sequences)
        options.n_seq_max = self._sequences
        options.n_threads = options.n_threads_batch = self._threads
        options.pooling_type = api.LLAMA_POOLING_TYPE_NONE
        options.attention_type = api.LLAMA_ATTENTION_TYPE_CAUSAL
        # With quantised weights, activations are rounded to 8 bits, which amplifies tiny
        # differences. There we use flash attention: on the CPU it gives a token the same result
        # alone and among up to MOST_ANSWERED tokens. With other weights, flash attention would
        # round to half precision, and plain attention agrees with our ONNX engine. On a GPU, flash
        # attention is always used.
        fused = model.gpu or model.blocks
        options.type_k = options.type_v = api.GGML_TYPE_F16 if fused else api.GGML_TYPE_F32
        options.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_AUTO if fused else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        options.embeddings = True
        options.offload_kqv = options.op_offload = model.gpu
        options.kv_unified = True  # lets sequences share cells
        options.swa_full = True  # makes rollbacks work in layers with attention windows
        context = api.llama_init_from_model(model.handle, options)
        if not context:
            raise _failure(
                f"llama.cpp cannot allocate memory for a context of {options.n_ctx} tokens"
            )
        close = weakref.finalize(self, api.llama_free, context)
        if self.capacity:
            try:
                _take_over(api, self._context, context)
            except ProviderError:
                close()
                raise
            self._close()
        self._context, self._close = context, close
        self._memory = api.llama_get_memory(context)
        self.capacity = int(api.llama_n_ctx(context))


def _take_over(api: Any, old: Any, new: Any) -> None:
    """Copy all cells from one context to another."""
    size = api.llama_state_get_size(old)
    state = (ctypes.c_uint8 * size)()
    if api.llama_state_get_data(old, state, size) != size:
        raise _failure("llama.cpp could not read its own state")
    if not api.llama_state_set_data(new, state, size):
        raise _failure("llama.cpp could not restore its own state")


def chunks(order: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    """Split a sequence into pieces of at most `size` items."""
    return (order[start : start + size] for start in range(0, len(order), size))
