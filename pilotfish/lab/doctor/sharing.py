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

_WORD = r"(?<![\w.-]){}(?![\w-])"
# Paths below these folders are the same on every machine.
_PUBLIC = (
    *("usr", "etc", "proc", "sys", "dev", "boot", "bin", "sbin", "lib", "run", "opt/pilotfish"),
    *("var/lib/pilotfish", "var/cache/pilotfish", "var/lib/nvpmodel"),
)
_PATH = re.compile(rf"(?<![\w./])/(?!(?:{'|'.join(_PUBLIC)})\b)[\w./@+~-]*\w")
_PATTERNS = (
    (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b"), "<address>"),
    (re.compile(r"\b(?:[a-z]+)://[^\s'\"”)]+"), "<address>"),
    (re.compile(r"(?i)\b(?:serial|s/n|uuid)(?: number)?[:= ]+\S+"), "<serial>"),
    (re.compile(r"\b(?:GPU-)?[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b"), "<serial>"),
    (re.compile(r"\b[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}\b"), "<address>"),
    (re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}(?![\w:])"), "<address>"),
    (re.compile(r"(?<![\w:.])[0-9a-fA-F:]*::[0-9a-fA-F:]*[0-9a-fA-F](?![\w:])"), "<address>"),
    (re.compile(r"\bpf1_\S+"), "<key>"),
    (re.compile(r"(?<![\w.-])(?=\S*\d)[!-~]{40}(?![!-~])"), "<key>"),  # a key of CURVE, in Z85
    (re.compile(r"(?<![\w/.-])(?=\w*\d)[A-Za-z0-9+/_-]{32,}={0,2}"), "<key>"),
)  # fmt: skip
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

    results: JSON values; strings in them are scrubbed (`scrub`).
    """
    scrubbed = scrub(results)
    text = json.dumps(scrubbed, ensure_ascii=False, separators=(",", ":"))
    lines = "\n".join(_break(text))
    return f"<details><summary>{title}</summary>\n\n```json\n{lines}\n```\n\n</details>\n"


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
    for pattern, word in _PATTERNS[:2]:
        text = pattern.sub(word, text)
    text = _PATH.sub("<path>", text)
    if names is not None:
        text = names.sub("<name>", text)
    for pattern, word in _PATTERNS[2:]:
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
