"""Byte-compile a version's modules if this machine has its Python, so that it starts quickly.

In: a folder of modules, its final path, a Python version. Out: the modules' ``.pyc`` files,
the same bytes on every machine. Python loads a ``.pyc`` file without comparing it with its source:
both files belong to root, and `--check` verifies both.

Standard library only: this runs on the board before anything is installed.
"""

import compileall
import py_compile
import re
import shutil
import subprocess
import sys
from pathlib import Path

# tests of other projects make up a third of all modules, and never run here
_TESTS = re.compile(r"/tests?/")


def compile_modules(folder: Path, place: str, python: str) -> bool:
    """Compile the modules below ``folder``; return False if this machine has no such Python.

    place: the folder's path on the board, for tracebacks. Modules that do not compile are skipped:
    some wheels contain modules for other Pythons.
    """
    if f"3.{sys.version_info.minor}" == python:
        compileall.compile_dir(
            folder,
            ddir=place,
            rx=_TESTS,
            quiet=2,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        return True
    interpreter = shutil.which(f"python{python}")
    if interpreter is None:
        return False
    mode = ("--invalidation-mode", "unchecked-hash")
    command = [interpreter, "-m", "compileall", "-qq", *mode, "-d", place, "-x", _TESTS.pattern]
    subprocess.run([*command, str(folder)], check=False, capture_output=True)
    return True
