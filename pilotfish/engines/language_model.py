"""The interface of the engines that run whole models, and the choice of an engine.

In: an artifact. Out: a `LanguageModel`, which holds one sequence per slot. Passes append tokens to
any number of slots, as chains or as trees; a tree may grow over several passes
(`engines.passes.Pass`). The artifact's dialect selects the engine. To add an engine, add a line to
ENGINES.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.engines.artifact import Artifact, check_head, check_whole
from pilotfish.engines.gpus import IdleGpu
from pilotfish.engines.passes import Pass

if TYPE_CHECKING:
    from collections.abc import Callable

# runs every dialect that ENGINES does not list
_GRAPH_ENGINE = "pilotfish.engines.onnx_decoder:Decoder"
ENGINES = {
    "llamacpp": "pilotfish.engines.llamacpp.llama_decoder:LlamaDecoder",
    "genai": "pilotfish.engines.genai.genai_decoder:GenaiDecoder",
}


@dataclass(frozen=True, eq=False)
class Output:
    """The results of one pass: views into buffers that the next `forward` overwrites.

    Attributes:
        logits: f32 [rows, vocab_size], without padding; [rows, N] for a head cut to N tokens
        (`Artifact.head_tokens`).
        hidden: f32 [rows, hidden_size], output of the final norm; hidden_size is 0 if the graph
        returns no hidden states.
        omitted: f64 [rows], the probability that an ensemble left out of each row, averaged over
        its models by weight; None for the logits of one model, which leave out nothing.
    """

    logits: NDArray[np.float32]
    hidden: NDArray[np.float32]
    omitted: NDArray[np.float64] | None = None


class Execution(NamedTuple):
    """The way in which a model runs: provider, precision of weights, threads.

    idle_gpu: the GPU that the model leaves idle; None if there is none, or the CPU was chosen.
    """

    provider: str
    precision: str
    threads: int
    idle_gpu: IdleGpu | None = None

    def __str__(self) -> str:
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return f"provider {self.provider}, precision {self.precision}, {threads}"


class LanguageModel(ABC):
    """A model with `slots` sequences. Not thread-safe: only one thread may use it.

    Attributes:
        artifact: artifact of the model.
        slots: number of sequences.
        context: number of positions per slot.
        vocab_size: number of valid input tokens, and width of the logits unless the head is cut.
        provider: name of hardware and runtime, for people.
        threads: CPU threads per pass.
        idle_gpu: the GPU that the model leaves idle; None if there is none, or the CPU was chosen.
    """

    artifact: Artifact
    slots: int
    context: int
    vocab_size: int
    provider: str
    threads: int
    idle_gpu: IdleGpu | None

    @property
    def execution(self) -> Execution:
        """How the model runs, for people."""
        precision = self.artifact.manifest.precision
        return Execution(self.provider, precision, self.threads, self.idle_gpu)

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Width of the hidden states; 0 if the model returns none."""

    @abstractmethod
    def length(self, slot: int) -> int:
        """Return the number of tokens in the slot."""

    @abstractmethod
    def rollback(self, slot: int, length: int) -> None:
        """Drop all but the first `length` tokens of a slot."""

    @abstractmethod
    def keep_path(self, slot: int, path: Sequence[int]) -> None:
        """Keep the nodes at `path` of the last tree (or chain), and drop its other nodes.

        Nodes are numbered from the tree's beginning, over all passes that appended to it. A path
        leads from a root downwards, so its numbers ascend. The remaining nodes form a chain after
        the trunk.

        Raises:
            ValueError: if `path` is not in the tree; then nothing changes.
        """

    @abstractmethod
    def check(self, passes: Sequence[Pass]) -> None:
        """Raise the error that `forward` would raise for these passes; run nothing."""

    @abstractmethod
    def forward(self, passes: Sequence[Pass]) -> list[Output]:
        """Append each pass to its slot and compute its output; at most one pass per slot.

        If this raises, nothing is appended.

        Raises:
            CapacityError: if a slot would exceed its context.
            ValueError: if a pass is malformed, or a slot has two.
        """


def open_model(
    artifact: Artifact | str | Path,
    *,
    slots: int = 1,
    context: int | None = None,
    threads: int | None = None,
    provider: str = "auto",
    drafts: bool = False,
) -> LanguageModel:
    """Open an artifact with the engine for its dialect.

    Args:
        context: positions per slot; None = the model's, or the number that a TensorRT engine was
        built for.
        threads: CPU threads per run; None = one per core that this process may use.
        provider: a name of `engines.backends.PROVIDERS`, or "auto": the best provider that works
        without building an engine first (see docs/engines.md).
        drafts: also accept a model with a cut head. The logits of such a model suit only drafts,
            and the caller must map them to the whole vocabulary.

    Raises:
        ArtifactError: if the directory is not an artifact, is a stage of a model, or has a cut head
            while `drafts` is false.
        ProviderError: if no inference runtime can run the model.
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    check_whole(opened.path, opened.manifest)
    if not drafts:
        check_head(opened)
    module, _, name = ENGINES.get(opened.manifest.dialect, _GRAPH_ENGINE).partition(":")
    kind: Callable[..., LanguageModel] = getattr(import_module(module), name)
    return kind(opened, slots=slots, context=context, threads=threads, provider=provider)
