"""What is no run file, or a damaged one, is said in a line or read."""

from __future__ import annotations

import sqlite3

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pilotfish.base.errors import RunFileError
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_schema import APPLICATION_ID
from tests.support.examples import examples
from tests.support.made_runs import (
    read,
)


def foreign(path):
    path.write_bytes(b"PK\3\4 no database at all " * 40)
    return "not a run file"


def other_database(path):
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE songs (title)")
    return "not a run file"


def of_the_future(path):
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute("PRAGMA user_version = 99")
    return "format 99"


def without_tables(path):
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute("PRAGMA user_version = 1")
    return "cannot be read"


def empty(path):
    path.touch()
    return "empty"


def absent(path):
    return "There is no run file"


def folder(path):
    path.mkdir()
    return "There is no run file"


@pytest.mark.parametrize(
    "make", [foreign, other_database, of_the_future, without_tables, empty, absent, folder]
)
def test_what_is_no_run_file_is_said_in_a_line(path, make):
    words = make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(RunFileError, match=words) as caught:
        Run.open(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_fact_that_is_missing_or_of_another_kind_is_damage(written):
    for statement in (
        "UPDATE facts SET value = '{' WHERE name = 'starts'",
        "DELETE FROM facts WHERE name = 'settings'",
    ):
        with sqlite3.connect(written) as database:
            database.execute(statement)
        with pytest.raises(RunFileError, match="damaged"):
            Run.open(written)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE rounds SET tokens = 'many' WHERE number = 1",
        "UPDATE rounds SET verify_s = 'long' WHERE number = 1",
        "UPDATE answers SET prompt = 'the first'",
        "UPDATE answers SET link = '{\"rtt\": 3}'",
    ],
)
def test_a_value_of_another_kind_is_damage(written, statement):
    with sqlite3.connect(written) as database:
        database.execute(statement)
    with pytest.raises(RunFileError, match="damaged"):
        read(written)


@given(cut=st.integers(0, 2**20), at=st.lists(st.integers(0, 2**20), max_size=12))
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_read_or_refused(written, tmp_path, cut, at):
    data = bytearray(written.read_bytes())
    del data[max(1, cut % (2 * len(data))) :]
    for position in at:
        data[position % len(data)] ^= 0xA5
    broken = tmp_path / "broken.pilotfish"
    broken.write_bytes(data)
    text = ""
    try:
        assert len(read(broken, finished=False, warm_up=True)) <= 4
    except RunFileError as error:
        text = str(error)
    assert "\n" not in text
    assert broken.read_bytes() == data
