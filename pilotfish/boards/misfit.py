"""What speaks against a model on a board: too large, or a GPU that would idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from pilotfish.base.errors import PilotfishError
from pilotfish.boards.board import Board, siblings
from pilotfish.boards.expectation import Expectation, Model, expect, size
from pilotfish.boards.gpu_forms import idle_reasons
from pilotfish.boards.shape import ModelShape, shape_of

Kind = Literal["too-large", "idle-gpu", "some-jetpacks", "tight", "smaller-board"]
LEAST_CONTEXT = 512  # a shorter context holds no conversation
ALIGNMENT = 64


class MisfitError(PilotfishError):
    """A model that a board cannot run, or that would leave its GPU idle."""

    code = "misfit"
    exit_code = 65


class Misfit(Struct, frozen=True, kw_only=True):
    """One thing that speaks against a model on a board.

    Attributes:
        kind: "too-large": its memory does not suffice. "idle-gpu": its GPU would idle.
            "some-jetpacks": the GPU would idle on some of its JetPacks. "tight": little memory is
            left. "smaller-board": the model does not fit into the same board with less memory.
        message: one sentence that says what to do.
        refuses: whether to stop, unless the user consents.
    """

    kind: Kind
    message: str
    refuses: bool


def misfits(
    board: Board,
    model: Model,
    *,
    context: int | None = None,
    slots: int = 1,
    jetpack: str | None = None,
    further: Sequence[str] = (),
) -> list[Misfit]:
    """Return everything that speaks against a model on a board, refusals first.

    Args:
        model: an artifact, a manifest (whose weights' size is unknown), or a shape with a dialect
            and a precision.
        context: positions per slot; None = the model's.
        slots: sequences at a time.
        jetpack: the board's JetPack; None: any that it can have.
        further: providers that the board has besides those that it is delivered with, such as
            "cuda" by a vendor's build of ONNX Runtime.
    """
    shape = model if isinstance(model, ModelShape) else shape_of(model)
    listed = _idle_misfits(board, shape, jetpack, further)
    listed += _memory_misfits(board, shape, context, slots)
    return sorted(listed, key=lambda each: not each.refuses)


def longest_context(expected: Expectation) -> int:
    """Return the context with which the model would fit; 0 if none of LEAST_CONTEXT or more."""
    per_token = expected.kv_bytes // expected.context
    others = expected.known_bytes - expected.kv_bytes + expected.reserve_bytes
    left = (expected.board_bytes or 0) - others
    positions = max(left, 0) // per_token // ALIGNMENT * ALIGNMENT if per_token else 0
    return positions if positions >= LEAST_CONTEXT else 0


def _memory_misfits(
    board: Board, shape: ModelShape, context: int | None, slots: int
) -> list[Misfit]:
    expected = expect(board, shape, context=context, slots=slots)
    if expected.fits is False:
        message = _too_large(board, shape, expected)
        return [Misfit(kind="too-large", message=message, refuses=True)]
    listed = []
    left = (expected.board_bytes or 0) - expected.known_bytes
    if expected.fits and left < expected.reserve_bytes:
        message = (
            f"{shape.name} leaves {size(left)} of {board.title}'s memory to CUDA, TensorRT and all "
            "other programs, whose need is unknown: choose a shorter --context if it does not start"
        )
        listed = [Misfit(kind="tight", message=message, refuses=False)]
    return listed + [
        Misfit(
            kind="smaller-board",
            message=f"{shape.name} would not fit into {each.title}: if that is yours, name it with "
            f"--board {each.name}",
            refuses=False,
        )
        for each in siblings(board)
        if expect(each, shape, context=context, slots=slots).fits is False
    ]


def _too_large(board: Board, shape: ModelShape, expected: Expectation) -> str:
    """Say what is too large, by how much, and what to choose instead."""
    weights, memory = expected.weights_bytes or 0, expected.board_bytes or 0
    parts = f"weights of {size(weights)} in {shape.precision}"
    if expected.kv_bytes:
        parts += f" and keys and values of {size(expected.kv_bytes)} for {expected.context} tokens"
        parts += f" in each of {expected.slots} slots" if expected.slots > 1 else ""
    if positions := longest_context(expected):
        advice = f"choose --context {positions} or less"
        advice += ", or fewer slots" if expected.slots > 1 else ""
    else:
        advice = "choose a smaller model, or a board with more memory"
    return (
        f"{shape.name} does not fit into {board.title}: it needs {parts}, "
        f"{size(expected.known_bytes - memory)} more than the {size(memory)} there: {advice}"
    )


def _idle_misfits(
    board: Board, shape: ModelShape, jetpack: str | None, further: Sequence[str]
) -> list[Misfit]:
    if not board.gpu or shape.dialect is None or shape.precision is None:
        return []
    form = f"{shape.dialect} in {shape.precision}"
    idle = idle_reasons(
        board,
        shape.dialect,
        shape.precision,
        states=shape.states,
        jetpack=jetpack,
        further=further,
    )
    if not idle:
        return []
    versions = (jetpack,) if jetpack is not None else board.jetpacks or ("",)
    every = len(idle) == len(versions)
    version, why = next(iter(idle.items()))
    where, flags = "", f"--board {board.name}"
    if version and (jetpack is not None or not every):
        where, flags = f" with JetPack {version}", f"{flags} --jetpack {version}"
    better = f"export it with {flags}, without --dialect and --precision"
    if shape.states:
        better = "choose another model"
    message = (
        f"{shape.name} ({form}) would leave the GPU of {board.title}{where} idle, because {why}: "
        f"{better}, or accept the CPU with --cpu"
    )
    return [Misfit(kind="idle-gpu" if every else "some-jetpacks", message=message, refuses=every)]
