"""How to install an extra of this package, where it came from: no index need have it."""

import json
import shlex
from functools import cache
from importlib import metadata

_PACKAGE = "pilotfish"


def installing(extra: str) -> str:
    """Return a command that installs an extra, such as ``pip install -e '/src/pilotfish[cpu]'``.

    Where it is not known what this installation was made of, the command is for a checkout.
    """
    url, editable = _origin()
    if not url:
        return f"pip install '.[{extra}]' in a checkout of Pilotfish"
    if url.startswith("file://") and not url.endswith((".whl", ".tar.gz", ".zip")):
        folder = f"{url.removeprefix('file://')}[{extra}]"
        return f"pip install {'-e ' if editable else ''}{shlex.quote(folder)}"
    return f"pip install {shlex.quote(f'{_PACKAGE}[{extra}] @ {url}')}"


@cache
def _origin() -> tuple[str, bool]:
    """Return the URL that pip installed from ("": unknown) and whether it is editable: PEP 610."""
    for found in metadata.distributions(name=_PACKAGE):
        if text := found.read_text("direct_url.json"):
            try:
                known = json.loads(text)
                return str(known["url"]), bool(known.get("dir_info", {}).get("editable"))
            except (ValueError, LookupError, TypeError, AttributeError):
                continue
    return "", False
