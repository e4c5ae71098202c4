"""Print what NVIDIA's own builder makes of every architecture, dialect and precision.

    python -m tests.engines.builder_table [ARCHITECTURE…]

Each tiny model is exported, parsed and built, or the table has the sentence that refuses it. This
needs the extra `nvidia-builder` and no GPU, and takes four minutes of one core.
"""

import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pilotfish.engines.engine_errors import EngineError
from pilotfish.export.dialects import DIALECTS
from pilotfish.export.split import split_artifact
from tests.support.nvidia_builder import install, plan_of
from tests.support.tiny import FAMILIES, SHARING, STATEFUL, tiny_artifact

CUT = {"head_tokens": [*range(0, 120, 7), 127]}


def main(names: Sequence[str]) -> int:
    """Print one line for each model, dialect and precision; return 1 if NVIDIA refused one."""
    install()
    logging.getLogger("pilotfish.tensorrt").setLevel(logging.CRITICAL)
    models: dict[str, tuple[str, dict[str, Any]]] = {
        name: (name, {}) for name in (FAMILIES | SHARING | STATEFUL)
    }
    models["llama, cut head"] = ("llama", CUT)
    chosen = {name: model for name, model in models.items() if not names or name in names}
    forms = [(name, each) for name, kind in DIALECTS.items() for each in kind.precisions]
    done, total, surprises = 0, len(chosen) * len(forms), 0
    for name, (family, changes) in chosen.items():
        for dialect, precision in forms:
            done += 1
            print(f"\r\x1b[K[{done}/{total}] {name} {dialect} {precision}", end="", file=sys.stderr)
            result, expected = attempt(family, dialect, precision, changes)
            surprises += not expected
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            print(f"{name:16}{dialect:10}{precision:8}{result}", flush=True)
    print(f"{'llama, stage 1':16}{'opset24':10}{'fp32':8}{stage()}")
    return int(surprises > 0)


def attempt(family: str, dialect: str, precision: Any, changes: dict[str, Any]) -> tuple[str, bool]:
    """Export, parse and build; return what came of it, and whether NVIDIA refused nothing."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        try:
            artifact = tiny_artifact(
                Path(folder) / "a",
                architecture=family,
                dialect=dialect,
                precision=precision,
                **changes,
            )
        except EngineError as error:
            return f"refused at export: {error}", True
        try:
            plan = plan_of(artifact)
        except EngineError as error:
            text = str(error).replace(folder, "")
            theirs = "cannot read" in text or "built no engine" in text
            return f"{'REFUSED BY NVIDIA' if theirs else 'refused by us'}: {text}", not theirs
        taken = time.process_time() - begin
        return f"parsed, built: {len(plan) >> 10} KiB, {taken:.1f} s of one core", True


def stage() -> str:
    """Try to open a stage as `pilotfish export engine` does."""
    from pilotfish.engines.artifact import Artifact

    with tempfile.TemporaryDirectory() as folder:
        whole = tiny_artifact(Path(folder) / "a", dialect="opset24")
        split_artifact(whole.path, Path(folder) / "cut", stages=2)
        try:
            Artifact.open(Path(folder) / "cut" / "stage-1")
        except EngineError as error:
            return f"refused by us: {str(error).replace(folder, '')}"
    return "opened"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
