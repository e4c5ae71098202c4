"""Compare two versions in the order of PEP 440, without a library.

Standard library only: this runs on the board before anything is installed.
"""

import re
from typing import Any

_FORM = re.compile(
    r"((?P<epoch>\d+)!)?(?P<release>\d+(\.\d+)*)"
    r"(\.?(?P<pre>alpha|a|beta|b|preview|pre|rc|c)\.?(?P<pre_number>\d*))?"
    r"(\.?(?P<post>post|rev|r)\.?(?P<post_number>\d*))?"
    r"(\.?(?P<dev>dev)\.?(?P<dev_number>\d*))?"
    r"(\+(?P<local>[a-z0-9]+(\.[a-z0-9]+)*))?",
    re.ASCII,
)
_FIRST, _LAST = (-1,), (1,)  # sort before and after every key (0, …)


def is_older(version: str, than: str) -> bool | None:
    """Return whether ``version`` precedes ``than``; None if either is not a PEP 440 version."""
    keys = [_key(text) for text in (version, than)]
    return None if None in keys else keys[0] < keys[1]


def _key(version: str) -> Any:
    match = _FORM.fullmatch(version.lower())
    if match is None:
        return None
    release = [int(part) for part in match["release"].split(".")]
    while release and release[-1] == 0:
        release.pop()
    pre: tuple[Any, ...] = _LAST
    if match["pre"]:
        kind = "r" if match["pre"] in ("c", "pre", "preview") else match["pre"][0]
        pre = (0, kind, int(match["pre_number"] or 0))
    elif match["dev"] and not match["post"]:
        pre = _FIRST  # 1.0.dev1 comes before 1.0a1
    post = (0, int(match["post_number"] or 0)) if match["post"] else _FIRST
    dev = (0, int(match["dev_number"] or 0)) if match["dev"] else _LAST
    parts = match["local"].split(".") if match["local"] else []
    local = [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in parts]
    return int(match["epoch"] or 0), release, pre, post, dev, local
