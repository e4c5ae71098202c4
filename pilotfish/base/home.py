"""The user's folders, by the XDG base directory specification.

A process may have no home: ``env -i``, s6, runit and containers may start it without ``HOME``, with
a uid that has no passwd entry.
"""

import os
import pwd
from pathlib import Path


def home() -> Path | None:
    """Return the user's home; None: neither ``HOME`` nor the passwd file names one."""
    if named := os.environ.get("HOME"):
        return Path(named)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return None


def user_folder(variable: str, below_home: str) -> Path | None:
    """Return the folder that an XDG variable names, else its default; None without a home.

    variable: the variable's name, such as ``XDG_CACHE_HOME``; a relative path in it is ignored, as
    the specification demands. below_home: the default's path below the home, such as ``.cache``.
    """
    named = os.environ.get(variable, "")
    if os.path.isabs(named):
        return Path(named)
    base = home()
    return None if base is None else base / below_home
