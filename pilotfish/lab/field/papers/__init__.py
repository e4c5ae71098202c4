"""The papers' equations as functions, and their results as tables and plots.

``<paper>.py`` has a function for each equation; its name is ``eq_<number>_<quantity>_<unit>``, with
the number in the paper. If docs/papers.md corrects an equation, the function computes the corrected
form, and its docstring states the correction. ``<paper>_tables.py`` compares the results with the
numbers that the paper prints. In docstrings, a number in brackets is an equation's number.
"""

from pilotfish.lab.field.papers import (
    decentralized_tables,
    dssd_tables,
    specfed_tables,
    tslt_tables,
    wisv_tables,
)
from pilotfish.lab.field.papers.paper import Paper

PAPERS: dict[str, Paper] = {
    "dssd": dssd_tables.PAPER,
    "tslt": tslt_tables.PAPER,
    "wisv": wisv_tables.PAPER,
    "specfed": specfed_tables.PAPER,
    "decentralized": decentralized_tables.PAPER,
}
