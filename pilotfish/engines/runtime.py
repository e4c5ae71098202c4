"""ONNX Runtime: its installed version, and sessions on a chosen provider.

ONNX Runtime lists the providers that it was compiled with; only a run shows whether a provider
works.
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
from pilotfish.base.memory import resident_bytes
from pilotfish.base.reading import reading_file, utf8_path
from pilotfish.engines.engine_errors import ProviderError
from pilotfish.engines.forks import keep_in_forks
from pilotfish.engines.huge_pages import use_huge_pages

WHEELS = ("onnxruntime", "onnxruntime-gpu")

SESSION_CONFIG = {
    # With weights of 4 or 8 bits, multiply in int8, like MatMulNBits with accuracy_level 4.
    "session.qdq_matmulnbits_accuracy_level": "4",
}
# Time (µs) for which worker threads spin while idle. Drafter and target may share cores; there,
# workers that spin between runs halve the other model's speed. 200 µs bridge the gaps within a run,
# and spinning ends soon after the run. Older runtimes lack this setting: SPIN_STOP makes their
# workers stop at the end of a run, which costs some speed.
SPIN_DURATION = ("session.intra_op.spin_duration_us", "200")
SPIN_DURATION_VERSION = (1, 31)
SPIN_STOP = ("session.force_spinning_stop", "1")
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
# Options by provider. CUDA's default, TF32, keeps 10 of float32's 23 bits in products. Then the
# logits of one token would differ between passes of different shape by much more than rounding.
PROVIDER_OPTIONS: Mapping[str, Mapping[str, str]] = {CUDA: {"use_tf32": "0"}}
FATAL = 4  # log severity of ONNX Runtime
# Growth of the process (bytes) from which a session's weights are moved into huge pages. The
# processor's caches hold smaller models.
LARGE = 32 << 20


OPSET24_SINCE = (1, 25)  # first version of onnxruntime that runs the dialect opset24
LINEAR_ATTENTION_SINCE = (1, 31)  # a version that has the operator; 1.23 lacks it


def runtime_version() -> tuple[int, ...]:
    """Return (major, minor) of the installed onnxruntime, from the CPU's or the GPU's wheel.

    Raises:
        ProviderError: if neither wheel is installed, or both are, since they overwrite each other.
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
    *,
    lasting: bool = True,
) -> Any:
    """Open a session that runs `graph` on the execution provider `provider`.

    Args:
        threads: CPU threads per pass; None = one per CPU that this process may use.
        options: options of the provider, added to PROVIDER_OPTIONS.
        others: providers for operators that `provider` lacks; the CPU is always added.
        lasting: whether the session will run many passes, so that moving its weights into huge
        pages pays, and keeping freed memory for the next pass.

    Raises:
        ProviderError: if no runtime is installed, or it lacks the provider or chose another. ONNX
        Runtime also raises errors of its classes.
    """
    spinning = SPIN_DURATION if runtime_version() >= SPIN_DURATION_VERSION else SPIN_STOP
    # From 1.31 on the Linux wheels have telemetry, which writes a file at import.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    import onnxruntime

    if provider not in onnxruntime.get_available_providers():
        raise ProviderError(
            f"onnxruntime {onnxruntime.__version__} was built without this provider"
        )
    cuda_problem = _load_cuda() if CUDA in (provider, *others) else ""
    session_options = onnxruntime.SessionOptions()
    session_options.intra_op_num_threads = threads or usable_cpus()
    session_options.enable_cpu_mem_arena = lasting
    session_options.log_severity_level = FATAL
    # set globally, since kernels ignore the session's log level
    onnxruntime.set_default_logger_severity(FATAL)
    for key, value in (*SESSION_CONFIG.items(), spinning):
        session_options.add_session_config_entry(key, value)
    with reading_file(
        lambda problem: ProviderError(f"onnxruntime cannot open this path: {problem}")
    ):
        place = utf8_path(graph)
    size_before = resident_bytes()
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
        raise ProviderError(
            cuda_problem or "onnxruntime could not load this provider and chose another"
        )
    keep_in_forks(session)
    if lasting and provider == CPU and resident_bytes() - size_before > LARGE:
        use_huge_pages()
    return session


@cache
def _load_cuda() -> str:
    """Load CUDA's libraries from pip's wheels, which the linker does not search; once per process.

    Return ONNX Runtime's message about missing libraries, or "".
    """
    import onnxruntime

    if not hasattr(onnxruntime, "preload_dlls"):  # a version before 1.21
        return ""
    # preload_dlls prints problems instead of raising errors
    with redirect_stdout(io.StringIO()) as output:
        onnxruntime.preload_dlls()
    return output.getvalue().strip()
