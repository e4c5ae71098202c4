"""Print an examination for people."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from pilotfish.boards.board import GIB
from pilotfish.lab.doctor.examination import Diagnosis, Examination
from pilotfish.lab.doctor.facts import MachineFacts
from pilotfish.lab.doctor.finding import SEVERITIES, Finding
from pilotfish.lab.doctor.outlook import Expects, ProviderOutlook

MARKS = {"fault": "✗", "warning": "!", "note": "·"}
_STYLES = {"fault": "bold red", "warning": "yellow", "note": "dim"}
_WIDTH = 16  # width of the first column


def show(diagnosis: Diagnosis, console: Console, seconds: float | None = None) -> None:
    """Print an examination. seconds: how long it took; None: it was read from a recording."""
    examination = diagnosis.examination
    for name, text in [*_machine(examination.machine), *_outlook(diagnosis)]:
        console.print(f"{name:<{_WIDTH}}", style="bold", markup=False, end="")
        console.print(_printable(text), markup=False, soft_wrap=True)
    console.print()
    show_findings(examination.findings, console)
    took = "" if seconds is None else f" ({seconds:.1f} s)"
    console.print(f"{count(examination)}{took}", style="bold")


def show_findings(findings: tuple[Finding, ...], console: Console) -> None:
    """Print the findings, each with the command that mends it."""
    for finding in findings:
        console.print(MARKS[finding.severity], style=_STYLES[finding.severity], end=" ")
        console.print(f"[bold]{finding.subject}[/bold]: ", end="")
        console.print(_printable(finding.message), markup=False, soft_wrap=True)
        if finding.mend is not None:
            console.print(f"  mend: {_printable(finding.mend)}", markup=False, soft_wrap=True)


def count(examination: Examination) -> str:
    """Return how many findings there are, in words."""
    numbers = {
        name: sum(each.severity == name for each in examination.findings) for name in SEVERITIES
    }
    listed = [f"{number} {name}{'s' * (number > 1)}" for name, number in numbers.items() if number]
    recorded = examination.machine.pilotfish is None
    nothing = f"Nothing is wrong{' in what is shown' * recorded}."
    return f"{', '.join(listed)}." if listed else nothing


def _printable(text: str) -> str:
    """Return a text without what could move the terminal's cursor."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _machine(facts: MachineFacts) -> Iterator[tuple[str, str]]:
    """Yield a line for each part of the machine of which something is known."""
    rows: dict[str, list[str | None]] = {
        "board": [
            facts.board,
            facts.module,
            f"--board {facts.board_name}" if facts.board_name else None,
        ],
        "system": [
            facts.jetpack and f"JetPack {facts.jetpack}",
            facts.l4t and f"L4T {facts.l4t}",
            facts.system,
            facts.kernel and f"kernel {facts.kernel}",
            facts.machine,
            facts.container and f"in {facts.container}",
        ],
        "CPU": [
            facts.cpu,
            _number(facts.cpus, "CPU"),
            None if facts.cpu_quota is None else f"quota {facts.cpu_quota:g}",
            facts.governor and f"governor {facts.governor}",
            facts.power_mode and f"power mode {facts.power_mode}",
        ],
        "heat": [_heat(facts), *facts.throttled],
        "memory": [
            _size(facts.memory_bytes),
            f"{_size(facts.available_bytes)} free" if facts.available_bytes else None,
            None if facts.swap_bytes is None else _swap(facts),
            facts.huge_pages and f"huge pages {facts.huge_pages}",
        ],
        "disk": [f"{each.path}: {_size(each.free_bytes)} free" for each in facts.disks],
        "GPU": [
            *facts.gpus,
            _size(facts.gpu_memory_bytes),
            facts.compute and f"compute capability {facts.compute}",
            facts.driver and f"driver {facts.driver}",
            facts.driver_cuda and f"for CUDA {facts.driver_cuda}",
        ],
        "libraries": [
            facts.cuda and f"CUDA {facts.cuda}",
            facts.tensorrt and f"TensorRT {facts.tensorrt}",
            facts.tensorrt_libraries and f"TensorRT's libraries {facts.tensorrt_libraries}",
            facts.onnxruntime and f"ONNX Runtime {facts.onnxruntime}",
            *(_packages(facts)),
        ],
        "Python": [facts.python, facts.pilotfish and f"pilotfish {facts.pilotfish}"],
        "systemd": [facts.systemd, *(f"{each.name} {each.state}" for each in facts.units)],
        "clock": [facts.time, _synchronised(facts)],
        "limits": [
            facts.open_files and "{} open files (at most {})".format(*facts.open_files),
            facts.encoding and f"encoding {facts.encoding}",
        ],
        "not read": list(facts.unread),
    }
    for name, parts in rows.items():
        if texts := [part for part in parts if part]:
            yield name, ", ".join(texts)


def _packages(facts: MachineFacts) -> Iterator[str]:
    """Yield the wheels that no other fact names."""
    for name, version in (facts.packages or {}).items():
        if name.startswith(("tensorrt-rtx", "onnxruntime-gpu", "numpy")):
            yield f"{name} {version}"


def _outlook(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Yield what will run, and how fast."""
    expects = diagnosis.examination.expects
    runs = [each.name for each in expects.providers if each.works]
    yield "can run", ", ".join(runs) or "nothing is known to"
    for each in expects.providers:
        if not each.works:
            yield f"  {each.name}", _reason(each)
    yield "model", _model(expects)
    for line in diagnosis.lines:
        name, _, text = line.partition(": ")
        yield f"  {name}", text


def _reason(outlook: ProviderOutlook) -> str:
    return f"{'unknown' if outlook.works is None else 'no'}: {outlook.reason}"


def _model(expects: Expects) -> str:
    if expects.provider is None:
        provider = "which provider will run it is unknown"
    else:
        provider = f"will run on {expects.provider}"
    source = "nothing is configured" if expects.source is None else expects.source
    form = f"{expects.model}, "
    form += (
        "no artifact yet" if expects.dialect is None else f"{expects.dialect} {expects.precision}"
    )
    advice = f"; for this board: {expects.advice}" if expects.advice else ""
    return f"{form} ({source}): {provider}{advice}"


def _heat(facts: MachineFacts) -> str | None:
    if not facts.temperatures:
        return None
    sensor = max(facts.temperatures, key=lambda name: facts.temperatures[name])
    limit = facts.throttles_at.get(sensor)
    return f"{sensor} {facts.temperatures[sensor]:.0f} °C" + (
        f" (slows down at {limit:.0f})" if limit else ""
    )


def _swap(facts: MachineFacts) -> str:
    zram = f" ({_size(facts.zram_bytes)} of it zram)" if facts.zram_bytes else ""
    return f"swap {_size(facts.swap_bytes)}{zram}" if facts.swap_bytes else "no swap"


def _synchronised(facts: MachineFacts) -> str | None:
    if facts.time_synchronised is None:
        return None
    return f"{'' if facts.time_synchronised else 'not '}synchronised"


def _number(count_: int | None, word: str) -> str | None:
    return None if count_ is None else f"{count_} {word}{'s' * (count_ > 1)}"


def _size(size: int | None) -> str | None:
    if size is None:
        return None
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"
