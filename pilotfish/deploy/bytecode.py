"""Byte-compile a version's modules where its Python is available, so that it starts quickly.

In: a folder of modules, its final path, a Python version. Out: ``.pyc`` files beside them, which
are the same on every machine. Python does not compare them with their sources when it loads them:
both belong to root, and `--check` verifies both.

Standard library only: this runs on the board before anything is installed.
"""

import compileall
import py_compile
import re
import shutil
import subprocess
import sys
from pathlib import Path

_TESTS = re.compile(r"/tests?/")  # other projects' tests: a third of all modules, never run here


def compile_modules(folder: Path, place: str, python: str) -> bool:
    """Compile the modules below ``folder``; return False if this machine has no such Python.

    place: the folder's path on the board, for tracebacks. Modules that do not compile are skipped:
    some wheels hold files for other Pythons.
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
