"""The recipe of a board: the dialect, precision, context and providers that its GPU can run.

    board                    drafter (role device)             target (role edge)
    Jetson, any JetPack      what every JetPack of it takes    the same
    JetPack 6.2              opset17 fp16                      opset17 fp16
    JetPack 7.2              tensorrt stored, or int4          opset24 fp16
    RTX card                 opset24 fp16                      opset24 fp16
    CPU                      contrib stored, or int8           opset24 fp32

`stored` is chosen if the source has quantised blocks to keep. What the caller states wins, if the
board's GPU can run it or the caller consents to the CPU.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from pilotfish.base.errors import UnsupportedError
from pilotfish.boards.board import JETPACKS, Board
from pilotfish.boards.expectation import expect
from pilotfish.boards.gpu_forms import CPU, gpu_providers, knows_opset24, why_not
from pilotfish.boards.misfit import Misfit, MisfitError, longest_context, misfits
from pilotfish.boards.shape import ModelShape
from pilotfish.engines.manifest import Dialect, Precision
from pilotfish.engines.tensorrt.gates import FLOATS

Role = Literal["device", "edge"]
_Form = tuple[Dialect, Precision, list[str]]  # with reasons


class Wishes(Struct, frozen=True, kw_only=True):
    """What a caller states itself; None: the board decides.

    cpu: whether the model may run on the CPU although the board has a GPU.
    """

    dialect: Dialect | None = None
    precision: Precision | None = None
    context: int | None = None
    cpu: bool = False


NO_WISHES = Wishes()


class Recipe(Struct, frozen=True, kw_only=True):
    """How to export a model for a board.

    Attributes:
        context: positions; None = the model's.
        providers: the providers that run it, best first.
        reasons: why, a sentence each.
        warnings: what speaks against it without refusing it, a sentence each.
    """

    dialect: Dialect
    precision: Precision
    context: int | None
    providers: tuple[str, ...]
    reasons: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def recipe(
    board: Board,
    *,
    jetpack: str | None = None,
    role: Role = "device",
    model: ModelShape | None = None,
    slots: int = 1,
    wishes: Wishes = NO_WISHES,
) -> Recipe:
    """Return the recipe for a board.

    Args:
        jetpack: the board's JetPack; None: any that the board can have.
        role: a device runs a drafter, an edge a target.
        model: sizes of the model; None: a model of floats, of no particular size.
        slots: sequences at a time.

    Raises:
        MisfitError: if the model does not fit, or if the board's GPU cannot run it in the form that
            the caller states, and the caller does not accept the CPU.
        UnsupportedError: if the board does not run this JetPack.
    """
    check_jetpack(board, jetpack)
    shape = model if model is not None else ModelShape(name="the model", context=1)
    on_gpu = board.gpu and not wishes.cpu
    choose = _for_gpu if on_gpu else _for_cpu
    dialect, precision, reasons = choose(board, jetpack, role, shape)
    if wishes.dialect is not None or wishes.precision is not None:
        dialect, precision = _combine(wishes, dialect, precision)
        reasons = [f"{dialect} in {precision}, as stated."]
    form = shape.in_form(dialect, precision)
    context = wishes.context
    listed = _misfits(board, form, context, slots, jetpack, on_gpu)
    if context is None and [each.kind for each in listed if each.refuses] == ["too-large"]:
        context = longest_context(expect(board, form, slots=slots)) or None
        if context is not None:
            reasons.append(f"context {context}: a longer one does not fit into the memory.")
            listed = _misfits(board, form, context, slots, jetpack, on_gpu)
    for each in listed:
        if each.refuses:
            other = _other_jetpack(board, role, shape, slots, wishes) if on_gpu else ""
            raise MisfitError(each.message + other * (each.kind == "too-large"))
    return Recipe(
        dialect=dialect,
        precision=precision,
        context=context,
        providers=_providers(board, form, jetpack) if on_gpu else (CPU,),
        reasons=tuple(reasons),
        warnings=tuple(each.message for each in listed),
    )


def _misfits(
    board: Board,
    form: ModelShape,
    context: int | None,
    slots: int,
    jetpack: str | None,
    on_gpu: bool,
) -> list[Misfit]:
    every = misfits(board, form, context=context, slots=slots, jetpack=jetpack)
    return [each for each in every if on_gpu or each.kind not in {"idle-gpu", "some-jetpacks"}]


def _other_jetpack(board: Board, role: Role, shape: ModelShape, slots: int, wishes: Wishes) -> str:
    """Return the end of a sentence that names a JetPack in whose form the model fits, if any."""
    if wishes.dialect is not None or wishes.precision is not None:
        return ""
    for version in reversed(board.jetpacks):
        dialect, precision, _ = _for_gpu(board, version, role, shape)
        form = shape.in_form(dialect, precision)
        expected = expect(board, form, context=wishes.context, slots=slots)
        if expected.fits or (wishes.context is None and longest_context(expected)):
            less = "" if expected.fits else " with a shorter context"
            return f", or JetPack {version} with --jetpack {version}: it fits in {precision}{less}"
    return ""


def check_jetpack(board: Board, jetpack: str | None) -> None:
    """Raise `UnsupportedError` if the board does not run this JetPack."""
    if jetpack is None or jetpack in board.jetpacks:
        return
    if not board.jetpacks:
        raise UnsupportedError(f"{board.title} has no JetPack: leave out --jetpack")
    raise UnsupportedError(
        f"{board.title} does not run JetPack {jetpack}: choose {' or '.join(board.jetpacks)}"
    )


def _for_gpu(board: Board, jetpack: str | None, role: Role, shape: ModelShape) -> _Form:
    """Return dialect, precision and reasons for the board's GPU."""
    if not board.jetpacks:
        reason = "TensorRT for RTX and ONNX Runtime's CUDA provider both run it."
        return "opset24", "fp16", [f"opset24 in fp16: {reason}"]
    oldest = jetpack or board.jetpacks[0]
    name = f"TensorRT {JETPACKS[oldest].tensorrt} of JetPack {oldest}"
    if not knows_opset24(JETPACKS[oldest].tensorrt):
        reasons = [
            f"opset17 in fp16: {name} knows no operator of opset 24, and takes quantised weights "
            "in no dialect of ours."
        ]
        if jetpack is None:
            newest = board.jetpacks[-1]
            gain = "quantised weights" if role == "device" else "half the keys and values (opset24)"
            reasons.append(
                f"It also runs on JetPack {newest}, where --jetpack {newest} would allow {gain}."
            )
        return "opset17", "fp16", reasons
    if role == "edge":
        reason = f"{name} writes its keys and values in place, and targets are not quantised."
        return "opset24", "fp16", [f"opset24 in fp16: {reason}"]
    reason = f"tensorrt is the dialect in which {name} takes quantised weights"
    if shape.blocks:
        return "tensorrt", "stored", [f"{reason}; {_blocks(shape)}."]
    return "tensorrt", "int4", [f"{reason}; int4 has the least to read per token."]


def _for_cpu(board: Board, jetpack: str | None, role: Role, shape: ModelShape) -> _Form:
    """Return dialect, precision and reasons for a CPU."""
    dialect: Dialect = "opset24"
    if role == "edge":
        if jetpack is not None and not knows_opset24(JETPACKS[jetpack].tensorrt):
            dialect = "opset17"  # its Python has no ONNX Runtime for opset 24
        return dialect, "fp32", [f"{dialect} in fp32: targets are not quantised."]
    reason = "contrib has the fastest operators for one sequence on a CPU"
    if shape.states:
        return "contrib", "int8", [f"{reason}; int8 loses hardly any acceptance."]
    if shape.blocks:
        return "contrib", "stored", [f"{reason}; {_blocks(shape)}."]
    return "contrib", "int8", [f"{reason}; int8 loses hardly any acceptance."]


def _blocks(shape: ModelShape) -> str:
    return f"stored keeps the source's blocks ({', '.join(shape.blocks)}) as they are"


def _combine(wishes: Wishes, dialect: Dialect, precision: Precision) -> tuple[Dialect, Precision]:
    """Return what the caller states, and the board's choice for what it leaves open."""
    if wishes.dialect is not None and wishes.precision is None:
        floats = wishes.dialect == "opset17" and precision not in FLOATS
        return wishes.dialect, "fp16" if floats else precision
    if wishes.dialect is None and wishes.precision is not None:
        quantised = wishes.precision not in FLOATS
        if quantised and dialect in {"opset17", "opset24"}:
            dialect = "tensorrt"
        elif not quantised and dialect == "contrib":
            dialect = "opset24"
        return dialect, wishes.precision
    return wishes.dialect or dialect, wishes.precision or precision


def _providers(board: Board, form: ModelShape, jetpack: str | None) -> tuple[str, ...]:
    """Return the providers of the board's GPU that run the artifact on each JetPack asked for."""
    versions = (jetpack,) if jetpack is not None else board.jetpacks or (None,)
    dialect, precision = str(form.dialect), str(form.precision)
    return tuple(
        provider
        for provider in gpu_providers(board)
        if any(
            why_not(
                provider,
                dialect,
                precision,
                states=form.states,
                tensorrt=None if version is None else JETPACKS[version].tensorrt,
            )
            is None
            for version in versions
        )
    )
