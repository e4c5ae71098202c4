"""Print the results of the self-test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from pilotfish.lab.selftest.check_result import CheckResult
from pilotfish.lab.selftest.protocols import LOSSLESS
from pilotfish.lab.selftest.running import SelfTest
from pilotfish.lab.selftest.timing import CONTEXT_TOKENS, SIZES
from pilotfish.lab.selftest.worker import CHECKED

MARKS = {"passed": "✓", "differs": "≠", "failed": "✗", "left out": "–", "not there": "·"}
LEGEND = "✓ as on the CPU   ≠ differs   ✗ failed   – left out   · not there"
_MACHINE = ("board", "cpu", "cpus", "gpu", "l4t", "power_mode", "kernel", "machine")


def show(report: SelfTest, console: Console, file: str | None) -> None:
    """Print all results. file: path of the JSON file with the same results, if there is one."""
    for line in _machine(report):
        console.print(line, markup=False)
    for provider, presence in report.providers.items():
        console.print()
        if not presence.there:
            console.print(f"[bold]{provider}[/bold]: not there: ", end="")
            console.print(presence.reason, markup=False)
            continue
        results = [each for each in report.findings if each.provider == provider]
        console.print(_table(provider, results))
        for line in [*_protocols(results), *_largest(results), *_problems(results)]:
            console.print(line, markup=False)
    if report.times:
        console.print()
        console.print(_times(report))
        if report.machine["load"] > report.machine["cpus"] / 2:
            console.print(
                f"other programs used the machine (load {report.machine['load']:g} on "
                f"{report.machine['cpus']} cores): these times may be too long",
            )
    console.print()
    for line in report.left_out:
        console.print(f"left out: {line}", markup=False)
    console.print(f"{LEGEND}   ({report.seconds:.0f} s)")
    console.print(_verdict(report), style="bold")
    if file:
        console.print(
            f"Please send us {file}, above all from a GPU or a Jetson board: the file has the "
            "versions, the hardware and these results.",
            markup=False,
        )


def _machine(report: SelfTest) -> Iterator[str]:
    facts = report.machine
    packages = facts.get("packages", {})
    yield ", ".join(
        [f"pilotfish {facts['pilotfish']}", f"Python {facts['python']}"]
        + [f"{name} {version}" for name, version in packages.items()]
    )
    yield ", ".join(f"{name} {facts[name]}" for name in _MACHINE if name in facts)
    for provider, presence in report.providers.items():
        if presence.machine:
            listed = ", ".join(f"{name} {value}" for name, value in presence.machine.items())
            yield f"{provider}: {listed}"


def _table(provider: str, findings: Sequence[CheckResult]) -> Table:
    """Make a provider's table, with a row for each artifact and a column for each check."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(provider, no_wrap=True)
    for check in CHECKED:
        table.add_column("open" if check == CHECKED[0] else check, justify="center", no_wrap=True)
    rows: dict[str, dict[str, str]] = {}
    for each in findings:
        name = f"{each.model} {each.dialect} {each.precision}"
        rows.setdefault(name, {})[each.check] = MARKS[each.status]
    for name, marks in rows.items():
        table.add_row(name, *(marks.get(check, "") for check in CHECKED))
    return table


def _protocols(findings: Sequence[CheckResult]) -> Iterator[str]:
    results = [each for each in findings if each.check in LOSSLESS]
    for model in dict.fromkeys(each.model for each in results):
        marks = [f"{each.check} {MARKS[each.status]}" for each in results if each.model == model]
        yield f"both ends, {model}, the same tokens as stream: {', '.join(marks)}"


def _largest(findings: Sequence[CheckResult]) -> Iterator[str]:
    """Yield a line for each precision, with the largest difference that passed."""
    passed = [each for each in findings if each.status == "passed" and each.difference is not None]
    for precision in dict.fromkeys(each.precision for each in passed):
        results = [each for each in passed if each.precision == precision]
        most = max(results, key=lambda each: each.difference or 0.0)
        yield (
            f"{precision}: largest difference {most.difference:.1e} of a row's norm "
            f"({most.model}, {most.check}); {most.tolerance:g} is allowed"
        )


def _problems(findings: Sequence[CheckResult]) -> Iterator[str]:
    """Yield a line for each check that did not pass.

    Merge a model's "not there" checks into one line.
    """
    absent = {(each.model, each.check): each for each in findings if each.status == "not there"}
    for each in absent.values():
        yield f"{MARKS[each.status]} {each.model}, {each.check}: {each.reason}"
    for each in findings:
        if each.status in ("passed", "not there"):
            continue
        size = ""
        if each.difference is not None:
            size = f" by {each.difference:.2g} of a row's norm ({each.tolerance:g} is allowed)"
        reason = ": ".join(filter(None, (each.where, each.reason)))
        name = f"{each.model} {each.dialect} {each.precision}, {each.check}"
        yield f"{MARKS[each.status]} {name} {each.status}{size}: {reason}"


def _times(report: SelfTest) -> Table:
    title = f"median ms of a pass over S tokens, after {CONTEXT_TOKENS} tokens"
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column(title)
    for size in SIZES:
        table.add_column(f"S = {size}", justify="right")
    for each in report.times:
        name = f"{each['provider']}: {each['model']} {each['dialect']} {each['precision']}"
        table.add_row(name, *(f"{each['median_ms'][str(size)]:.2f}" for size in SIZES))
    return table


def _verdict(report: SelfTest) -> str:
    counts = dict.fromkeys(MARKS, 0)
    for each in report.findings:
        counts[each.status] += 1
    text = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{'Nothing differs' if report.passed else 'SOMETHING DIFFERS'}: {text}."
