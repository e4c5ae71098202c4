"""What to expect of a model on a board: memory, and a bound of the speed by the memory's bandwidth.

A token that is generated reads all weights of a pass and the keys and values so far, at best once.
So bandwidth / bytes read is a bound: no drafter or target of this size generates more tokens/s, one
at a time. What it really reaches is lower, and not known before it runs. A verified window reads
the weights once for several tokens, so the bound is one of passes, not of committed tokens.
"""

from __future__ import annotations

from msgspec import Struct

from pilotfish.boards.board import GIB, Board
from pilotfish.boards.shape import ModelShape, shape_of
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.manifest import Manifest

UNKNOWN = "unknown"
# Memory of a process besides weights, keys and values, by plain name. On CPUs it was measured with
# SmolLM2-135M (x86-64, 2026-11-28): a device in four forms took 115 to 216 MiB, an edge in fp32
# 270 MiB with one session, and 310 MiB by default. On GPUs nothing was measured on a board.
RUNTIME_BYTES = {"cpu": 200 << 20}
# What should stay free for a runtime of unknown size. This is a choice: a context is shortened for
# it, and a model that leaves less gets a warning.
UNKNOWN_RUNTIME_BYTES = GIB
Model = Artifact | Manifest | ModelShape


class Expectation(Struct, frozen=True, kw_only=True):
    """What a model takes of a board; None: unknown.

    Attributes:
        weights_bytes: the weights.
        kv_bytes: keys and values of all slots at the full context.
        runtime_bytes: the runtime without a model.
        board_bytes: the memory that the board has for programs.
        tokens_per_s_bound: upper bound of passes per second in the fastest power mode, with half a
            context of keys and values.
        slower_bound: the same in the other power modes, if their memory is slower.
        context: positions per slot.
        slots: sequences at a time.
        estimated: whether the weights' size is an estimate, made before the export.
        whole_memory: whether `board_bytes` is all memory, as the system's part of it is unknown.
    """

    weights_bytes: int | None
    kv_bytes: int
    runtime_bytes: int | None
    board_bytes: int | None
    tokens_per_s_bound: float | None
    slower_bound: float | None = None
    context: int
    slots: int
    estimated: bool = False
    whole_memory: bool = False

    @property
    def known_bytes(self) -> int:
        """The memory that is known to be needed: a lower bound."""
        return (self.weights_bytes or 0) + self.kv_bytes + (self.runtime_bytes or 0)

    @property
    def reserve_bytes(self) -> int:
        """What should stay free: for a runtime of unknown size."""
        return UNKNOWN_RUNTIME_BYTES if self.runtime_bytes is None else 0

    @property
    def fits(self) -> bool | None:
        """Whether what is known fits into the board's memory; None: unknown."""
        if self.board_bytes is None or self.weights_bytes is None:
            return None
        return self.known_bytes <= self.board_bytes

    def lines(self) -> list[str]:
        """Describe the memory and the speed, a line each."""
        slots = f", {self.slots} slots" if self.slots > 1 else ""
        about = "about " if self.estimated else ""
        memory = (
            f"memory: weights {about}{size(self.weights_bytes)}, keys and values "
            f"{size(self.kv_bytes)} (context {self.context}{slots}), runtime "
            f"{size(self.runtime_bytes)}; "
        )
        if self.board_bytes is None:
            memory += f"how much programs have there is {UNKNOWN}"
        else:
            most = "at most " if self.whole_memory else ""
            memory += f"programs have {most}{size(self.board_bytes)} there"
        if self.tokens_per_s_bound is None:
            missing = "weights'" if self.weights_bytes is None else "memory's"
            figure = "size" if self.weights_bytes is None else "bandwidth"
            speed = f"speed: {UNKNOWN}, since the {missing} {figure} is {UNKNOWN}"
        else:
            slower = (
                f" ({self.slower_bound:.0f} in the slower power modes)" if self.slower_bound else ""
            )
            speed = (
                f"speed: at most {self.tokens_per_s_bound:.0f} tokens/s{slower} with "
                f"{self.context // 2} tokens in the context, by the memory's bandwidth; not "
                "measured"
            )
        return [memory, speed]


def expect(
    board: Board, model: Model, *, context: int | None = None, slots: int = 1
) -> Expectation:
    """Return what a model takes of a board.

    Args:
        model: an artifact, a manifest (then the weights are unknown), or a shape.
        context: positions per slot; None = the model's.
        slots: sequences at a time.
    """
    shape = model if isinstance(model, ModelShape) else shape_of(model)
    positions = min(context or shape.context, shape.longest or shape.context)
    kv_bytes = shape.kv_bytes(positions, slots)
    # TensorRT may not write a buffer that it reads by ScatterND: docs/engines.md
    apart = board.gpu and shape.dialect == "opset17"
    read = None
    if shape.read_bytes is not None:
        read = shape.read_bytes + shape.kv_bytes(positions // 2, 1)
    return Expectation(
        weights_bytes=shape.weights_bytes,
        kv_bytes=2 * kv_bytes if apart else kv_bytes,
        runtime_bytes=RUNTIME_BYTES.get(board.family),
        board_bytes=board.program_bytes,
        tokens_per_s_bound=_bound(board.bandwidth_bytes_per_s, read),
        slower_bound=_bound(board.slower_bytes_per_s, read),
        context=positions,
        slots=slots,
        estimated=shape.parameters is not None,
        whole_memory=board.memory_bytes is not None and board.usable_bytes is None,
    )


def _bound(bandwidth: float | None, read: int | None) -> float | None:
    return bandwidth / read if bandwidth and read else None


def size(count: int | None) -> str:
    """Return a size in words: "2.1 GiB", "141 MiB", "unknown"."""
    if count is None:
        return UNKNOWN
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"
