"""Print how far every family is from transformers, as a Markdown table.

    python -m tests.reference.parity_table [NAME …] [--precision fp32 …] > table.md

fp32: the largest difference of logits and hidden states. fp16: ‖Δ‖ / ‖logits‖, and in brackets that
of transformers in fp16. int8, int4: ‖Δ‖ / ‖logits‖ to transformers with inputs rounded to 8 bits.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from pilotfish.engines.manifest import Precision
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.export.dialects import DIALECTS
from pilotfish.export.export_errors import ExportError
from tests.reference.families import FAMILIES
from tests.reference.parity import Library, read_in_pieces
from tests.support.runnable import runnable


def main() -> None:
    """Read the arguments, print a row for each family as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(FAMILIES))
    every = ["fp32", "fp16", "int8", "int4"]
    parser.add_argument("--precision", nargs="+", choices=every, default=every)
    options = parser.parse_args()
    columns: list[tuple[str, Precision]] = [
        (dialect, precision)
        for dialect in runnable()
        for precision in DIALECTS[dialect].precisions
        if precision in options.precision
    ]
    print("| family |", *(f"{dialect} {precision} |" for dialect, precision in columns))
    print("|---|" + "---|" * len(columns), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        library = Library(Path(folder))
        for name in options.names:
            print(f"| {name} |", *(f"{cell(library, name, *of)} |" for of in columns), flush=True)


def cell(library: Library, name: str, dialect: str, precision: Precision) -> str:
    """Say how far one is, or why it is refused."""
    reference = library.reference(name)
    try:
        decoder = Decoder(library.artifact(name, dialect, precision), threads=1)
        in_pieces = read_in_pieces(decoder, reference.text)
    except ExportError as refusal:
        return f"refused: {str(refusal).rpartition('config.json: ')[2]}"
    if precision == "fp32":
        return f"{in_pieces.worst(reference.exact):.0e}"
    if precision == "fp16":
        ours = reference.in_half.error(reference.exact)
        return f"{in_pieces.error(reference.exact):.1e} ({ours:.1e})"
    return f"{in_pieces.error(reference.in_eighths):.1e}"


if __name__ == "__main__":
    main()
