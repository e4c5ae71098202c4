"""What speaks against a model on a board: too large, or a GPU that would idle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from pilotfish.boards.board import Board, siblings
from pilotfish.boards.expectation import Expectation, Model, expect, size
from pilotfish.boards.gpu_forms import idle_reasons
from pilotfish.boards.shape import ModelShape, shape_of

Kind = Literal["too-large", "idle-gpu", "some-jetpacks", "smaller-board"]


class Misfit(Struct, frozen=True, kw_only=True):
    """One thing that speaks against a model on a board.

    Attributes:
        kind: "too-large": its memory does not suffice. "idle-gpu": its GPU would idle.
            "some-jetpacks": the GPU would idle on some of its JetPacks. "smaller-board": the model
            does not fit into the same board with less memory.
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
    """Return everything that speaks against a model on a board, the worst first.

    Args:
        model: an artifact, a manifest (whose weights' size is unknown), or a shape with a dialect
            and a precision.
        context: positions per slot; None = the model's.
        jetpack: the board's JetPack; None: any that it can have.
        further: providers that the board has besides those that it is delivered with, such as
            "cuda" by a vendor's build of ONNX Runtime.
    """
    shape = model if isinstance(model, ModelShape) else shape_of(model)
    listed = _memory_misfits(board, shape, context, slots)
    if board.gpu and shape.dialect is not None and shape.precision is not None:
        listed += _idle_misfits(board, shape, jetpack, further)
    return sorted(listed, key=lambda each: not each.refuses)


def too_large_sentence(board: Board, shape: ModelShape, expected: Expectation) -> str:
    """Say what is too large, by how much, and what to choose instead."""
    memory = expected.board_bytes or 0
    over = expected.known_bytes - memory
    largest = (
        f"its weights take {size(expected.weights_bytes)}"
        if (expected.weights_bytes or 0) >= expected.kv_bytes
        else f"keys and values for {expected.context} positions take {size(expected.kv_bytes)}"
    )
    left = memory - (expected.weights_bytes or 0) - (expected.runtime_bytes or 0)
    per_token = expected.kv_bytes // max(expected.context, 1)
    positions = left // per_token // 64 * 64 if per_token and left > 0 else 0
    advice = (
        f"choose --context {positions} or less"
        if positions >= LEAST_CONTEXT
        else "choose a smaller model, or fewer bits for its weights where the board takes them"
    )
    return (
        f"{shape.name} does not fit into {board.title}: {largest}, and together with the rest that "
        f"is {size(over)} more than the {size(memory)} that programs have there: {advice}"
    )


LEAST_CONTEXT = 512  # a shorter context serves no chat


def _memory_misfits(
    board: Board, shape: ModelShape, context: int | None, slots: int
) -> list[Misfit]:
    expected = expect(board, shape, context=context, slots=slots)
    if expected.fits is False:
        message = too_large_sentence(board, shape, expected)
        return [Misfit(kind="too-large", message=message, refuses=True)]
    small = [
        each
        for each in siblings(board)
        if expect(each, shape, context=context, slots=slots).fits is False
    ]
    return [
        Misfit(
            kind="smaller-board",
            message=f"{shape.name} does not fit into {each.title}: name it with --board "
            f"{each.name} if it is yours",
            refuses=False,
        )
        for each in small
    ]


def _idle_misfits(
    board: Board, shape: ModelShape, jetpack: str | None, further: Sequence[str]
) -> list[Misfit]:
    dialect, precision = str(shape.dialect), str(shape.precision)
    idle = idle_reasons(
        board, dialect, precision, states=shape.states, jetpack=jetpack, further=further
    )
    if not idle:
        return []
    versions = (jetpack,) if jetpack is not None else board.jetpacks or ("",)
    version, why = next(iter(idle.items()))
    where = f" with JetPack {version}" if version else ""
    message = (
        f"The GPU of {board.title}{where} would idle, because {why}: "
        + (
            "choose another model"
            if shape.states
            else "export the model with --board "
            f"{board.name}" + (f" --jetpack {version}" if version else "")
        )
        + ", or accept the CPU with --cpu"
    )
    every = len(idle) == len(versions)
    return [Misfit(kind="idle-gpu" if every else "some-jetpacks", message=message, refuses=every)]
