"""The cache of built engines and kernel timings, in `cache_directory()/engines`.

An engine is valid for one version of TensorRT, one GPU model, one artifact and one set of profiles.
The key contains all of these. A file is a line of JSON, with the key, and then the plan (TensorRT's
serialised engine). Files are written atomically, and used only if length, SHA-256 and key match.
All files may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec

from pilotfish.engines.cache import cache_directory, locked, replace_file

log = logging.getLogger("pilotfish.engines")

SUFFIX = ".engine"
HEADER_LIMIT = 1 << 16


class EngineKey(msgspec.Struct, frozen=True, kw_only=True):
    """The facts that an engine depends on; if any field differs, another engine is needed.

    `artifact` is the artifact's digest, `compute` the GPU's compute capability, `profiles` the
    digest of all shapes. `slots` and `context` are the numbers for which the profiles were made.
    """

    tensorrt: str
    gpu: str
    compute: str
    artifact: str
    dialect: str
    precision: str
    slots: int
    context: int
    profiles: str

    @property
    def name(self) -> str:
        """The hash of the key, 32 hex digits, used as file name."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]

    def same_machine(self, other: EngineKey) -> bool:
        """Whether model, TensorRT and GPU are equal; slots, context and profiles may differ."""
        return self == msgspec.structs.replace(
            other, slots=self.slots, context=self.context, profiles=self.profiles
        )


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: EngineKey
    size: int
    sha256: str


class EngineCache:
    """The cached engines of this machine. Several processes may use it at once."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_directory() / "engines"

    def path(self, key: EngineKey) -> Path:
        """Return the path of this engine's file, whether it exists or not."""
        return self._folder / key.artifact / f"{key.name}{SUFFIX}"

    def knows(self, artifact: str) -> bool:
        """Whether any engine is cached for the artifact of this digest."""
        return any((self._folder / artifact).glob(f"*{SUFFIX}"))

    def keys(self, key: EngineKey) -> list[EngineKey]:
        """List the keys of cached engines for the same model, TensorRT and GPU, smallest first."""
        keys = []
        for path in self.path(key).parent.glob(f"*{SUFFIX}"):
            header = _read_engine_file(path)[0]
            if header and header.key.same_machine(key):
                keys.append(header.key)
        return sorted(keys, key=lambda each: (each.slots, each.context))

    def read(self, key: EngineKey) -> bytes | None:
        """Return the plan.

        Return None, and log the reason, if its file is missing, damaged or another engine's.
        """
        path = self.path(key)
        if not path.is_file():
            return None
        header, plan = _read_engine_file(path, whole=True)
        fault = None
        if header is None:
            fault = "is not an engine file"
        elif header.key != key:
            fault = "was built for another model, GPU, TensorRT version or size"
        elif len(plan) != header.size or hashlib.sha256(plan).hexdigest() != header.sha256:
            fault = "is truncated or damaged"
        if fault:
            log.warning("the cached engine %s %s, so it is not used", path, fault)
            return None
        return plan

    def write(self, key: EngineKey, plan: bytes | memoryview) -> Path:
        """Write a plan atomically."""
        path = self.path(key)
        digest = hashlib.sha256(plan).hexdigest()
        header = _Header(key=key, size=len(plan), sha256=digest)
        replace_file(path, msgspec.json.encode(header) + b"\n", plan)
        return path

    def discard(self, key: EngineKey) -> None:
        """Delete an engine that TensorRT refused."""
        self.path(key).unlink(missing_ok=True)

    def timing(self, key: EngineKey) -> Path:
        """Return the path of the kernel timings, shared by all models on this TensorRT and GPU."""
        listed = f"{key.tensorrt}\n{key.gpu}\n{key.compute}"
        return self._folder / f"timing-{hashlib.sha256(listed.encode()).hexdigest()[:16]}.cache"

    @contextmanager
    def lock(self, key: EngineKey) -> Iterator[None]:
        """Lock the building of this engine against other processes.

        A process's end frees the lock.
        """
        waiting = "another process is building this engine: waiting until it ends"
        with locked(self.path(key).with_suffix(".lock"), partial(log.warning, waiting)):
            yield


def _read_engine_file(path: Path, *, whole: bool = False) -> tuple[_Header | None, bytes]:
    """Read a file's header and, if `whole`, its plan; the header is None if it is invalid."""
    try:
        with path.open("rb") as file:
            header = msgspec.json.decode(file.readline(HEADER_LIMIT), type=_Header)
            return header, file.read() if whole else b""
    except (OSError, ValueError, RecursionError):  # ValueError: msgspec's, or invalid UTF-8
        return None, b""
