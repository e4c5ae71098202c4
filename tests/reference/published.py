"""Export published config.json files, with small sizes, and compare each with transformers.

    python -m tests.reference.published FILES [--only NAME …] [--dialects …] [--json OUT]

FILES is a folder with a JSON file for each: a bare config.json, or an object with `config`, `name`,
`source` and `refused`; or it is one file with a list of such objects, as tests/data/published.json.
Prints a line as each is done, then a Markdown table by source. Outcomes:

- parity: logits and hidden states equal transformers' in each dialect that takes the model, up to
  10⁻³ of their standard deviation;
- refused: with the exporter's sentence; rightly, if `refused`, which a person has written, is a
  part of it;
- differs: an artifact was written that computes something else;
- could not make: transformers makes no model of the file, so there is nothing to compare with.

OUT has a line of JSON for each; those that it already has are not run again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.export.export_errors import ExportError
from pilotfish.export.model import export_model
from pilotfish.export.sources.huggingface import describe_directory
from tests.reference.parity import LENGTH, TEXT, answer, read_in_pieces
from tests.reference.published_checkpoint import CannotMakeError, make_checkpoint, small_config
from tests.reference.published_sizes import CONTEXT
from tests.support.runnable import runnable

TOLERANCE = 1e-3
PUBLISHED = Path(__file__).parent.parent / "data" / "published.json"
OUTCOMES = ("parity", "refused", "differs", "could not make")
Result = dict[str, Any]


def main() -> None:
    """Read the arguments, run each file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", type=Path)
    parser.add_argument("--only", nargs="+", help="names of the configurations to run")
    parser.add_argument("--dialects", nargs="+", default=runnable())
    parser.add_argument("--json", type=Path, help="file of the results, one line each")
    options = parser.parse_args()
    done = _read_lines(options.json)
    for entry in read_entries(options.files):
        name = entry["name"]
        if name in done or (options.only and name not in options.only):
            continue
        start = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            result = run(entry, Path(folder), options.dialects)
        result["judgement"] = judge(entry, result)
        result["seconds"] = round(time.process_time() - start, 1)
        done[name] = result
        worst = f" {result['worst']:.0e}" if "worst" in result else ""
        print(f"{name}: {result['outcome']}{worst} {result['message'][:300]}", flush=True)
        if options.json:
            with options.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
    print(table(done.values()))


def _read_lines(path: Path | None) -> dict[str, Result]:
    if path is None or not path.is_file():
        return {}
    results = map(json.loads, path.read_text("utf-8").splitlines())
    return {result["name"]: result for result in results}


def read_entries(files: Path) -> list[dict[str, Any]]:
    """Read a list, or a folder's files; a bare config.json has the file's name."""
    if files.is_file():
        return list(json.loads(files.read_text("utf-8")))
    entries = []
    for path in sorted(files.glob("*.json")):
        values = json.loads(path.read_text("utf-8"))
        if not isinstance(values.get("config"), dict):
            values = {"config": values}
        entries.append({"name": path.stem, "source": "", **values})
    return entries


def run(entry: Mapping[str, Any], folder: Path, dialects: Iterable[str]) -> Result:
    """Say what becomes of one."""
    result = {"name": entry["name"], "source": entry["source"], "message": "", "note": ""}
    small_config(entry["config"], folder / "model")
    try:
        describe_directory(folder / "model", entry["name"], ())
    except ExportError as refusal:
        return result | {"outcome": "refused", "message": _sentence(refusal, folder)}
    except Exception as error:  # a traceback is a finding, too
        return result | {"outcome": "differs", "message": f"{type(error).__name__}: {error}"}
    try:
        made = make_checkpoint(folder / "model")
    except CannotMakeError as error:
        return result | {"outcome": "could not make", "message": str(error)[:500]}
    result |= {"names": made.names, "note": made.note}
    return result | compare(made.model, made.path, folder, dialects)


def judge(entry: Mapping[str, Any], result: Result) -> str:
    """Say whether a refusal is the one that a person has found right for this file."""
    if result["outcome"] != "refused" or "refused" not in entry:
        return ""
    right = entry["refused"] and entry["refused"] in result["message"]
    return "rightly" if right else "wrongly"


def compare(model: Any, path: Path, folder: Path, dialects: Iterable[str]) -> Result:
    """Export to each dialect, and read a text with drafts that are rejected."""
    by_dialect: dict[str, Any] = {}
    for dialect in dialects:
        try:
            artifact = export_model(str(path), folder / dialect, dialect=dialect, context=CONTEXT)
        except ExportError as refusal:
            by_dialect[dialect] = _sentence(refusal, folder)
            continue
        text = TEXT[: min(LENGTH, artifact.manifest.dimensions.context)]
        exact = answer(model, text)
        ours = read_in_pieces(Decoder(artifact, threads=1), text)
        pairs = zip(ours, exact, strict=True)
        worst = max(float(np.abs(a - b).max() / b.std()) for a, b in pairs)
        by_dialect[dialect] = worst if np.isfinite(worst) else 1e9
    reached = [each for each in by_dialect.values() if isinstance(each, float)]
    if not reached:
        message = next(iter(by_dialect.values()))
        return {"outcome": "refused", "message": message, "dialects": by_dialect}
    worst = max(reached)
    outcome = "parity" if worst <= TOLERANCE else "differs"
    return {"outcome": outcome, "worst": worst, "dialects": by_dialect}


def _sentence(refusal: ExportError, folder: Path) -> str:
    return str(refusal).replace(str(folder / "model"), "P")


def table(results: Iterable[Result]) -> str:
    """Make a Markdown table by source, and one of what is not at parity."""
    results = list(results)
    lines = [f"| source | files | {' | '.join(OUTCOMES)} |", "|---" * (2 + len(OUTCOMES)) + "|"]
    for source in [*sorted({each["source"] for each in results}), "all"]:
        chosen = [each for each in results if source in ("all", each["source"])]
        counts = [sum(each["outcome"] == outcome for each in chosen) for outcome in OUTCOMES]
        lines.append(f"| {source} | {len(chosen)} | {' | '.join(map(str, counts))} |")
    lines += ["", "| name | outcome | judgement | message |", "|---|---|---|---|"]
    for each in sorted(results, key=lambda each: (OUTCOMES.index(each["outcome"]), each["name"])):
        if each["outcome"] != "parity":
            message = each["message"].replace("|", "\\|").replace("\n", " ")
            lines.append(
                f"| {each['name']} | {each['outcome']} | {each['judgement']} | {message} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
