"""Find out which runtimes this Python can import, and which providers could run here.

    python -m pilotfish.lab.doctor.probe

Libraries of a GPU may crash or hang, so the doctor starts this process and reads one line of JSON
for each result, in this order:

    {"doing": "cuda"}                           what begins; the last such line is where it hung
    {"packages": {"onnxruntime": "1.23.2"}}     the installed wheels
    {"onnxruntime": {"version": …, "providers": […]}}
    {"tensorrt": "10.3.0"}, {"cuda": {…}}       or {"cuda_problem": "…"}
    {"absent": {"cpu": "", "cuda": "…"}}        by provider: "" if it can run, else the reason
"""

from __future__ import annotations

import json
import os
from importlib import import_module
from typing import Any

# The names of the results. The doctor reads only lines that have one of them.
DOING, PACKAGES, ONNXRUNTIME, TENSORRT = "doing", "packages", "onnxruntime", "tensorrt"
CUDA, CUDA_PROBLEM, ABSENT = "cuda", "cuda_problem", "absent"
TENSORRT_PROBLEM = "tensorrt_problem"


def main() -> None:
    """Write the lines."""
    from pilotfish.lab.host import packages

    _tell(DOING, PACKAGES)
    _tell(PACKAGES, packages())
    _tell(DOING, ONNXRUNTIME)
    _onnxruntime()
    _tell(DOING, TENSORRT)
    _tensorrt()
    _tell(DOING, CUDA)
    _cuda()
    _tell(DOING, ABSENT)
    _providers()


def _onnxruntime() -> None:
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        runtime: Any = import_module("onnxruntime")
        facts = {"version": runtime.__version__, "providers": runtime.get_available_providers()}
        _tell(ONNXRUNTIME, facts)
    except Exception as error:  # a library that does not fit raises many classes
        _tell(ONNXRUNTIME, {"problem": _reason(error)})


def _tensorrt() -> None:
    try:
        _tell(TENSORRT, import_module("tensorrt").__version__)
    except Exception as error:
        if not isinstance(error, ModuleNotFoundError):
            _tell(TENSORRT_PROBLEM, _reason(error))


def _cuda() -> None:
    try:
        from pilotfish.engines.cudart import Cuda

        cuda = Cuda()
        gpu = cuda.describe()
        _tell(CUDA, {"gpu": gpu.name, "compute": gpu.compute, **cuda.versions()})
    except Exception as error:
        _tell(CUDA_PROBLEM, _reason(error))


def _providers() -> None:
    from pilotfish.engines.backends import PROVIDERS
    from pilotfish.lab.selftest.providers import why_absent

    reasons = {}
    for name in PROVIDERS:
        try:
            reasons[name] = why_absent(name) or ""
        except Exception as error:
            reasons[name] = _reason(error)
    _tell(ABSENT, reasons)


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _tell(name: str, value: object) -> None:
    print(json.dumps({name: value}), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # the libraries' code for the end of a process may hang, too
