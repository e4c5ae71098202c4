"""Run one stage of a model that was cut into stages, or the model's head.

    Stage 1: tokens → states;   Stage k: states → states;   Stage N: states → hidden states
    Head (stored in the folder of stage 1): hidden states → logits

Each stage has the keys and values of its layers, in slots like those of a `Decoder`. All stages
must get the same passes, rollbacks and kept paths in the same order. The states that a stage
returns are the input of the next stage. Not thread-safe: only one thread may use it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact
from pilotfish.engines.backends import Binding, no_provider_error
from pilotfish.engines.engine_errors import ArtifactError, ProviderError
from pilotfish.engines.gpus import IdleGpu, find_idle_gpu
from pilotfish.engines.passes import Pass, Run, fill_positions, fill_rows, fill_tokens
from pilotfish.engines.runtime import CPU, CUDA, open_session
from pilotfish.engines.slots import Slots
from pilotfish.engines.stage_range import StageRange
from pilotfish.engines.tensorrt.edition import RTX, STANDARD, Edition

__all__ = ["Head", "Pass", "Stage"]

log = logging.getLogger("pilotfish.engines")

States = NDArray[np.float32]

# The providers that run stages, best first: TensorRT's libraries, or ONNX Runtime's names.
PROVIDERS: Mapping[str, str | Edition] = {
    "tensorrt": STANDARD,
    "tensorrt-rtx": RTX,
    "cuda": CUDA,
    "cpu": CPU,
}
# Maximum magnitude of input states, by the stage's dtype. The sum of 32,768 squares of such numbers
# still fits in float32: no norm overflows, which would leave NaN in the cache for good.
LARGEST = {"float32": 2.0**56, "float16": 65504.0}


class Stage(Slots):
    """The engine of a stage: some layers of a model, with `slots` sequences.

    Args:
        artifact: a folder made by `pilotfish export split`.
        context: positions per slot; None = the model's.
        threads: threads per run; None = the cores that this process may use.
        provider: a name of PROVIDERS, or "auto".

    Raises:
        ArtifactError: if the directory is not a stage of a model.
        ProviderError: if no inference runtime can run it.
    """

    def __init__(
        self,
        artifact: Artifact | str | Path,
        *,
        slots: int = 1,
        context: int | None = None,
        threads: int | None = None,
        provider: str = "auto",
    ) -> None:
        opened, self.cut = _open_stage(artifact)
        _check_provider(provider)
        self._largest = LARGEST[opened.manifest.kv_dtype]
        self.width = opened.manifest.dimensions.hidden
        super().__init__(
            opened,
            slots=slots,
            context=context,
            threads=threads,
            provider=provider,
            vocabulary=opened.manifest.vocab_size if self.cut.first else None,
        )

    @property
    def first(self) -> bool:
        """Whether this is the first stage, which reads token ids instead of states."""
        return self.cut.first

    @property
    def last(self) -> bool:
        """Whether this is the last stage, which returns the final norm's output for wanted rows."""
        return self.cut.last

    @property
    def answer_width(self) -> int:
        """The width of an output row: `width`, unless the last stage's norm is narrower."""
        return next(iter(self._backend.widths.values()))

    def forward(self, passes: Sequence[Pass], states: States | None = None) -> States:
        """Append each pass to its slot, at most one per slot; append nothing if this raises.

        Args:
            passes: see `Decoder.forward`. Only the first stage reads token ids; only the last reads
            `rows`.
            states: f32 [T, width], the previous stage's output for the same passes; None for the
            first stage.

        Returns:
            f32 [T, width], the states of all tokens in the order of the passes; from the last stage
            f32 [rows wanted, answer_width]. The array is valid until the next `forward`.

        Raises:
            CapacityError: if a slot would exceed its context.
            ValueError: if a pass is malformed, a slot has two, or the states do not fit the passes.
        """
        self.check(passes)
        places = self._append(self._with_states(passes, states))
        (answer,) = self._answers.values()
        if all(place.stop == after.start for place, after in pairwise(places)):
            return answer[places[0].start : places[-1].stop] if places else answer[:0]
        return np.concatenate([answer[place] for place in places])

    def _with_states(self, passes: Sequence[Pass], states: States | None) -> list[Pass]:
        """Return passes with their states, and with the number of rows that this stage returns."""
        total = sum(len(item.tokens) for item in passes)
        wanted = None if self.first else (total, self.width)
        if wanted != (None if states is None else states.shape):
            raise ValueError(f"{self.cut} needs states of shape {wanted} for {total} tokens")
        # A NaN state is refused, too: it makes the maximum NaN and the comparison false.
        if states is not None and not np.abs(states).max(initial=0.0) <= self._largest:
            raise ValueError(f"states must be finite and within ±{self._largest:g}")
        fed, end = [], 0
        for item in passes:
            start, end = end, end + len(item.tokens)
            part = None if states is None else states[start:end]
            rows = item.rows if self.last else None
            fed.append(Pass(item.slot, item.tokens, rows, item.parents, part))
        return fed

    def _fill_inputs(self, binding: Binding, run: Run) -> int:
        fill_positions(binding, run, self._cache.lengths)
        if self.first:
            fill_tokens(binding, run)
        else:
            array = binding.input("states", (run.total, self.width), np.float32)
            # `_with_states` has given each pass its states
            states = [item.states for item in run.passes if item.states is not None]
            np.concatenate(states, out=array)
        return fill_rows(binding, run) if self.last else run.total

    def _example_pass(self) -> Pass:
        tokens = np.array([0, min(1, self.artifact.manifest.vocab_size - 1)])
        rows = 1 if self.last else None
        if self.first:
            return Pass(0, tokens, rows)
        states = np.random.default_rng(0).standard_normal((len(tokens), self.width), np.float32)
        return Pass(0, tokens, rows, None, states)


class HeadGraph(Protocol):
    """A head's graph, loaded by a runtime.

    Attributes:
        width: width of a row of hidden states.
    """

    width: int

    def logits(self, hidden: States) -> States:
        """Compute logits, f32 [n, columns of the graph], from hidden states, f32 [n, width]."""
        ...


class SessionHead:
    """A head's graph in a session of ONNX Runtime."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.width = int(session.get_inputs()[0].shape[1])

    def logits(self, hidden: States) -> States:
        """Compute logits, f32 [n, columns of the graph], from hidden states, f32 [n, width]."""
        logits: States
        (logits,) = self._session.run(["logits"], {"hidden_states": hidden})
        return logits


class Head:
    """The head, which computes logits from hidden states; its graph is in the first stage's folder.

    Args:
        artifact: the first stage or its folder.
        threads: threads per run; None = the cores that this process may use.
        provider: a name of PROVIDERS, or "auto".

    Raises:
        ArtifactError: if the directory is not the first stage of a model.
        ProviderError: if no inference runtime can run it.
    """

    def __init__(
        self,
        artifact: Artifact | str | Path,
        *,
        threads: int | None = None,
        provider: str = "auto",
    ) -> None:
        opened, cut = _open_stage(artifact)
        if not cut.first:
            raise ArtifactError(f"{opened.path} is {cut}: the head is in the folder of stage 1")
        _check_provider(provider)
        self.vocab_size = opened.manifest.vocab_size
        self._graph, self.provider, self.idle_gpu = self._load(opened, threads, provider)
        self.width = self._graph.width

    def logits(self, hidden: States) -> NDArray[np.float32]:
        """Compute logits, f32 [n, vocab_size], from hidden states, f32 [n, width]."""
        if len(hidden) == 0:
            return np.empty((0, self.vocab_size), np.float32)
        return self._graph.logits(hidden)[:, : self.vocab_size]

    def _load(
        self, artifact: Artifact, threads: int | None, provider: str
    ) -> tuple[HeadGraph, str, IdleGpu | None]:
        """Open the head on the first provider that runs it.

        Returns the head, the provider's name, and the GPU that the head leaves idle.
        """
        reasons = []
        wanted = tuple(PROVIDERS) if provider == "auto" else (provider,)
        for name in wanted:
            try:
                graph = _open_head(artifact, threads, name, build=provider != "auto")
                graph.logits(np.zeros((1, graph.width), np.float32))
            except Exception as error:  # runtimes raise many error classes
                reasons.append(f"{name}: {str(error).strip() or type(error).__name__}")
                log.info("provider %s cannot run the head: %s", name, reasons[-1])
                continue
            auto = (provider, name) == ("auto", "cpu")
            return graph, name, find_idle_gpu(reasons) if auto else None
        raise no_provider_error(artifact, artifact.head_path, wanted, reasons)


def _open_head(artifact: Artifact, threads: int | None, provider: str, *, build: bool) -> HeadGraph:
    runtime = PROVIDERS[provider]
    if isinstance(runtime, str):
        return SessionHead(open_session(artifact.head_path, threads, runtime))
    from pilotfish.engines.tensorrt.head import TensorRTHead

    return TensorRTHead(artifact, runtime, build=build)


def _open_stage(artifact: Artifact | str | Path) -> tuple[Artifact, StageRange]:
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact, stage=True)
    if opened.manifest.stage is None:
        raise ArtifactError(
            f"{opened.path} is a whole model, not a stage: cut the model with `pilotfish "
            "export split`"
        )
    return opened, opened.manifest.stage


def _check_provider(name: str) -> None:
    if name not in {"auto", *PROVIDERS}:
        known = ", ".join(PROVIDERS)
        raise ProviderError(f"stages of a model do not run on {name!r}: choose auto, {known}")
