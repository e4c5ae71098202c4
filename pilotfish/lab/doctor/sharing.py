"""One block for an issue: the results without what could name people, machines or places.

What is removed: names of this host and its users, home folders and other private paths, addresses
of networks and mail, keys, serial numbers and other long identifiers. Versions stay, although some
look like addresses: those that the facts name are kept.
"""

from __future__ import annotations

import getpass
import json
import os
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pilotfish.base.home import home

_MODEL = ("provider", "model", "precision", "dialect")  # keys of a check's result
_WORD = r"(?<![\w.-]){}(?![\w-])"
# Paths below these folders are the same on every machine.
_PUBLIC = (
    *("usr", "etc", "proc", "sys", "dev(?!/disk)", "boot", "bin", "sbin", "lib", "opt/pilotfish"),
    *("var/lib/pilotfish", "var/cache/pilotfish", "var/lib/nvpmodel", "run/systemd"),
)
_PRIVATE = rf"/(?!(?:{'|'.join(_PUBLIC)})(?![\w-])(?!\S*/\.\.))"
_PATTERNS = (
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b"), "<address>"),
    (re.compile(r"\b(?:[a-z]+)://[^\s'\"”)]+"), "<address>"),
    (re.compile(rf"(?<=['\"“`]){_PRIVATE}[^'\"”`\n]*(?=['\"”`])"), "<path>"),
    # a folder's name may have spaces: what goes on with a slash is of the path
    (re.compile(rf"(?<![\w./]){_PRIVATE}[\w./@+~-]*\w(?: +[\w.@+~-]+/[\w./@+~-]*\w)*"), "<path>"),
    (re.compile(r"\b[A-Za-z]:\\[^\s'\"]+"), "<path>"),
)  # fmt: skip
# The same that are sought after the names, which may be parts of these.
_LATER_PATTERNS = (
    (re.compile(r"(?i)\b(?:serial|s/n|uuid)(?: number)?[:= ]+\S+"), "<serial>"),
    (re.compile(r"\b(?:GPU-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<serial>"),
    (re.compile(r"(?<![\w.-])\d{13,}(?![\w.-])"), "<serial>"),
    (re.compile(r"\b[0-9a-fA-F]{2}(?:[:-][0-9a-fA-F]{2}){5}\b"), "<address>"),
    (re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}(?![\w:])"), "<address>"),
    (re.compile(r"(?<![\w:.])[0-9a-fA-F:]*::[0-9a-fA-F:]*[0-9a-fA-F](?![\w:])"), "<address>"),
    # a host with a port, not a line of a file; and a host with a common domain
    (re.compile(r"(?<![\w.-])(?=\S*[A-Za-z])[\w-]+(?:\.[\w-]+)+(?<!\.py):\d{2,5}\b"), "<address>"),
    (re.compile(r"(?i)(?<![\w.-])[\w-]+(?:\.[\w-]+)*\.(?:local|lan|home|internal|corp|com|net|org|io)"
                r"(?![\w.-]*\w)"), "<address>"),
    (re.compile(r"\bpf1_\S+"), "<key>"),
    (re.compile(r"\b(?:hf_|gh[pousr]_|sk-|AAAA)[\w+/=-]{6,}"), "<key>"),
    (re.compile(r"(?i)\b(?:token|password|passwd|secret)[:=] *\S+"), "<key>"),
    (re.compile(r"(?<![\w.-])(?=\S*\d)[!-~]{40}(?![!-~])"), "<key>"),  # a key of CURVE, in Z85
    (re.compile(r"(?<![\w/.-])(?=\w*\d)[A-Za-z0-9+/_-]{32,}={0,2}"), "<key>"),
)  # fmt: skip
_MOST_LETTERS = 2000  # a longer string is cut off
_MOST_BLOCK = 60_000  # letters: an issue may have 65,536, and the reporter writes some, too
# Names of hosts and users that name nobody, and that other texts contain.
_COMMON = frozenset(
    {"root", "localhost", "pilotfish", "user", "nvidia", "ubuntu", "debian", "linux", "jetson"}
    | {"orin", "thor", "nano", "xavier", "agx", "vm", "device", "edge", "server", "board", "admin"}
    | {"raspberrypi", "tegra-ubuntu", "laptop", "desktop", "home", "tegra", "rtx", "cpu", "gpu"}
)
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\d)")
_VERSION = re.compile(r"\d[\w.+~:-]{0,40}")
_VERSION_KEYS = re.compile(
    r"version|packages|driver|cuda|tensorrt|onnxruntime|l4t|jetpack|kernel|python|system|pilotfish"
)


def shared_block(results: Mapping[str, Any], title: str) -> str:
    """Return the results as one block of Markdown that fits into an issue.

    results: JSON values; strings in them are scrubbed (`scrub`). Of the checks that passed only
    their names remain, and what does not fit into an issue is left out.
    """
    findings = results.get("findings")
    if isinstance(findings, list):
        results = dict(results) | {"findings": _shortened(findings)}
    lines = "\n".join(_break(_json(_fitting(scrub(results)))))
    return f"<details><summary>{title}</summary>\n\n```json\n{lines}\n```\n\n</details>\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _shortened(findings: list[Any]) -> list[Any]:
    """Return the results of checks: the others first, then a row for what passed of a model."""
    others: list[Any] = []
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for each in findings:
        if not isinstance(each, Mapping) or each.get("status") != "passed":
            others.append(each)
            continue
        model = {name: str(each.get(name, "")) for name in _MODEL}
        row = rows.setdefault(tuple(model.values()), model | {"passed": "", "of_tolerance": 0.0})
        row["passed"] = f"{row['passed']} {each.get('check', '')}".strip()
        with suppress(KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
            used = float(each["difference"]) / float(each["tolerance"])
            row["of_tolerance"] = max(row["of_tolerance"], round(used, 4))
    return [*others, *rows.values()]


def _fitting(results: dict[str, Any]) -> dict[str, Any]:
    """Leave out the last findings if the results are too long for an issue."""
    findings = results.get("findings")
    left = _MOST_BLOCK - len(_json(results | {"findings": []}))
    if not isinstance(findings, list) or len(_json(findings)) <= left:
        return results
    fitting: list[Any] = []
    for each in findings:
        left -= len(_json(each)) + 1
        if left < 0:
            break
        fitting.append(each)
    return results | {"findings": fitting, "findings_left_out": len(findings) - len(fitting)}


def scrub(results: Any) -> Any:
    """Return JSON values without what could name people, machines or places."""
    names = _private_names()
    versions = frozenset(_versions(results))
    return _scrub(results, names, versions)


def _scrub(value: Any, names: re.Pattern[str] | None, versions: frozenset[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            _clean(str(key), names, versions): _scrub(each, names, versions)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_scrub(each, names, versions) for each in value]
    return _clean(value, names, versions) if isinstance(value, str) else value


def _clean(text: str, names: re.Pattern[str] | None, versions: frozenset[str]) -> str:
    if text in versions:
        return text
    if len(text) > _MOST_LETTERS:
        text = text[:_MOST_LETTERS] + "…"
    for pattern, word in _PATTERNS:
        text = pattern.sub(word, text)
    if names is not None:
        text = names.sub("<name>", text)
    for pattern, word in _LATER_PATTERNS:
        text = pattern.sub(word, text)
    return _ADDRESS.sub(lambda match: match[0] if match[0] in versions else "<address>", text)


def _private_names() -> re.Pattern[str] | None:
    """Return a pattern of this host's and this user's names; None: they have none."""
    names = {platform.node(), platform.node().partition(".")[0]}
    names |= {os.environ.get(key, "") for key in ("USER", "LOGNAME", "SUDO_USER", "HOSTNAME")}
    with suppress(OSError, KeyError, ImportError):
        names.add(getpass.getuser())
    folder = home()
    names |= {folder.name} if folder is not None else set()
    names = {name for name in names if len(name) > 1 and name.lower() not in _COMMON}
    if not names:
        return None
    listed = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return re.compile(_WORD.format(f"(?:{listed})"), re.IGNORECASE)


def _versions(value: Any, key: str = "") -> Iterator[str]:
    """Yield the strings under keys that name versions."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from _versions(each, f"{key}.{name}")
    elif isinstance(value, str) and _VERSION_KEYS.search(key) and _VERSION.fullmatch(value):
        yield value


def _break(text: str, width: int = 110) -> Iterator[str]:
    """Yield JSON in lines of about this width; it stays JSON."""
    line = ""
    for part in re.findall(r'(?:"(?:[^"\\]|\\.)*"|[^,"])+,?', text):
        if line and len(line) + len(part) > width:
            yield line
            line = ""
        line += part
    if line:
        yield line
