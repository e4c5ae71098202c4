"""Warn at the start of a program whose model does not suit this machine.

Before a model is loaded: its weights and one full context exceed the machine's memory. After it is
loaded: it runs on the CPU although there is a GPU, without `--provider cpu`. Each warning is a line
in the log; a service shows the same sentence in its status.
"""

from __future__ import annotations

import logging
from pathlib import Path

from msgspec.structs import replace

from pilotfish.base.memory import reported_bytes
from pilotfish.boards.board import BOARDS, Board
from pilotfish.boards.export_command import export_command
from pilotfish.boards.gpu_forms import CPU, TENSORRT_RTX, idle_reasons
from pilotfish.boards.misfit import Misfit, misfits
from pilotfish.boards.recognition import recognise
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.gpus import IdleGpu, gpu_nodes
from pilotfish.engines.manifest import LLAMACPP, Manifest

log = logging.getLogger("pilotfish.boards")

_ROOT = Path("/")


def warn_before_load(artifact: Artifact, context: int | None = None) -> tuple[Misfit, ...]:
    """Warn of a model that this machine's memory cannot hold; return the warnings.

    context: positions of a slot; None = the model's.
    """
    board = _this_board()
    if board is None:
        return ()
    every = misfits(board, artifact, context=context)
    return _warn([each for each in every if each.kind == "too-large"])


def warn_of_idle_gpu(artifact: Artifact, idle: IdleGpu | None) -> tuple[Misfit, ...]:
    """Warn of a GPU that the loaded model leaves idle; return the warnings."""
    if idle is None:
        return ()
    board = recognise(_ROOT)
    gpu_board = _gpu_board(idle, board)
    why, mending = _form_at_fault(artifact.manifest, board, gpu_board) or (
        "; ".join(_reasons(idle, gpu_board)),
        "`pilotfish doctor` says what this machine lacks",
    )
    message = (
        f"{artifact.manifest.model} runs on the CPU, although this machine has a GPU "
        f"({idle.node}): {why}. To use the GPU: {mending}; --provider cpu silences this warning"
    )
    return _warn([Misfit(kind="idle-gpu", message=message, refuses=False)])


def _gpu_board(idle: IdleGpu, board: Board | None) -> Board:
    """Return the machine's board, or if it is not known, one with a GPU of the same kind."""
    if board is not None and board.gpu:
        return board
    return BOARDS["orin-nano" if idle.of_jetson else "rtx"]


def _form_at_fault(
    manifest: Manifest, board: Board | None, gpu_board: Board
) -> tuple[str, str] | None:
    """Return why no GPU of this kind runs the artifact's form, and what mends it.

    None if one may run it: then this machine lacks something, or its TensorRT is too old.
    """
    forms = idle_reasons(
        gpu_board,
        manifest.dialect,
        manifest.precision,
        states=manifest.states is not None,
        jetpack=None,
    )
    # llama.cpp uses a GPU if it was built for one
    if manifest.dialect == LLAMACPP or len(forms) < len(gpu_board.jetpacks or ("",)):
        return None
    if manifest.states is not None:
        return next(iter(forms.values())), "choose a model without recurrent states"
    return next(iter(forms.values())), f"`{export_command(manifest, board)}`, and serve DIR"


def _reasons(idle: IdleGpu, board: Board) -> list[str]:
    """List the reasons of those providers that such a board can have."""
    is_jetson = bool(board.jetpacks)
    return [each for each in idle.reasons if not (is_jetson and each.startswith(TENSORRT_RTX))]


def _warn(warnings: list[Misfit]) -> tuple[Misfit, ...]:
    for misfit in warnings:
        log.warning("%s", misfit.message)
    return tuple(warnings)


def _this_board() -> Board | None:
    """Return this machine's board; None if nothing is known of the memory that models go to.

    Its memory is what the kernel reports, and what was published if that cannot be read. A card's
    own memory is not known here.
    """
    board = recognise(_ROOT)
    if board is None or board.memory_bytes is None:
        if gpu_nodes():
            return None
        board = replace(BOARDS[CPU], title="this machine")
    return replace(board, usable_bytes=reported_bytes(_ROOT) or board.usable_bytes)
