"""The cache of built engines and kernel timings, in `cache_directory()/engines`.

An engine is valid for one version of TensorRT, one artifact, one set of profiles, and one GPU model
or some compute capabilities. The key contains all of these. Files are written atomically
(`engines.tensorrt.engine_file`). All files may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from pilotfish.engines.cache import cache_directory, locked
from pilotfish.engines.cudart import Gpu
from pilotfish.engines.engine_errors import EngineFileError
from pilotfish.engines.tensorrt.engine_file import (
    SUFFIX,
    EngineKey,
    read_header,
    read_plan,
    write_engine,
)

log = logging.getLogger("pilotfish.engines")


class EngineCache:
    """The cached engines of this machine. Several processes may use it at once."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_directory() / "engines"

    def path(self, key: EngineKey) -> Path:
        """Return the path of this engine's file, whether it exists or not."""
        return self._folder / key.artifact / key.name

    def paths(self, artifact: str, provider: str) -> list[Path]:
        """List the files of a provider's engines for the artifact of this name."""
        folder = self._folder / artifact
        # a provider's name may begin with another's, but a hash has no hyphen
        return [
            path
            for path in sorted(folder.glob(f"{provider}-*{SUFFIX}"))
            if "-" not in path.name.removeprefix(f"{provider}-")
        ]

    def read(self, key: EngineKey) -> bytes | None:
        """Return the plan.

        Return None, and log the reason, if its file is missing, damaged or another engine's.
        """
        return read_cached(self.path(key), key)

    def write(self, key: EngineKey, plan: bytes | memoryview) -> Path:
        """Write a plan atomically."""
        path = self.path(key)
        write_engine(path, key, plan)
        return path

    def timing(self, key: EngineKey) -> Path:
        """Return the path of the kernel timings, shared by all models on this TensorRT and GPU."""
        listed = f"{key.tensorrt}\n{key.gpu}\n{key.compute}"
        return self._folder / f"timing-{hashlib.sha256(listed.encode()).hexdigest()[:16]}.cache"

    def kernels(self, key: EngineKey, gpu: Gpu) -> Path:
        """Return the path of an engine's kernels, which TensorRT compiled for this GPU and driver.

        It ends with the hash of TensorRT's version, the GPU and the driver.
        """
        listed = f"{key.tensorrt}\n{gpu.name}\n{gpu.compute}\n{gpu.driver}"
        machine = hashlib.sha256(listed.encode()).hexdigest()[:16]
        stem = key.name.removesuffix(SUFFIX)
        return self._folder / key.artifact / f"{stem}-{machine}.kernels"

    @contextmanager
    def lock(self, key: EngineKey) -> Iterator[None]:
        """Lock the building of this engine against other processes.

        A process's end frees the lock.
        """
        waiting = "another process is building this engine: waiting until it ends"
        with locked(self.path(key).with_suffix(".lock"), partial(log.warning, waiting)):
            yield


def read_cached(path: Path, key: EngineKey) -> bytes | None:
    """Return the plan of this engine from a file.

    Return None, and log the reason, if it is missing, damaged or another engine's.
    """
    if not path.is_file():
        return None
    try:
        header = read_header(path)
        if header.key == key:
            return read_plan(path, header)
        problem = f"{path} was built for another model, GPU, TensorRT version or size"
    except EngineFileError as error:
        problem = str(error)
    log.warning("%s, so it is not used", problem)
    return None
