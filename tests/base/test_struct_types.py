"""Types of structs that several threads meet first at the same time."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from pilotfish.base.settings import converted

sys.setswitchinterval(1e-6)
VALUES = {"count": 1, "share": 0.5, "name": "a", "sizes": [1], "options": {}, "words": ["b"]}
KINDS = {
    "count": Annotated[int, msgspec.Meta(ge=0)], "share": float | None, "name": str,
    "sizes": list[int], "options": dict[str, Any], "words": Sequence[str],
}
for number in range(200):
    kind = msgspec.defstruct(f"Kind{number}", list(KINDS.items()))
    together = threading.Barrier(4)

    def convert():
        together.wait()
        assert converted(VALUES, kind).count == 1

    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_meet_a_struct_at_once_do_not_crash() -> None:
    """In a process of its own: msgspec alone ends it with a segmentation fault."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
