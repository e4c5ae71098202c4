"""What is wrong with the GPU and with the libraries that should use it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pilotfish.base.extras import install_command
from pilotfish.engines.runtime import CUDA, WHEELS
from pilotfish.lab.doctor.board_rules import JETPACK
from pilotfish.lab.doctor.facts import MachineFacts
from pilotfish.lab.doctor.finding import Finding, fault, note, warning

_NEW_DRIVER = "a new driver"  # stands for the command of the system: `_driver_command`
# Words in the name of a distribution → the command that installs NVIDIA's driver. For a
# distribution that is known and not here, its own documents have the command.
_DRIVER_COMMANDS = (
    (r"Ubuntu|Mint|Pop!_OS|^$", "sudo ubuntu-drivers install && sudo reboot"),
    ("Debian", "sudo apt install nvidia-driver && sudo reboot"),
)
OLDEST_COMPUTE = (7, 5)  # TensorRT 10 and CUDA 13 support no older GPUs
_CONTAINERS = (
    "sudo apt install nvidia-container-toolkit && sudo nvidia-ctk runtime configure "
    "--runtime=docker && sudo systemctl restart docker"
)
# Words in messages of NVIDIA's tools → what they mean, and the command that mends it.
_PROBLEMS = (
    ("could not select device driver", "Docker has no runtime of NVIDIA's", _CONTAINERS),
    ("not found", "NVIDIA's driver is not installed", _NEW_DRIVER),
    ("version mismatch", "the driver was updated, and the old one is still loaded", "sudo reboot"),
    ("ERR!", "the driver gives programs no CUDA; in WSL it is Windows' driver", _NEW_DRIVER),
    ("access blocked", "Windows does not let WSL use the GPU", "wsl.exe --update"),
    ("GPU is lost", "the GPU has fallen off the bus", "sudo reboot"),
    ("couldn't communicate", "the driver's kernel module is not loaded", _NEW_DRIVER),
    ("No devices", "the driver finds no GPU that it supports", _NEW_DRIVER),
    ("", "the driver does not work", _NEW_DRIVER),
)


def gpu_findings(facts: MachineFacts) -> Iterator[Finding]:
    """Yield what is wrong with the GPU and its libraries, the worst first."""
    if facts.has_gpu:
        yield from _driver(facts)
        yield from _cuda(facts)
        yield from _access(facts)
    yield from _runtime(facts)


def _driver(facts: MachineFacts) -> Iterator[Finding]:
    if facts.gpu_problem is not None:
        yield from _tool_problem(facts.gpu_problem, facts)
    elif (
        facts.cards
        and facts.driver is None
        and not (facts.is_tegra or facts.gpu_devices or facts.container == "wsl")
    ):
        named = facts.gpus[0] if facts.gpus else "an NVIDIA GPU"
        yield fault(
            "GPU",
            f"The machine has {named}, but NVIDIA's driver is not installed.",
            _driver_command(facts),
        )
    if facts.mig:
        yield warning(
            "GPU",
            "The GPU is divided into instances (MIG): a program gets one of them at most, with a "
            "part of the memory and speed stated here, and none if none has been made.",
            "sudo nvidia-smi -i 0 -mig 0",
        )
    if facts.container == "wsl":
        yield note(
            "GPU",
            "This is Windows' Linux (WSL): the GPU's driver is Windows' own, so install none here; "
            "the first use of the GPU is slow, and times differ from those of Linux.",
        )


def _tool_problem(problem: str, facts: MachineFacts) -> Iterator[Finding]:
    for words, meaning, mend in _PROBLEMS:
        if words in problem:
            command = _driver_command(facts) if mend == _NEW_DRIVER else mend
            yield fault("GPU", f"The GPU cannot be used, because {meaning}: “{problem}”", command)
            return


def _driver_command(facts: MachineFacts) -> str | None:
    """Return the command that installs the driver anew; None: this system's is not known."""
    if facts.is_tegra:
        return "sudo reboot"  # the driver is part of L4T
    if facts.container == "wsl":
        return "wsl.exe --update"  # the driver is Windows'
    system = facts.system or ""
    return next((command for words, command in _DRIVER_COMMANDS if re.search(words, system)), None)


def _cuda(facts: MachineFacts) -> Iterator[Finding]:
    problem = facts.cuda_problem or ""
    wanted = facts.cuda or _cuda_of_wheel(facts)
    too_old = _major(facts.driver_cuda) < _major(wanted) if facts.driver_cuda else False
    if too_old or "driver version is insufficient" in problem:
        known = f" (its driver {facts.driver} is for CUDA {facts.driver_cuda})"
        yield fault(
            "driver",
            f"NVIDIA's driver is too old for {'CUDA ' + wanted if wanted else 'this CUDA'}"
            f"{known if facts.driver_cuda else ''}: install a newer one.",
            None if facts.is_tegra else _driver_command(facts),
        )
    elif "NVRM" in problem or "no CUDA-capable device" in problem or "NoDevice" in problem:
        if facts.gpu_problem is None:
            yield fault(
                "GPU",
                f"The GPU is listed, but CUDA cannot use it: {problem}. A restart, or another "
                f"version of the driver than {facts.driver or 'this'}, mends it mostly.",
                "sudo reboot",
            )
    elif (
        problem and facts.gpu_problem is None and (not facts.is_tegra or problem.startswith("lib"))
    ):
        yield warning(
            "CUDA",
            f"The GPU is there, but CUDA cannot be used: {problem}.",
            JETPACK if facts.is_tegra else _install("gpu", facts),
        )
    compute = tuple(int(part) for part in (facts.compute or "99").split("."))
    if compute < OLDEST_COMPUTE:
        yield warning(
            "GPU",
            f"The GPU has compute capability {facts.compute}: TensorRT 10 and CUDA 13 need 7.5.",
        )


def _cuda_of_wheel(facts: MachineFacts) -> str | None:
    """Return the CUDA that the wheel onnxruntime-gpu needs: 12 from version 1.19 on."""
    version = (facts.packages or {}).get("onnxruntime-gpu", "0").split(".")
    numbers = tuple(int(part) for part in version[:2] if part.isdigit())
    return "12" if numbers >= (1, 19) and not facts.is_tegra else None


def _access(facts: MachineFacts) -> Iterator[Finding]:
    closed = [each for each in facts.unread if each.endswith("(the GPU)")]
    if closed:
        yield warning(
            "GPU",
            f"This user may not use the GPU: {', '.join(closed)}. Log in again after the command.",
            "sudo usermod -aG video,render $USER",
        )


def _runtime(facts: MachineFacts) -> Iterator[Finding]:
    """Yield what is wrong with ONNX Runtime."""
    wheels = [name for name in WHEELS if name in (facts.packages or {})]
    if facts.absent is not None and not wheels and facts.onnxruntime is None:
        extra = "gpu" if facts.has_gpu and not facts.is_tegra else "cpu"
        yield fault("ONNX Runtime", "No ONNX Runtime is installed.", _install(extra, facts))
    elif len(wheels) > 1:
        yield fault(
            "ONNX Runtime",
            "onnxruntime and onnxruntime-gpu are both installed and overwrite each other's files"
            + (": keep the one that was built for this board." if facts.is_tegra else "."),
            "pip uninstall -y onnxruntime && "
            "pip install --force-reinstall --no-deps onnxruntime_gpu-VERSION.whl"
            if facts.is_tegra
            else f"pip uninstall -y {' '.join(WHEELS)} && {_install('gpu', facts)}",
        )
    elif facts.onnxruntime_problem is not None:
        yield fault(
            "ONNX Runtime",
            f"ONNX Runtime cannot be imported: {facts.onnxruntime_problem}.",
            "pip install --force-reinstall "
            + (f"'{wheels[0]}!={facts.onnxruntime}'" if facts.onnxruntime else "onnxruntime"),
        )
    elif facts.has_gpu and _lacks_cuda(facts, wheels):
        yield _without_gpu(facts)


def _lacks_cuda(facts: MachineFacts, wheels: list[str]) -> bool:
    if facts.onnxruntime_providers is not None:
        return CUDA not in facts.onnxruntime_providers
    return wheels == ["onnxruntime"]


def _without_gpu(facts: MachineFacts) -> Finding:
    if facts.is_tegra:
        if facts.tensorrt or (facts.absent is None and facts.tensorrt_libraries):
            return note(
                "ONNX Runtime",
                "This ONNX Runtime is for CPUs only: the GPU is used by TensorRT alone.",
            )
        return warning(
            "ONNX Runtime",
            "This ONNX Runtime is for CPUs only, and the package index has none for this GPU: use "
            "TensorRT (docs/jetson.md), or a vendor's build of ONNX Runtime.",
            "sudo apt install python3-libnvinfer",
        )
    return warning(
        "ONNX Runtime",
        "This ONNX Runtime is for CPUs only, so models would run on the CPU although there is a "
        "GPU: install the other wheel in its place.",
        f"pip uninstall -y onnxruntime && {_install('gpu', facts)}",
    )


def _install(extra: str, facts: MachineFacts) -> str:
    """Return the command that installs an extra, for a recorded machine without our source."""
    known = facts.pilotfish is not None
    return install_command(extra) if known else f"pip install 'pilotfish[{extra}]'"


def _major(version: str | None) -> int:
    text = (version or "0").partition(".")[0]
    return int(text) if text.isdigit() else 0
