"""The command that installs an extra of this package from its own source, without an index."""

import json
import shlex
from functools import cache
from importlib import metadata
from typing import Any
from urllib.parse import unquote

_PACKAGE = "pilotfish"


def install_command(extra: str) -> str:
    """Return a command that installs an extra, such as ``pip install -e '/src/pilotfish[cpu]'``.

    If the source of this installation is unknown, the command assumes a checkout.
    """
    url, editable = _origin()
    if not url:
        return f"pip install '.[{extra}]' in a checkout of Pilotfish"
    if url.startswith("file://") and not url.endswith((".whl", ".tar.gz", ".zip")):
        folder = f"{unquote(url.removeprefix('file://'))}[{extra}]"
        return f"pip install {'-e ' if editable else ''}{shlex.quote(folder)}"
    return f"pip install {shlex.quote(f'{_PACKAGE}[{extra}] @ {url}')}"


@cache
def _origin() -> tuple[str, bool]:
    """Return the installed source's URL ("": unknown), and whether it is editable (PEP 610)."""
    for distribution in metadata.distributions(name=_PACKAGE):
        if text := distribution.read_text("direct_url.json"):
            try:
                record = json.loads(text)
                return _location(record), bool(record.get("dir_info", {}).get("editable"))
            except (ValueError, LookupError, TypeError, AttributeError):
                continue
    return "", False


def _location(record: dict[str, Any]) -> str:
    """Return the URL of a record of PEP 610 in pip's form, such as ``git+https://…@COMMIT``."""
    url = str(record["url"])
    if repository := record.get("vcs_info"):
        url = f"{repository['vcs']}+{url}@{repository['commit_id']}"
    below = record.get("subdirectory")
    return f"{url}#subdirectory={below}" if below else url
