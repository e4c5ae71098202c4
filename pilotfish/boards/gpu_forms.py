"""Which forms of an artifact the providers of a board's GPU take.

The rules are those of `engines.tensorrt.gates` and of the backends, but for a machine that is not
this one: nothing is imported, and the version of TensorRT comes from `boards.toml`.

    provider       contrib   opset17        opset24              tensorrt
    tensorrt       no        fp32, fp16     from 10.15: fp32,    from 10.15: all
                                            fp16
    tensorrt-rtx   no        fp32, fp16     fp32, fp16           all
    cuda           no        fp32, fp16     all                  all

No provider of a GPU takes a graph of ONNX Runtime GenAI or recurrent states. On a Jetson `cuda`
needs a build of ONNX Runtime for the board, so it counts only if a caller names it. A GGUF file is
run by llama.cpp, on a GPU if it was built for this GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.boards.board import JETPACKS, Board
from pilotfish.engines.manifest import GENAI, LLAMACPP
from pilotfish.engines.tensorrt.gates import FLOATS, GATES

# the first TensorRT whose parser knows the operators of opset 24
_OPSET24_SINCE = GATES["opset 24"].since
# dialects that no provider of a GPU takes, and why
_NEVER = {
    LLAMACPP: "llama.cpp from the package index is built for CPUs",
    GENAI: "graphs of ONNX Runtime GenAI run only on the CPU",
    "contrib": "{provider} does not run the dialect contrib",
}
TENSORRT, TENSORRT_RTX, CUDA, CPU = "tensorrt", "tensorrt-rtx", "cuda", "cpu"


def gpu_providers(board: Board) -> tuple[str, ...]:
    """Return the providers that use the board's GPU as it is delivered, best first."""
    if not board.gpu:
        return ()
    return (TENSORRT,) if board.jetpacks else (TENSORRT_RTX, CUDA)


def why_not(
    provider: str, dialect: str, precision: str, *, states: bool, tensorrt: str | None = None
) -> str | None:
    """Return why a provider of a GPU does not take such an artifact, as a clause; None if it does.

    tensorrt: the version of TensorRT, such as "10.3"; None: a recent one.
    """
    if states:
        return "recurrent states run only on the CPU so far"
    if dialect in _NEVER:
        return _NEVER[dialect].format(provider=provider)
    if provider == CUDA or dialect == "opset17":
        return None
    name = "TensorRT" if tensorrt is None else f"TensorRT {tensorrt}"
    if not knows_opset24(tensorrt):
        needed = ".".join(map(str, _OPSET24_SINCE or ()))
        return f"{name} does not know the dialect {dialect}, which needs {needed}"
    if dialect == "opset24" and precision not in FLOATS:
        return f"{name} takes quantised weights only in the dialect tensorrt"
    return None


def idle_reasons(
    board: Board,
    dialect: str,
    precision: str,
    *,
    states: bool,
    jetpack: str | None,
    further: Sequence[str] = (),
) -> dict[str, str]:
    """Return why the board's GPU would idle: JetPack (or "" without JetPacks) → a clause.

    Only JetPacks on which the GPU would idle are listed; all of the board's are asked unless
    `jetpack` names one. further: providers that the board has besides, such as "cuda" by a
    vendor's build of ONNX Runtime.
    """
    versions = (jetpack,) if jetpack is not None and board.jetpacks else board.jetpacks or ("",)
    reasons = {}
    for version in versions:
        tensorrt = JETPACKS[version].tensorrt if version else None
        whys = [
            why_not(provider, dialect, precision, states=states, tensorrt=tensorrt)
            for provider in (*gpu_providers(board), *further)
        ]
        if whys and whys[0] is not None and all(whys):
            reasons[version] = whys[0]
    return reasons


def knows_opset24(tensorrt: str | None) -> bool:
    """Whether this version of TensorRT knows the operators of opset 24; None: a recent version."""
    if tensorrt is None or _OPSET24_SINCE is None:
        return True
    return tuple(map(int, tensorrt.split(".")[:2])) >= _OPSET24_SINCE
