"""A run goes on only with the settings and the models that it began with."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish.base.errors import RunFileError
from pilotfish.lab.field.resumption import expect_same_pair, expect_same_settings
from pilotfish.lab.field.run_facts import Facts, Model
from tests.support.made_runs import (
    FACTS,
)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"repeat": 9}, "--repeat 4, not 9"),
        ({"windows": (2, 4)}, "--windows 2,auto, not 2,4"),
        ({"prompts": ("Where?",)}, "other prompts"),
        ({"edge": "tcp://127.0.0.1:1"}, "--edge"),
        ({"max_tokens": 3}, "--max-tokens 64, not 3"),
    ],
)
def test_other_settings_are_refused_with_what_differs(option, words):
    with pytest.raises(RunFileError, match=words):
        expect_same_settings(Path("walk"), FACTS, option)
    expect_same_settings(Path("walk"), FACTS, {"repeat": 4, "windows": (2, "auto")})


def test_another_pair_is_refused():
    for change in ({"drafter": Model("small", "int8", "0")}, {"target": None}):
        other = Facts(**{**vars(FACTS), **change})
        with pytest.raises(RunFileError, match=next(iter(change))):
            expect_same_pair(Path("walk"), FACTS, other)
    expect_same_pair(Path("walk"), FACTS, Facts(**{**vars(FACTS), "draft_path": "/elsewhere"}))
