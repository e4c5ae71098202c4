"""Check the artifacts of a bundle against the board that it is for.

In: a board or a JetPack, and artifacts. Out: a `BoardRecord` with what to expect there, or a
`MisfitError`: an artifact is too large for the board's memory, or would leave its GPU idle.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pilotfish.base.errors import UnsupportedError
from pilotfish.boards.board import BOARDS, JETPACKS, Board
from pilotfish.boards.expectation import expect
from pilotfish.boards.export_command import export_command
from pilotfish.boards.gpu_forms import CUDA, gpu_providers, idle_reasons
from pilotfish.boards.misfit import MisfitError, misfits
from pilotfish.deploy.board_record import BoardRecord
from pilotfish.deploy.wheels import Wheel
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.tensorrt.edition import RTX
from pilotfish.engines.tensorrt.engine_file import shipped_engines

_GPU_RUNTIME = "onnxruntime-gpu"  # a vendor's wheel, with the provider cuda


def check_board(
    board: Board | None,
    jetpack: str | None,
    artifacts: Sequence[Path],
    *,
    cpu: bool = False,
    wheels: Sequence[Path] = (),
) -> BoardRecord | None:
    """Return what to expect of artifacts on a board; None if neither board nor JetPack is named.

    cpu: whether the board's GPU may idle. wheels: the bundle's own wheels of packages.

    Raises `MisfitError`, and `UnsupportedError` if ``cpu`` has no GPU to leave idle.
    """
    if cpu and (board is None or not board.gpu):
        raise UnsupportedError("--cpu goes with a --board that has a GPU.")
    has_runtime = any(Wheel.from_path(path).name == _GPU_RUNTIME for path in wheels)
    further = (CUDA,) if has_runtime else ()
    if board is None:
        return None if jetpack is None else _record_of_jetpack(jetpack, artifacts, further)
    opened = [Artifact.open(path) for path in artifacts]
    lines = [f"for {board.title}:"]
    for artifact in opened:
        lines += _lines(board, jetpack, artifact, cpu, further)
    served = expect(board, opened[0])
    return BoardRecord(
        board=board.name,
        title=board.title,
        jetpack=jetpack,
        l4t=None if jetpack is None else JETPACKS[jetpack].l4t,
        tree=board.tree,
        prefixes=board.prefixes,
        # the memory of a card is not the system's
        need_bytes=served.known_bytes if board.integrated or not board.gpu else 0,
        lines=tuple(lines),
    )


def _lines(
    board: Board, jetpack: str | None, artifact: Artifact, cpu: bool, further: Sequence[str]
) -> Iterator[str]:
    """Yield what to expect of an artifact on a board; raise `MisfitError` if it must not be."""
    model = artifact.manifest.model
    if cpu:
        yield f"WARNING: {model} will run on the CPU, and the GPU will idle, as --cpu says"
    for misfit in misfits(board, artifact, jetpack=jetpack, further=further):
        if cpu and misfit.kind in {"idle-gpu", "some-jetpacks"}:
            continue
        if misfit.refuses:
            advice = ""
            if misfit.kind == "idle-gpu" and artifact.manifest.states is None:
                advice = f". The export: {export_command(artifact.manifest, board, jetpack)}"
            raise MisfitError(f"{artifact.path}: {misfit.message}{advice}")
        yield f"WARNING: {misfit.message}"
    if not cpu and not further:
        _require_engine(board, artifact)
    for line in expect(board, artifact).lines():
        yield f"{model}: {line}"


def _require_engine(board: Board, artifact: Artifact) -> None:
    """Raise `MisfitError` if the board's GPU needs an engine, and the artifact has no engine."""
    if gpu_providers(board)[:1] == (RTX.provider,) and not shipped_engines(artifact, RTX.provider):
        raise MisfitError(
            f"{artifact.path}: {artifact.manifest.model} would leave the GPU of {board.title} "
            f"idle, because its folder has no engine: build one with {RTX.command(artifact.path)}, "
            "or accept the CPU with --cpu"
        )


def _record_of_jetpack(
    jetpack: str, artifacts: Sequence[Path], further: Sequence[str]
) -> BoardRecord:
    """Return the record for some Jetson with a JetPack: its memory and module are not known."""
    some_jetson = next(board for board in BOARDS.values() if jetpack in board.jetpacks)
    lines = ["no --board is named, so nothing is known of the board's memory"]
    for path in artifacts:
        manifest = Artifact.open(path).manifest
        idle = idle_reasons(
            some_jetson,
            manifest.dialect,
            manifest.precision,
            states=manifest.states is not None,
            jetpack=jetpack,
            further=further,
        )
        lines += [
            f"WARNING: {manifest.model} will run on the CPU of a Jetson with JetPack {jetpack}, "
            f"and the GPU will idle, because {why}: {export_command(manifest, None, jetpack)}"
            for why in idle.values()
        ]
    return BoardRecord(
        board=None,
        title=f"a Jetson with JetPack {jetpack}",
        jetpack=jetpack,
        l4t=JETPACKS[jetpack].l4t,
        tree=(),
        prefixes=(),
        need_bytes=0,
        lines=tuple(lines),
    )
