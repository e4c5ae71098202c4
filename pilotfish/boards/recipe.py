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

from pilotfish.base.errors import PilotfishError, UnsupportedError
from pilotfish.boards.board import JETPACKS, Board
from pilotfish.boards.gpu_forms import CPU, gpu_providers, idle_reasons, why_not
from pilotfish.boards.shape import ModelShape

Role = Literal["device", "edge"]


class MisfitError(PilotfishError):
    """A model that a board cannot run, or that would leave its GPU idle."""

    code = "misfit"
    exit_code = 65


class Wishes(Struct, frozen=True, kw_only=True):
    """What a caller states itself; None: the board decides.

    cpu: whether the model may run on the CPU although the board has a GPU.
    """

    dialect: str | None = None
    precision: str | None = None
    context: int | None = None
    cpu: bool = False


NO_WISHES = Wishes()


class Recipe(Struct, frozen=True, kw_only=True):
    """How to export a model for a board.

    Attributes:
        context: positions; None = the model's.
        providers: the providers that run it, best first.
        reasons: why, a sentence each.
    """

    dialect: str
    precision: str
    context: int | None
    providers: tuple[str, ...]
    reasons: tuple[str, ...]


def recipe(
    board: Board,
    *,
    jetpack: str | None = None,
    role: Role = "device",
    model: ModelShape | None = None,
    wishes: Wishes = NO_WISHES,
) -> Recipe:
    """Return the recipe for a board.

    Args:
        jetpack: the board's JetPack; None: any that the board can have.
        role: a device runs a drafter, an edge a target.
        model: sizes of the model; None: a model of floats without recurrent states.

    Raises:
        MisfitError: if the board's GPU cannot run what the caller states.
        UnsupportedError: if the board does not run this JetPack.
    """
    check_jetpack(board, jetpack)
    states = model is not None and model.states
    blocks = model.blocks if model is not None else ()
    if not board.gpu or wishes.cpu or states:
        dialect, precision, reasons = _for_cpu(role, blocks)
        if board.gpu and states and not wishes.cpu:
            raise MisfitError(_states_sentence(board, model))
    else:
        dialect, precision, reasons = _for_gpu(board, jetpack, role, blocks)
    if wishes.dialect is not None or wishes.precision is not None:
        dialect, precision = _wished(wishes, dialect, precision)
        reasons = (f"{dialect} in {precision}, as you stated.",)
    if board.gpu and not wishes.cpu:
        idle = idle_reasons(board, dialect, precision, states=states, jetpack=jetpack)
        versions = (jetpack,) if jetpack is not None else board.jetpacks or ("",)
        if len(idle) == len(versions):
            raise MisfitError(
                _idle_sentence(board, dialect, precision, idle, jetpack, role, blocks)
            )
    return Recipe(
        dialect=dialect,
        precision=precision,
        context=wishes.context,
        providers=_providers(board, dialect, precision, states, jetpack, wishes),
        reasons=tuple(reasons),
    )


def check_jetpack(board: Board, jetpack: str | None) -> None:
    """Raise `UnsupportedError` if the board does not run this JetPack."""
    if jetpack is None or jetpack in board.jetpacks:
        return
    if not board.jetpacks:
        raise UnsupportedError(f"{board.title} has no JetPack: leave out --jetpack")
    raise UnsupportedError(
        f"{board.title} does not run JetPack {jetpack}: choose {' or '.join(board.jetpacks)}"
    )


def _for_gpu(
    board: Board, jetpack: str | None, role: Role, blocks: tuple[str, ...]
) -> tuple[str, str, tuple[str, ...]]:
    """Return dialect, precision and reasons for the board's GPU."""
    if not board.jetpacks:
        return (
            "opset24",
            "fp16",
            ("opset24 in fp16: TensorRT for RTX and ONNX Runtime's CUDA provider both run it.",),
        )
    oldest = min(
        (jetpack,) if jetpack else board.jetpacks, key=lambda v: tuple(map(int, v.split(".")))
    )
    tensorrt = JETPACKS[oldest].tensorrt
    if why_not("tensorrt", "opset24", "fp16", states=False, tensorrt=tensorrt):
        reason = (
            f"opset17 in fp16: TensorRT {tensorrt} of JetPack {oldest} knows no operator of opset "
            "24, and takes quantised weights in no dialect of ours."
        )
        reasons = [reason]
        if jetpack is None and len(board.jetpacks) > 1:
            others = " and ".join(each for each in board.jetpacks if each != oldest)
            reasons.append(
                f"It runs on JetPack {others}, too; with --jetpack {board.jetpacks[-1]} the "
                "weights can be quantised."
            )
        return "opset17", "fp16", tuple(reasons)
    if role == "edge":
        return (
            "opset24",
            "fp16",
            (
                f"opset24 in fp16: TensorRT {tensorrt} writes its keys and values in place, and a "
                "target is not quantised.",
            ),
        )
    precision = "stored" if blocks else "int4"
    ending = f", and keeps the source's blocks ({', '.join(blocks)})" if blocks else ""
    return (
        "tensorrt",
        precision,
        (
            f"tensorrt in {precision}: TensorRT {tensorrt} of JetPack {oldest} takes quantised "
            f"weights in this dialect{ending}.",
        ),
    )


def _for_cpu(role: Role, blocks: tuple[str, ...]) -> tuple[str, str, tuple[str, ...]]:
    """Return dialect, precision and reasons for a CPU."""
    if role == "edge":
        return (
            "opset24",
            "fp32",
            ("opset24 in fp32: a target is not quantised, and fp16 saves a CPU no time.",),
        )
    if blocks:
        return (
            "contrib",
            "stored",
            (
                f"contrib in stored: the source's blocks ({', '.join(blocks)}) stay as they are, "
                "in the fastest operators for a CPU.",
            ),
        )
    return (
        "contrib",
        "int8",
        ("contrib in int8: the source has floats; 8 bits lose hardly any acceptance.",),
    )


def _wished(wishes: Wishes, dialect: str, precision: str) -> tuple[str, str]:
    """Return what the caller states, and for the rest the board's choice where the two agree."""
    if wishes.precision is None:
        return str(wishes.dialect), "fp16" if wishes.dialect == "opset17" else precision
    if wishes.dialect is None:
        quantised = wishes.precision not in {"fp32", "fp16"}
        if quantised and dialect in {"opset17", "opset24"}:
            dialect = "tensorrt"
        return dialect, wishes.precision
    return wishes.dialect, wishes.precision


def _providers(
    board: Board,
    dialect: str,
    precision: str,
    states: bool,
    jetpack: str | None,
    wishes: Wishes,
) -> tuple[str, ...]:
    """Return the providers that run the artifact."""
    if not board.gpu or wishes.cpu:
        return (CPU,)
    version = jetpack or (board.jetpacks[-1] if board.jetpacks else None)
    tensorrt = JETPACKS[version].tensorrt if version is not None else None
    return tuple(
        provider
        for provider in gpu_providers(board)
        if why_not(provider, dialect, precision, states=states, tensorrt=tensorrt) is None
    )


def _states_sentence(board: Board, model: ModelShape | None) -> str:
    name = model.name if model is not None else "the model"
    return (
        f"{name} has recurrent states, which run only on the CPU so far, so the GPU of "
        f"{board.title} would idle: choose a model without them, or accept the CPU with --cpu"
    )


def _idle_sentence(
    board: Board,
    dialect: str,
    precision: str,
    idle: dict[str, str],
    jetpack: str | None,
    role: Role,
    blocks: tuple[str, ...],
) -> str:
    version, why = next(iter(idle.items()))
    where = f" with JetPack {version}" if version else ""
    good_dialect, good_precision, _ = _for_gpu(board, jetpack, role, blocks)
    return (
        f"The GPU of {board.title}{where} would idle with {dialect} in {precision}, because {why}: "
        f"leave out --dialect and --precision (then {good_dialect} in {good_precision}), or accept "
        "the CPU with --cpu"
    )
