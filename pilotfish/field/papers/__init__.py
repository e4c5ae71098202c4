"""The papers' closed forms: equations as functions, and their results as tables and plots.

``<paper>.py`` has the equations, one function each, named ``eq_<number>_<quantity>_<unit>`` with
the paper's number. If docs/papers.md corrects an equation, the function is the corrected one and
its docstring names the correction. ``<paper>_tables.py`` compares with the paper's printed figures.
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
