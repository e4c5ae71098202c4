"""Objects that a fork of this process never destroys.

A fork has neither its parent's threads nor its access to the GPU. The destructor of an ONNX Runtime
session waits for its threads, and so would never return there; with CUDA it would end the fork by
SIGABRT or SIGSEGV. So a fork keeps the objects until it ends.
"""

from __future__ import annotations

import ctypes
import os
import weakref

_KEPT: weakref.WeakSet[object] = weakref.WeakSet()


def keep_in_forks(owner: object) -> None:
    """Keep this object, and what it refers to, in all forks of this process."""
    _KEPT.add(owner)


def _keep() -> None:
    for owner in _KEPT:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


os.register_at_fork(after_in_child=_keep)
