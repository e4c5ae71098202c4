"""ONNX Runtime: the installed version, and sessions on one of its providers.

Its own list of providers names those that it was compiled with; only a run shows whether one works.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from pilotfish.base.cpus import usable_cpus
from pilotfish.base.extras import install_command
from pilotfish.base.reading import reading_file, utf8_path
from pilotfish.engines.engine_errors import ProviderError

WHEELS = ("onnxruntime", "onnxruntime-gpu")

SESSION_CONFIG = {
    # Weights in 4 or 8 bits: multiply in int8, as MatMulNBits with accuracy_level 4 does.
    "session.qdq_matmulnbits_accuracy_level": "4",
}
# Drafter and target may share cores, where workers that spin between runs halve each other's
# speed. Spinning for 200 µs bridges the gaps within a run and ends soon after it. Runtimes without
# this setting (they ignore it) stop spinning at the end of the run, which costs some speed.
SPIN_DURATION = ("session.intra_op.spin_duration_us", "200")
SPIN_DURATION_VERSION = (1, 31)
SPIN_STOP = ("session.force_spinning_stop", "1")
CUDA = "CUDAExecutionProvider"
# TF32 products of float32, the default of CUDA's provider, keep 10 bits of 23: passes of different
# shape would then differ by far more than a tie.
PROVIDER_OPTIONS: Mapping[str, Mapping[str, str]] = {CUDA: {"use_tf32": "0"}}
FATAL = 4  # log severity


OPSET24_SINCE = (1, 25)  # onnxruntime runs the dialect of that name
LINEAR_ATTENTION_SINCE = (1, 31)  # or a little earlier: 1.23 lacks the operator


def runtime_version() -> tuple[int, ...]:
    """Return (major, minor) of the installed onnxruntime, whichever wheel it came from.

    Raises:
        ProviderError: if none is installed, or both wheels are and overwrite each other.
    """
    versions = {}
    for wheel in WHEELS:
        try:
            versions[wheel] = metadata.version(wheel)
        except metadata.PackageNotFoundError:
            continue
    if not versions:
        raise ProviderError(
            f"no inference runtime is installed: {install_command('cpu')}; with NVIDIA's GPU: "
            f"{install_command('gpu')}"
        )
    if len(versions) > 1:
        raise ProviderError(
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files: "
            f"pip uninstall both, then {install_command('cpu')}; with NVIDIA's GPU: "
            f"{install_command('gpu')}"
        )
    version = next(iter(versions.values()))
    return tuple(int(part) for part in version.split(".")[:2])


def open_session(
    graph: Path,
    threads: int | None,
    provider: str,
    options: Mapping[str, str] | None = None,
    others: Sequence[str] = (),
) -> Any:
    """Open a session that runs `graph` on this execution provider.

    Args:
        threads: threads per pass; None = one for each CPU that this process may use.
        options: options of the provider, besides PROVIDER_OPTIONS.
        others: providers for operators that the provider lacks; the CPU always is one.

    Raises:
        ProviderError: if no runtime is installed, it was built without the provider, or it cannot
            load the graph. (It raises its own classes, too.)
    """
    spinning = SPIN_DURATION if runtime_version() >= SPIN_DURATION_VERSION else SPIN_STOP
    # From 1.31 on the Linux wheels have telemetry, which writes a file on import.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    if provider not in onnxruntime.get_available_providers():
        raise ProviderError(f"onnxruntime {onnxruntime.__version__} was built without it")
    cuda_problem = _load_cuda() if CUDA in (provider, *others) else ""
    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = threads or usable_cpus()
    session_options.log_severity_level = FATAL
    onnxruntime.set_default_logger_severity(FATAL)  # kernels bypass the session's log level
    for key, value in (*SESSION_CONFIG.items(), spinning):
        session_options.add_session_config_entry(key, value)
    with reading_file(
        lambda problem: ProviderError(f"its path does not suit onnxruntime: {problem}")
    ):
        place = utf8_path(graph)
    session = onnxruntime.InferenceSession(
        place,
        session_options,
        providers=[
            (name, {**PROVIDER_OPTIONS.get(name, {}), **provider_options})
            for name, provider_options in (
                (provider, options or {}),
                *((other, {}) for other in others),
            )
        ],
        enable_fallback=False,
    )
    if session.get_providers()[0] != provider:
        raise ProviderError(cuda_problem or "onnxruntime could not load it and chose another")
    return session


@cache
def _load_cuda() -> str:
    """Load CUDA's libraries from pip's wheels, where the linker does not look; once per process.

    Returns ONNX Runtime's message about missing libraries, or "".
    """
    import onnxruntime

    if not hasattr(onnxruntime, "preload_dlls"):  # before 1.21
        return ""
    with redirect_stdout(io.StringIO()) as output:  # it prints, and never fails
        onnxruntime.preload_dlls()
    return output.getvalue().strip()
