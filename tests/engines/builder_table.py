"""Print what NVIDIA's own builder makes of every architecture, dialect and precision.

    python -m tests.engines.builder_table [ARCHITECTURE…]

Each tiny model is exported, parsed and built, whole and in two stages, or the table has the
sentence that refuses it. This needs the extra `tensorrt-rtx` and no GPU, and takes four minutes
of one core.
"""

import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pilotfish.engines.engine_errors import EngineError
from pilotfish.export.dialects import DIALECTS
from pilotfish.export.split import split_artifact
from tests.support.nvidia_builder import plan_of
from tests.support.tiny import FAMILIES, SHARING, STATEFUL, tiny_artifact

CUT = {"head_tokens": [*range(0, 120, 7), 127]}
CUT_FORMS = (("opset17", "fp16"), ("opset24", "fp16"), ("tensorrt", "int4"))  # cut into stages, too
REFUSED = "REFUSED BY NVIDIA"


def main(names: Sequence[str]) -> int:
    """Print one line for each model, dialect and precision; return 1 if NVIDIA refused one."""
    logging.getLogger("pilotfish.tensorrt").setLevel(logging.CRITICAL)
    models: dict[str, tuple[str, dict[str, Any]]] = {
        name: (name, {}) for name in (FAMILIES | SHARING | STATEFUL)
    }
    models["llama, cut head"] = ("llama", CUT)
    chosen = {name: model for name, model in models.items() if not names or name in names}
    whole = [(name, each) for name, kind in DIALECTS.items() for each in kind.precisions]
    forms = [(form, False) for form in whole] + [(form, True) for form in CUT_FORMS]
    done, total = 0, len(chosen) * len(forms)
    counts: Counter[str] = Counter()
    for name, (family, changes) in chosen.items():
        for (dialect, precision), cut in forms:
            done += 1
            print(f"\r\x1b[K[{done}/{total}] {name} {dialect} {precision}", end="", file=sys.stderr)
            kind, text = attempt(family, dialect, precision, changes, cut=cut)
            counts[f"stages {kind}" if cut else kind] += 1
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            model = f"{name}, 2 stages" if cut else name
            print(f"{model:26}{dialect:10}{precision:8}{kind}: {text}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return int(any(REFUSED in kind for kind in counts))


def attempt(
    family: str, dialect: str, precision: Any, changes: dict[str, Any], *, cut: bool
) -> tuple[str, str]:
    """Export, parse and build a model, or its two stages and its head if `cut`.

    Return what came of it, and details.
    """
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
            parts = [(artifact, False)]
            if cut:
                stages = split_artifact(artifact.path, Path(folder) / "cut", stages=2)
                parts = [*((stage, False) for stage in stages), (stages[0], True)]
        except EngineError as error:
            return "refused at export", str(error).replace(folder, "")
        try:
            sizes = [len(plan_of(part, head=head)) >> 10 for part, head in parts]
        except EngineError as error:
            text = str(error).replace(folder, "")
            theirs = "cannot read" in text or "built no engine" in text
            return REFUSED if theirs else "refused by us", text
        taken = time.process_time() - begin
        listed = " + ".join(map(str, sizes))
        return "parsed, built", f"{listed} KiB, {taken:.1f} s of one core"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
