"""The terminal that a process was started on: SIGHUP means stop once it is closed."""

import os
import sys


class Terminal:
    """The terminal of stderr, as it was when the object was made, if there was one."""

    def __init__(self) -> None:
        self._existed = sys.stderr.isatty()

    @property
    def closed(self) -> bool:
        """Whether there was a terminal and it has been closed since."""
        return self._existed and not os.isatty(2)
