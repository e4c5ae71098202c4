"""Artifacts in bundles and packages, with the engines in their folders.

In:  an artifact's folder; `pilotfish export engine` may have put engines into its folder `engines`.
Out: a copy of the artifact and its engines, the extra that installs what runs them, and the edge's
     settings for them.
Guarantees: an engine is copied only if the installed program can load it on a fitting GPU: it is
     whole, it was built from this artifact, and its edition has the version of the wheels beside
     it.

Only TensorRT for RTX comes in wheels. The standard TensorRT is part of a board's system, so an
engine of it is copied with whatever version it names.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pilotfish.deploy.errors import BundleError
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import EngineFileError
from pilotfish.engines.manifest import LLAMACPP, OPSET24
from pilotfish.engines.tensorrt.edition import RTX
from pilotfish.engines.tensorrt.engine_file import (
    FOLDER,
    SUFFIX,
    EngineKey,
    build_command,
    check_engine,
)

# the last ONNX Runtime for Python 3.10 is 1.23, which cannot load opset 24
_OLD_RUNTIME_PYTHON = "3.10"
_PARTS = ("libs", "bindings")  # the last words of the names of TensorRT's wheels


@dataclass(frozen=True)
class PackedEngine:
    """An engine file in an artifact's folder, and the facts in its header."""

    path: Path
    key: EngineKey


def open_artifact(path: Path, python: str) -> Artifact:
    """Open an artifact that an installation with this Python shall run.

    Raises:
        ArtifactError: if it is none.
        BundleError: if no installed runtime can load it.
    """
    artifact = Artifact.open(path)
    if artifact.manifest.dialect == LLAMACPP:
        raise BundleError(
            f"{path} runs on llama.cpp, but no bundle contains a wheel of llama.cpp: "
            "install the extra llamacpp on the board, or export the model with another "
            "--dialect."
        )
    if artifact.manifest.opset == OPSET24 and python == _OLD_RUNTIME_PYTHON:
        raise BundleError(
            f"{path} has dialect {artifact.manifest.dialect}, which no ONNX Runtime for Python "
            f"{python} can load: export the model with --dialect opset17 or contrib."
        )
    states = artifact.manifest.states
    if states is not None and states.heads and python == _OLD_RUNTIME_PYTHON:
        raise BundleError(
            f"{path} has recurrent states, which no ONNX Runtime for Python {python} can compute: "
            "choose another model, or a board with a later Python (JetPack 7.2)."
        )
    return artifact


def engines_of(artifact: Artifact) -> list[PackedEngine]:
    """Check each engine in an artifact's folder, and return them.

    Raises:
        BundleError: if one is damaged, or was built from another artifact.
    """
    engines = []
    for path in sorted((artifact.path / FOLDER).glob(f"*{SUFFIX}")):
        try:
            engines.append(PackedEngine(path, check_engine(path, artifact).key))
        except EngineFileError as error:
            # otherwise it would stay beside the new engine
            raise BundleError(f"{error}; delete the old file first") from error
    return engines


def refuse_for_jetson(engines: Sequence[PackedEngine]) -> None:
    """Raise `BundleError` if an engine is for GPUs that no Jetson has."""
    for engine in filter(_needs_wheels, engines):
        raise BundleError(
            f"{engine.path} is an engine of {RTX.title}, which runs on no Jetson: move the folder "
            f"{engine.path.parent} away, and let the board build its engine "
            "(pilotfish-engine-build.service)."
        )


def extras(engines: Sequence[PackedEngine]) -> tuple[str, ...]:
    """Return the extras of pilotfish whose wheels run the engines."""
    return (RTX.provider,) if any(_needs_wheels(engine) for engine in engines) else ()


def require_runtime(engines: Sequence[PackedEngine], wheels: Mapping[str, str]) -> None:
    """Raise `BundleError` unless the wheels (name → version) have what runs each engine."""
    versions = {
        part: {
            version
            for name, version in wheels.items()
            if name.startswith(RTX.provider) and name.endswith(f"-{part}")
        }
        for part in _PARTS
    }
    for engine in filter(_needs_wheels, engines):
        if all(versions[part] == {engine.key.tensorrt} for part in _PARTS):
            continue
        listed = " and ".join(sorted(versions["libs"] | versions["bindings"]))
        key = engine.key
        command = build_command(RTX, engine.path.parents[1], key.slots, key.context, key.compute)
        build = f"delete it and build one with their version ({command}), or "
        raise BundleError(
            f"{engine.path} was built by {RTX.title} {engine.key.tensorrt}, and the wheels to "
            f"install {f'are of version {listed}: {build}' if listed else 'do not have it: '}"
            f"give its wheels of version {engine.key.tensorrt} (libs and bindings)."
        )


def largest(engines: Sequence[PackedEngine]) -> EngineKey:
    """Return the facts about the engine with the most slots, and of these the longest context."""
    return max((engine.key for engine in engines), key=lambda key: (key.slots, key.context))


def edge_settings(text: str, engines: Sequence[PackedEngine]) -> str:
    """Return `edge.toml` with the number and length of sessions that the largest engine can serve.

    The edge's defaults may be more, and then the edge would refuse the engine.
    """
    if not engines:
        return text
    key = largest(engines)
    sizes = f"sessions = {key.slots}\ncontext = {key.context}"
    return re.sub(r"(?m)^#sessions = .*$", f"{sizes}  # of the engine in the target's folder", text)


def device_settings(text: str, engines: Sequence[PackedEngine]) -> str:
    """Return `device.toml` with the number of lanes that the largest engine can serve.

    The default may be more, and then the device would refuse the engine.
    """
    if not engines:
        return text
    return f"{text}lanes = {largest(engines).slots}  # of the engine in the drafter's folder\n"


def copy(artifact: Artifact, engines: Sequence[PackedEngine], folder: Path) -> None:
    """Copy an artifact's files and engines into a new folder."""
    paths = [artifact.path / name for name in ("manifest.json", *artifact.manifest.files)]
    for path in [*paths, *(engine.path for engine in engines)]:
        target = folder / path.relative_to(artifact.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
        target.chmod(0o644)


def _needs_wheels(engine: PackedEngine) -> bool:
    return engine.key.provider == RTX.provider
