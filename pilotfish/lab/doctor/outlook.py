"""What will therefore run: the providers, the one that a model gets, memory and speed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct, structs

from pilotfish.boards.board import ALL_BOARDS, JETPACKS, Board, siblings
from pilotfish.boards.expectation import Expectation, expect
from pilotfish.boards.gpu_forms import CPU, CUDA, TENSORRT, TENSORRT_RTX, why_not
from pilotfish.boards.misfit import Misfit, misfits
from pilotfish.boards.recipe import NO_WISHES, Wishes, recipe
from pilotfish.boards.shape import ModelShape, shape_of
from pilotfish.drafting.text_drafter import TEXT
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.backends import AUTO, PROVIDERS
from pilotfish.engines.manifest import CachedLayer
from pilotfish.engines.runtime import CUDA as CUDA_PROVIDER
from pilotfish.engines.runtime import WHEELS
from pilotfish.engines.tensorrt.targets import INSTEAD
from pilotfish.lab.doctor.facts import MachineFacts
from pilotfish.lab.doctor.gpu_facts import NO_TENSORRT
from pilotfish.lab.doctor.gpu_rules import OLDEST_COMPUTE

Role = Literal["device", "edge"]
_TENSORRT_EP = "tensorrt-ep"
_TENSORRT_PROVIDER = "TensorrtExecutionProvider"
# The default model: its name, its cache, and the bytes of its weights (docs/engines.md).
_DEFAULT = ModelShape(
    name="default (SmolLM2-135M)",
    context=8192,
    cached=tuple(CachedLayer(layer=layer, kv_heads=3, head_dim=64) for layer in range(30)),
    blocks=("Q4_1",),
)
_DEFAULT_BYTES = {
    "fp32": 538_000_000, "fp16": 269_000_000, "int8": 185_000_000, "int4": 148_000_000,
    "stored": 148_000_000,
}  # fmt: skip


class Subject(Struct, frozen=True, kw_only=True):
    """The model about which the doctor is asked.

    Attributes:
        model: folder of an artifact; None: the default model, exported by the board's recipe.
        unexported: name of a model that has no artifact yet, such as a hub id.
        source: where this was read, such as a configuration file.
        provider: the provider that is configured, or "auto".
        context: positions of a sequence; None: the model's.
        slots: sequences at a time.
    """

    role: Role = "device"
    model: Path | None = None
    unexported: str | None = None
    source: str | None = None
    provider: str = "auto"
    context: int | None = None
    slots: int = 1


class ProviderOutlook(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether a provider can run here.

    works: None: unknown. reason: why not, or why it is unknown.
    """

    name: str
    works: bool | None = None
    reason: str = ""


class Expects(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What will run here, and how fast it should be; an absent figure is unknown.

    Attributes:
        role: device or edge.
        source: where the model was read.
        model: name of the model.
        dialect, precision: form of its artifact; of the board's recipe if there is no artifact.
        context, slots: positions of a sequence, and sequences at a time.
        providers: all providers, the best first.
        provider: the provider that will run the model; absent if none can, or if it is unknown.
        advice: how to export a model for this board.
        weights_bytes, kv_bytes, runtime_bytes: memory that the model takes.
        board_bytes: memory that the board has for programs.
        tokens_per_s_bound: upper bound of the speed, by the memory's bandwidth.
    """

    role: Role
    source: str | None = None
    model: str | None = None
    dialect: str | None = None
    precision: str | None = None
    context: int | None = None
    slots: int = 1
    providers: tuple[ProviderOutlook, ...] = ()
    provider: str | None = None
    advice: str | None = None
    weights_bytes: int | None = None
    kv_bytes: int | None = None
    runtime_bytes: int | None = None
    board_bytes: int | None = None
    tokens_per_s_bound: float | None = None


class Outlook(Struct, frozen=True, kw_only=True):
    """The expectations, and what speaks against the model on this board.

    lines: the expectation of memory and speed in words.
    """

    expects: Expects
    misfits: tuple[Misfit, ...] = ()
    lines: tuple[str, ...] = ()


def look_ahead(facts: MachineFacts, subject: Subject, artifact: Artifact | None) -> Outlook:
    """Return what will run on a machine with these facts."""
    board = _with_memory(ALL_BOARDS.get(facts.board_name or ""), facts)
    jetpack = _supported_jetpack(board, facts.jetpack)
    wishes = _wishes(board, facts.jetpack, subject.role)
    shape = _default_shape(board, jetpack, subject.role, wishes)
    if artifact is not None:
        shape = shape_of(artifact)
    outlooks = tuple(_providers(facts))
    if subject.unexported is not None:
        return Outlook(
            expects=_before_export(subject, subject.unexported, outlooks, board, jetpack, wishes)
        )
    expected: Expectation | None = None
    wrong: list[Misfit] = []
    if board is not None:
        expected = expect(board, shape, context=subject.context, slots=subject.slots)
        if artifact is not None:
            listed = misfits(
                board, shape, context=subject.context, slots=subject.slots, jetpack=jetpack
            )
            wrong = [each for each in listed if each.kind in ("too-large", "idle-gpu")]
    expects = Expects(
        role=subject.role,
        source=subject.source,
        model=shape.name,
        dialect=shape.dialect,
        precision=shape.precision,
        context=min(subject.context or shape.context, shape.context),
        slots=subject.slots,
        providers=outlooks,
        provider=_choose(outlooks, shape, subject.provider, facts),
        advice=_advice(
            board, jetpack, subject, "default" if shape.name == _DEFAULT.name else "MODEL", wishes
        ),
        weights_bytes=shape.weights_bytes,
        kv_bytes=None if expected is None else expected.kv_bytes,
        runtime_bytes=None if expected is None else expected.runtime_bytes,
        board_bytes=facts.memory_bytes if expected is None else expected.board_bytes,
        tokens_per_s_bound=None if expected is None else expected.tokens_per_s_bound,
    )
    lines = () if expected is None else tuple(expected.lines())
    return Outlook(expects=expects, misfits=tuple(wrong), lines=lines)


def _before_export(
    subject: Subject,
    name: str,
    outlooks: tuple[ProviderOutlook, ...],
    board: Board | None,
    jetpack: str | None,
    wishes: Wishes,
) -> Expects:
    """Return the expectations of a model whose sizes are not known before its export."""
    return Expects(
        role=subject.role,
        source=subject.source,
        model=name,
        context=subject.context,
        slots=subject.slots,
        providers=outlooks,
        advice=None if name == TEXT else _advice(board, jetpack, subject, name, wishes),
        board_bytes=None if board is None else board.usable_bytes,
    )


def _with_memory(board: Board | None, facts: MachineFacts) -> Board | None:
    """Return the board with the memory that this machine has, if that is known."""
    if board is None:
        return None
    apart = board.gpu and not board.integrated
    memory = facts.gpu_memory_bytes if apart else facts.memory_bytes
    if memory is not None:
        return structs.replace(board, usable_bytes=memory)
    others = siblings(board)
    if facts.module is None and others:  # which of them it is, is not known
        speeds = {each.bandwidth_bytes_per_s for each in (board, *others)}
        bandwidth = speeds.pop() if len(speeds) == 1 else None
        return structs.replace(
            board, memory_bytes=None, usable_bytes=None, bandwidth_bytes_per_s=bandwidth
        )
    return board


def form_problem(provider: str, shape: ModelShape, facts: MachineFacts) -> str | None:
    """Return why a provider does not take a model of this form; None if it does, or is the CPU."""
    if provider == CPU or shape.dialect is None or shape.precision is None:
        return None
    ours = TENSORRT if provider == _TENSORRT_EP else provider
    version = (facts.tensorrt or facts.tensorrt_libraries) if ours == TENSORRT else None
    return why_not(
        ours, shape.dialect, shape.precision, states=shape.states, tensorrt=version or None
    )


def _advice(
    board: Board | None, jetpack: str | None, subject: Subject, model: str, wishes: Wishes
) -> str | None:
    """Return the command that exports a model for the board."""
    if board is None:
        return None
    words = f"pilotfish export model {shlex.quote(model)} --board {board.name}"
    words += f" --jetpack {jetpack}" if jetpack is not None else ""
    words += " --role edge" if subject.role == "edge" else ""
    words += f" --dialect {wishes.dialect}" if wishes.dialect is not None else ""
    words += f" --precision {wishes.precision}" if wishes.precision is not None else ""
    return f"{words} --out FOLDER"


def _choose(
    outlooks: tuple[ProviderOutlook, ...], shape: ModelShape, wanted: str, facts: MachineFacts
) -> str | None:
    """Return the provider that will run a model; None: none, or not known."""
    names = AUTO if wanted == "auto" else (wanted,)
    there = {each.name: each.works for each in outlooks}
    for name in names:
        if form_problem(name, shape, facts) is None:
            if there.get(name):
                return name
            if there.get(name) is None:
                return None
    return None


def _supported_jetpack(board: Board | None, jetpack: str | None) -> str | None:
    """Return the JetPack under its name in the boards' file; None if that has not this one."""
    for known in () if board is None else board.jetpacks:
        if known in JETPACKS and (jetpack or "").startswith(known):
            return known
    return None


def _wishes(board: Board | None, stated: str | None, role: Role) -> Wishes:
    """Return the form that every TensorRT takes, for a JetPack older than those of the board.

    Such a JetPack is not in the boards' file, and its TensorRT may not know the dialects of later
    ones: 7.0 of a Thor has TensorRT 10.13.
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", stated or ""))
    if board is None or not board.jetpacks or not numbers:
        return NO_WISHES
    oldest = tuple(int(number) for number in board.jetpacks[0].split("."))
    if numbers >= oldest or recipe(board, role=role, model=_DEFAULT).dialect == "opset17":
        return NO_WISHES
    return Wishes(dialect="opset17", precision="fp16")


def _default_shape(
    board: Board | None, jetpack: str | None, role: Role, wishes: Wishes
) -> ModelShape:
    """Return the default model's sizes in the form of the board's recipe."""
    dialect, precision = ("contrib", "int4") if role == "device" else ("opset24", "fp32")
    if board is not None:
        chosen = recipe(board, jetpack=jetpack, role=role, model=_DEFAULT, wishes=wishes)
        dialect, precision = chosen.dialect, chosen.precision
    size = _DEFAULT_BYTES[precision]
    return ModelShape(
        name=_DEFAULT.name,
        context=_DEFAULT.context,
        cached=_DEFAULT.cached,
        weights_bytes=size,
        read_bytes=size,
        dialect=dialect,
        precision=precision,
    )


def _providers(facts: MachineFacts) -> Iterator[ProviderOutlook]:
    for name in PROVIDERS:
        reason = (facts.absent or {}).get(name)
        if reason and name != CPU and _lacks_gpu(facts):
            yield ProviderOutlook(name=name, works=False, reason="this machine has no NVIDIA GPU")
        elif reason is not None:
            yield ProviderOutlook(name=name, works=not reason, reason=reason)
        else:
            works, reason = _judge(name, facts)
            yield ProviderOutlook(name=name, works=works, reason=reason)


def _lacks_gpu(facts: MachineFacts) -> bool:
    """Return whether there is no GPU, so that nobody needs the libraries for one."""
    return facts.cards == 0 and not facts.has_gpu and facts.container != "wsl"


def _judge(name: str, facts: MachineFacts) -> tuple[bool | None, str]:
    """Return whether a provider works, by facts that a recording shows, and the reason if not."""
    if problem := _obstacle(name, facts):
        return False, problem
    if name == CPU:
        known = facts.onnxruntime is not None
        return (True, "") if known else (None, "ONNX Runtime is not shown")
    if not facts.has_gpu:
        return None, "no GPU is shown"
    if name in (TENSORRT, TENSORRT_RTX):
        return (_judge_tensorrt if name == TENSORRT else _judge_rtx)(facts)
    return _judge_provider(CUDA_PROVIDER if name == CUDA else _TENSORRT_PROVIDER, facts)


def _obstacle(name: str, facts: MachineFacts) -> str | None:
    """Return what keeps a provider from running, whatever else is installed."""
    if 0 < facts.jetpack_line < 6 and facts.container is None:
        return f"Pilotfish does not run with the Python of JetPack {facts.jetpack}"
    if name not in (TENSORRT, TENSORRT_RTX):
        if facts.onnxruntime_problem is not None:
            return facts.onnxruntime_problem
        if all(wheel in (facts.packages or {}) for wheel in WHEELS):
            return f"{' and '.join(WHEELS)} overwrite each other's files"
    return None if name == CPU else facts.gpu_problem or facts.cuda_problem


def _judge_provider(wanted: str, facts: MachineFacts) -> tuple[bool | None, str]:
    if facts.onnxruntime_providers is None:
        return None, "the providers of ONNX Runtime are not shown"
    there = wanted in facts.onnxruntime_providers
    return there, "" if there else f"this ONNX Runtime is built without {wanted}"


def _judge_tensorrt(facts: MachineFacts) -> tuple[bool | None, str]:
    if facts.tensorrt is not None or (facts.is_tegra and facts.tensorrt_libraries is not None):
        return True, ""
    if facts.jetpack_package == "" or facts.tensorrt_problem is not None:
        return False, facts.tensorrt_problem or NO_TENSORRT
    return None, "TensorRT is not shown"


def _judge_rtx(facts: MachineFacts) -> tuple[bool | None, str]:
    if facts.is_tegra:
        return False, "TensorRT for RTX builds no engines for a Jetson"
    if facts.compute is not None:
        compute = tuple(int(part) for part in facts.compute.split("."))
        if facts.compute in INSTEAD or compute < OLDEST_COMPUTE:
            return False, f"TensorRT for RTX does not support compute capability {facts.compute}"
    if any(name.startswith("tensorrt-rtx") for name in facts.packages or {}):
        return True, ""
    return None, "TensorRT for RTX is not shown"
