"""The GPU and the libraries that use it: driver, CUDA, TensorRT, ONNX Runtime.

On this machine the libraries' facts come from the probe. In a recording they come from what people
show: `pip list`, `dpkg -l`, `nvcc --version`, `nvidia-smi`, a line of Python.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pilotfish.engines.gpus import gpu_nodes
from pilotfish.lab import host
from pilotfish.lab.doctor.board_facts import packages
from pilotfish.lab.doctor.machine import Machine

NO_CUDA, NO_TENSORRT = "CUDA is not installed", "TensorRT is not installed"
_STATS = r"jetson_release|jtop"
_PIP = r".*\bpip3? |.*\buv pip |.*\bconda list"
_PYTHON = r".*python[\d.]* -c|.*python[\d.]* <<"
# What `nvidia-smi` says if the driver does not work.
_FAILURES = re.compile(
    r"^.*(?:has failed because|couldn't communicate|version mismatch|No devices were found"
    r"|Failed to initialize NVML|Unable to determine the device handle|GPU is lost"
    r"|GPU access blocked|could not select device driver).*$|CUDA Version:\s*ERR!",
    re.MULTILINE,
)
_SLOWDOWN = re.compile(r"(SW Thermal|HW Thermal|HW Power Brake|HW) Slowdown\s*: Active")
# Bits of NVML's reasons for which a GPU's clocks are lower than they could be.
_REASONS = {
    0x8: "a hardware slowdown",
    0x20: "heat (SW thermal slowdown)",
    0x40: "heat (HW thermal slowdown)",
    0x80: "the power supply (HW power brake)",
}
# Words in names of GPUs → compute capability (https://developer.nvidia.com/cuda-gpus).
_COMPUTE = (
    (r"\bGB10\b", "12.1"),
    (r"\bB[23]00\b|GB200", "10.0"), (r"\bG?H[128]00\b|\bH20\b", "9.0"),
    (r"\bA100\b|\bA30\b", "8.0"), (r"RTX 50\d\d|RTX PRO .*Blackwell", "12.0"),
    (r"RTX 40\d\d|\bL40S?\b|\bL4\b|\bAda\b", "8.9"), (r"\bOrin\b", "8.7"),
    (r"RTX 30\d\d|\bA(?:2|10|16|40|[2-6]000)\b", "8.6"),
    (r"RTX 20\d\d|GTX 16\d\d|\bT4\b|Quadro RTX", "7.5"), (r"\bV100\b|TITAN V", "7.0"),
    (r"GTX 10\d\d|\bP(?:4|40)\b", "6.1"), (r"\bP100\b", "6.0"),
)  # fmt: skip
_MIB = 1 << 20
_NO_COMMAND = 127  # a shell's exit status


def gpu_facts(machine: Machine) -> dict[str, Any]:
    """Return the facts of the GPU and its libraries by name (`MachineFacts`)."""
    probed = machine.probed()
    table = machine.texts("nvidia-smi")
    row = _row(machine)
    wheels = probed.get("packages") or _wheels(machine)
    debian = packages(machine)
    runtime = probed.get("onnxruntime") or _runtime(machine, wheels)
    cuda = probed.get("cuda") or {}
    problem = _FAILURES.search(machine.texts(r"nvidia-smi|docker"))
    gpus = _gpus(machine, row, cuda)
    return {
        "gpus": gpus,
        "cards": _cards(machine),
        "gpu_devices": tuple(str(node) for node in gpu_nodes(machine.root / "dev")),
        "gpu_memory_bytes": _memory(row, table),
        "compute": cuda.get("compute")
        or _first(r"^(\d{1,3}\.\d)$", row.get("compute", ""))
        or _compute_of(gpus),
        "driver": _driver(machine, row, table),
        "driver_cuda": _first(r"CUDA Version:\s*([\d.]+)", table) or cuda.get("cuda of the driver"),
        "gpu_problem": problem[0].strip() if problem else _failed_tool(machine),
        "mig": _is_divided(row, table),
        "cuda": cuda.get("cuda") or _cuda(machine, debian, wheels),
        "cuda_problem": probed.get("cuda_problem") if probed else _cuda_problem(machine),
        "tensorrt": probed.get("tensorrt")
        or (wheels or {}).get("tensorrt")
        or machine.find(r"^(\d+\.\d+[\d.]*)$", rf"(?:{_PYTHON}).*tensorrt"),
        "tensorrt_libraries": _tensorrt_libraries(machine, debian),
        "tensorrt_problem": probed.get("tensorrt_problem")
        or (NO_TENSORRT if machine.find(r"(TensorRT: Not installed)", _STATS) else None),
        "onnxruntime": runtime.get("version"),
        "onnxruntime_providers": _as_tuple(runtime.get("providers")),
        "onnxruntime_problem": (runtime.get("problem") or probed.get("onnxruntime_problem"))
        if (wheels or {}).keys() & {"onnxruntime", "onnxruntime-gpu"}
        else None,
        "packages": wheels,
        "absent": probed.get("absent"),
    }


def slowed_by(machine: Machine) -> tuple[str, ...]:
    """Return the reasons for which a card's clocks are lower than they could be."""
    row, bits = _row(machine), 0
    with suppress(ValueError):
        bits = int(row.get("reasons", "0"), 16)
    reasons = [reason for bit, reason in _REASONS.items() if bits & bit]
    reasons += [f"{each} slowdown" for each in _SLOWDOWN.findall(machine.texts("nvidia-smi"))]
    return tuple(f"GPU: {reason}" for reason in reasons)


def _row(machine: Machine) -> dict[str, str]:
    """Return the columns of the first GPU in a query of nvidia-smi, under our names."""
    names = {
        "name": "name", "gpu_name": "name", "driver_version": "driver", "memory.total": "memory",
        "compute_cap": "compute", "clocks_throttle_reasons.active": "reasons",
        "clocks_event_reasons.active": "reasons", "mig.mode.current": "mig",
    }  # fmt: skip
    for line, output in machine.listed(r"nvidia-smi .*--query-gpu="):
        query = re.search(r"--query-gpu=(\S+)", line)
        if query is None or output.status != 0:
            continue
        columns = query[1].split(",")
        for text in output.text.splitlines():
            values = [value.strip() for value in text.split(",")]
            if len(values) == len(columns) and values[0] not in columns:
                row = dict(zip(columns, values, strict=True))
                return {
                    names[key]: value
                    for key, value in row.items()
                    if key in names and not value.startswith("[")
                }
    return {}


def _gpus(machine: Machine, row: Mapping[str, str], cuda: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the GPUs, of the source that knows most of them."""
    table = machine.texts("nvidia-smi")
    listed = re.findall(r"^GPU \d+: (.+?)(?: \(UUID.*)?$", table, re.MULTILINE)
    rows = re.findall(r"^\|\s+\d+\s+(\S.*?)\s+(?:On|Off|N/A)\s*\|", table, re.MULTILINE)
    cards = re.findall(
        r"(?:VGA compatible|3D|Display) controller(?: \[\d+\])?: (NVIDIA .+?)(?: \(rev.*)?$",
        machine.texts("lspci"),
        re.MULTILINE,
    )
    named = [name for name in (row.get("name"), cuda.get("gpu"), host.gpu(machine.root)) if name]
    return tuple(next((names for names in (listed, rows, named[:1], cards) if names), ()))


def _compute_of(gpus: tuple[str, ...]) -> str | None:
    """Return the compute capability of the first GPU, by its name."""
    name = gpus[0] if gpus else ""
    return next((compute for words, compute in _COMPUTE if re.search(words, name)), None)


def _cards(machine: Machine) -> int | None:
    """Return the number of NVIDIA's display controllers on the PCI bus; None: unknown."""
    devices = list((machine.root / "sys/bus/pci/devices").glob("*"))
    if not devices:
        return None
    return sum(
        host.text(device / "vendor") == "0x10de"
        and (host.text(device / "class") or "").startswith("0x03")
        for device in devices
    )


def _failed_tool(machine: Machine) -> str | None:
    """Return that nvidia-smi crashed, or what a shell says if it is missing, in a recording."""
    for output in machine.outputs("nvidia-smi"):
        if output.status is not None and output.status < 0:
            return f"nvidia-smi was ended by signal {-output.status}"
        if output.status == _NO_COMMAND or re.search(r"(?:command )?not found", output.text):
            return output.text.strip() or "nvidia-smi: not found"
    return None


def _memory(row: Mapping[str, str], table: str) -> int | None:
    text = row.get("memory") or _first(r"\d+MiB /\s*(\d+MiB)", table)
    match = re.match(r"(\d+)", text or "")
    return int(match[1]) * _MIB if match else None


def _is_divided(row: Mapping[str, str], table: str) -> bool | None:
    """Return whether the first GPU is divided into instances; None: the readings do not tell."""
    stated = row.get("mig") or _first(r"\|\s+(Enabled|Disabled)\s*\|", table)
    return None if stated not in ("Enabled", "Disabled") else stated == "Enabled"


def _driver(machine: Machine, row: Mapping[str, str], table: str) -> str | None:
    version = host.text(machine.root / "proc/driver/nvidia/version") or ""
    return (
        row.get("driver")
        or _first(r"Driver Version:\s*(\d+[\d.]*)", table)
        or _first(r"(?:x86_64|aarch64|Module) +(\d{3}\.[\d.]+)", version)
    )


def _cuda(
    machine: Machine, debian: Mapping[str, str], wheels: Mapping[str, str] | None
) -> str | None:
    """Return the version of the CUDA toolkit or runtime, in two numbers or more."""
    compiler = machine.find(r"release (\d+\.\d+)", r".*nvcc")
    if compiler is not None:
        return compiler
    if stated := machine.find(r"CUDA: (\d[\d.]*)", _STATS):
        return stated
    version = host.text(machine.root / "usr/local/cuda/version.json") or ""
    if match := re.search(r'"CUDA SDK",\s*"version"\s*:\s*"([\d.]+)"', version):
        return match[1]
    for name in debian:
        if match := re.match(r"cuda-(?:cudart|toolkit|runtime)-(\d+)-(\d+)$", name):
            return f"{match[1]}.{match[2]}"
    return None


def _cuda_problem(machine: Machine) -> str | None:
    """Return why CUDA cannot be used, by what a recording shows."""
    if machine.find(r"(CUDA: Not installed)", _STATS):
        return NO_CUDA
    others = machine.texts(r"(?!nvidia-smi)")  # any program may say so
    missing = re.search(
        r"(lib(?:cu|nvinfer|nvrtc)\w*\.so[.\d]*): cannot open shared object file", others
    )
    if missing:
        return f"{missing[1]} is missing"
    failed = re.search(
        r"(?:cudaErrorNoDevice|no CUDA-capable device|CUDA (?:failure|error|driver version)).*",
        others,
    )
    if failed:
        return failed[0].strip()
    if re.search(r"NVRM:.*(?:Assertion failed|failed|Xid)", machine.texts("dmesg|journalctl")):
        return "the kernel's log has failures of NVIDIA's driver (NVRM)"
    return None


def _tensorrt_libraries(machine: Machine, debian: Mapping[str, str]) -> str | None:
    for name, version in sorted(debian.items()):
        if re.fullmatch(r"python3-libnvinfer|libnvinfer\d+|tensorrt|nvidia-tensorrt", name):
            return version.partition("-")[0].partition("+")[0]
    return machine.find(r"TensorRT: (\d[\d.]*)", _STATS)


def _wheels(machine: Machine) -> dict[str, str] | None:
    """Return the wheels that a recording lists; None if it lists none."""
    text = machine.texts(_PIP)
    if not text:
        return None
    listed = re.findall(r"^([A-Za-z][\w.-]+)(?:==|\s+)(\d[\w.+]*)", text, re.MULTILINE)
    listed += re.findall(r"^Name: (\S+)\nVersion: (\S+)", text, re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in listed}


def _runtime(machine: Machine, wheels: Mapping[str, str] | None) -> dict[str, Any]:
    """Return version and providers of ONNX Runtime, by what a recording shows."""
    facts: dict[str, Any] = {}
    for wheel in ("onnxruntime-gpu", "onnxruntime"):
        if wheels and wheel in wheels:
            facts["version"] = wheels[wheel]
            break
    text = machine.texts(r".*(?:onnxruntime|ort)\b")
    for _, output in machine.listed(rf"(?:{_PYTHON}).*onnxruntime"):
        lines = output.text.strip().splitlines()
        if output.status and "No module named" not in output.text:
            facts["problem"] = f"{lines[-1] if lines else ''} (exit code {output.status})".strip()
    providers = re.search(r"\[[^\]]*ExecutionProvider[^\]]*\]", text)
    if providers:
        facts["providers"] = re.findall(r"\w+ExecutionProvider", providers[0])
    return facts


def _as_tuple(values: list[str] | None) -> tuple[str, ...] | None:
    return None if values is None else tuple(values)


def _first(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None
