"""The papers' closed forms: equations as functions, and what follows from them as tables and plots.

``<paper>.py`` has the equations, one function each, named ``eq_<number>_<what>_<unit>`` after the
paper's own numbers; where docs/papers.md corrects one, the function is the corrected one and its
docstring says so. ``<paper>_tables.py`` has the paper's printed figures and compares.
"""

from pilotfish.field.papers import (
    decentralized_tables,
    dssd_tables,
    specfed_tables,
    tslt_tables,
    wisv_tables,
)
from pilotfish.field.papers.sheet import Paper

PAPERS: dict[str, Paper] = {
    "dssd": dssd_tables.PAPER,
    "tslt": tslt_tables.PAPER,
    "wisv": wisv_tables.PAPER,
    "specfed": specfed_tables.PAPER,
    "decentralized": decentralized_tables.PAPER,
}
