"""Warn at the start of a program whose model does not suit this machine.

Before a model is loaded: its weights and one full context exceed the machine's memory. After it is
loaded: it runs on the CPU although there is a GPU, and nobody chose the CPU. Each warning is a line
in the log; a service shows the same sentence in its status.
"""

from __future__ import annotations

import logging
from pathlib import Path

from msgspec.structs import replace

from pilotfish.boards.board import BOARDS, Board
from pilotfish.boards.export_command import export_command
from pilotfish.boards.gpu_forms import CPU, idle_reasons
from pilotfish.boards.misfit import Misfit, misfits
from pilotfish.boards.recognition import recognise, total_memory
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.gpus import IdleGpu, gpu_nodes

log = logging.getLogger("pilotfish.boards")

_ROOT = Path("/")


def warn_before_load(artifact: Artifact, context: int | None = None) -> tuple[Misfit, ...]:
    """Warn of a model that this machine's memory cannot hold; return the warnings.

    context: positions of a slot; None = the model's.
    """
    board = _this_board()
    if board is None:
        return ()
    speaking_against = misfits(board, artifact, context=context)
    return _warn([each for each in speaking_against if each.kind == "too-large"])


def warn_of_idle_gpu(artifact: Artifact, idle: IdleGpu | None) -> tuple[Misfit, ...]:
    """Warn of a GPU that the loaded model leaves idle; return the warnings."""
    if idle is None:
        return ()
    manifest = artifact.manifest
    board = recognise(_ROOT)
    gpu_board = board if board is not None and board.gpu else BOARDS["rtx"]
    why, mending = idle.reasons, "`pilotfish doctor` says what this machine lacks"
    forms = idle_reasons(
        gpu_board,
        manifest.dialect,
        manifest.precision,
        states=manifest.states is not None,
        jetpack=None,
    )
    if len(forms) == len(gpu_board.jetpacks or ("",)):  # else only this machine's TensorRT decides
        why, mending = next(iter(forms.values())), "choose a model without recurrent states"
        if manifest.states is None:
            mending = f"`{export_command(manifest, board)}`, and serve DIR"
    message = (
        f"{manifest.model} runs on the CPU, although this machine has a GPU ({idle.node}): {why}. "
        f"To use the GPU: {mending}; --provider cpu silences this warning"
    )
    return _warn([Misfit(kind="idle-gpu", message=message, refuses=False)])


def _warn(warnings: list[Misfit]) -> tuple[Misfit, ...]:
    for misfit in warnings:
        log.warning("%s", misfit.message)
    return tuple(warnings)


def _this_board() -> Board | None:
    """Return this machine's board; None if nothing is known of the memory that models go to.

    The memory of a machine that nobody published is the one that its kernel reports. A card's own
    memory is not known here.
    """
    board = recognise(_ROOT)
    if board is not None and board.memory_bytes is not None:
        return board
    if gpu_nodes():
        return None
    return replace(BOARDS[CPU], title="this machine", memory_bytes=total_memory(_ROOT))
