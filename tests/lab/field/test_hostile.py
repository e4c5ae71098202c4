"""Run files from strangers: SQLite's schema is code, and none of it is run."""

from __future__ import annotations

import json
import random
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pilotfish.base.errors import RunFileError, UnsupportedError
from pilotfish.device_runtime.record import RttSample
from pilotfish.lab.field.link_rows import Outage
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.replay import replay
from pilotfish.lab.field.report.measured import read_run
from pilotfish.lab.field.report.report_page import write
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.writable_run_file import has_begun
from pilotfish.speculation.latency import Link
from tests.support.made_runs import CHOICE, FACTS, LINK, a_round, requests
from tests.support.made_watches import probe

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c)"
BLOAT = "hex(zeroblob(400000000))"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A run file as it should be: two finished answers, six rounds each."""
    path = tmp_path / "walk.pilotfish"
    with Recorder.create(path, FACTS) as recorder:
        for repeat in range(2):
            number = recorder.begin(requests(repeat=repeat))
            for at in range(6):
                recorder.add_round(number, at, 0.1 * at, a_round(at))
            recorder.end(
                number, finished=True, tokens=18, total_s=0.6, link=LINK, choice=CHOICE,
                finish_reason="length", prompt_tokens=10, first_token_s=0.1, energy_j=0.5,
            )  # fmt: skip
            recorder.add_rtts(number, [RttSample(0.1, 0.02)] * 4)
        for at in (3.0, 400.0):
            recorder.add_probe(probe(at, np.random.default_rng(0)))
        ends = {"ended_unix_s": 30.0, "ended_clock_s": 20.0}
        recorder.add_outage(Outage(began_unix_s=20.0, began_clock_s=10.0, reason="away", **ends))
    return path


def change(path: Path, script: str) -> None:
    database = sqlite3.connect(path)
    database.executescript(script)
    database.close()


def rewritten(path: Path, before: str, after: str) -> None:
    """The stored SQL of the schema, changed as ALTER TABLE would not."""
    database = sqlite3.connect(path)
    database.execute("PRAGMA writable_schema = ON")
    with database:
        database.execute("UPDATE sqlite_master SET sql = replace(sql, ?, ?)", (before, after))
    database.close()


def endless_view(path: Path) -> None:
    change(
        path,
        "ALTER TABLE rounds RENAME TO hidden;"
        f"CREATE VIEW rounds AS {ENDLESS} SELECT hidden.* FROM hidden, c;",
    )


def view_of_facts(path: Path) -> None:
    change(path, f"ALTER TABLE facts RENAME TO f; CREATE VIEW facts AS {ENDLESS} SELECT * FROM f,c")


def view_more(path: Path) -> None:
    change(path, f"CREATE VIEW more AS {ENDLESS} SELECT x FROM c")


def trigger(path: Path) -> None:
    change(
        path,
        "CREATE TRIGGER t AFTER INSERT ON rounds BEGIN"
        f" INSERT INTO facts {ENDLESS} SELECT x, x FROM c; END",
    )


def generated_column(path: Path) -> None:
    change(path, f"ALTER TABLE answers ADD COLUMN more TEXT GENERATED ALWAYS AS ({BLOAT}) VIRTUAL")


def generated_in_place(path: Path) -> None:
    rewritten(path, "error TEXT", f"error TEXT AS ({BLOAT})")


def check(path: Path) -> None:
    rewritten(path, "pings INTEGER", f"pings INTEGER CHECK (length({BLOAT}) > 1)")


def default(path: Path) -> None:
    rewritten(path, "error TEXT", f"error TEXT DEFAULT ({BLOAT})")


def other_index(path: Path) -> None:
    change(path, f"CREATE INDEX i ON answers (id) WHERE length({BLOAT}) > 1")


def condition_of_the_index(path: Path) -> None:
    rewritten(path, "WHERE finished", f"WHERE length({BLOAT}) > 1 AND finished")


def virtual_table(path: Path) -> None:
    change(
        path,
        "DROP TABLE rounds; CREATE VIRTUAL TABLE rounds USING fts5(answer, number, at_s);",
    )


def another_column(path: Path) -> None:
    change(path, "ALTER TABLE rounds ADD COLUMN more")


def column_less(path: Path) -> None:
    change(path, "ALTER TABLE rounds DROP COLUMN nodes")


def with_rowid(path: Path) -> None:
    change(
        path,
        "CREATE TABLE f AS SELECT * FROM facts; DROP TABLE facts; ALTER TABLE f RENAME TO facts;",
    )


def many_tables(path: Path) -> None:
    change(path, "".join(f"CREATE TABLE t{at} (x);" for at in range(300)))


def statistics(path: Path) -> None:
    change(path, "ANALYZE")


def name_with_escapes(path: Path) -> None:
    change(path, 'CREATE TABLE "a\x1b[31m\nb" (x)')


SCHEMAS = [
    endless_view, view_of_facts, view_more, trigger, generated_column, generated_in_place, check,
    default, other_index, condition_of_the_index, virtual_table, another_column, column_less,
    with_rowid, many_tables, statistics, name_with_escapes,
]  # fmt: skip


def assert_one_line(words: str, path: Path) -> None:
    assert words.isprintable()
    assert str(path) in words


@pytest.mark.parametrize("spoil", SCHEMAS)
def test_a_schema_that_is_not_ours_is_refused_before_it_is_run(
    path: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(path)
    for use in (Run.open, read_run, Recorder.resume):
        with pytest.raises(RunFileError) as caught:
            use(path)
        assert_one_line(str(caught.value), path)


@pytest.mark.parametrize(
    "words",
    [
        ("report", "{}", "--out", "{}.d"),
        ("replay", "{}", "--link", "rtt=50ms"),
        ("measure", "--resume", "--out", "{}"),
    ],
)
def test_a_command_ends_at_an_endless_view(path: Path, words: tuple[str, ...]) -> None:
    endless_view(path)
    command = [sys.executable, "-m", "pilotfish", "field", *(w.format(path) for w in words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == RunFileError.exit_code
    assert done.stderr.startswith("pilotfish: ")
    assert len(done.stderr.splitlines()) == 1
    assert "cannot be read: it has" in done.stderr


def test_a_file_that_takes_too_long_to_look_through_is_let_go(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = sqlite3.connect(path)
    with database:
        blob = "1," * 2_000
        many = ((f"name {at}", blob) for at in range(20_000))
        database.executemany("INSERT INTO facts VALUES (?, ?)", many)
    database.close()
    monkeypatch.setattr("pilotfish.lab.field.run_file._OPENING_S", 0.001)
    with pytest.raises(RunFileError, match="cannot be read: interrupted"):
        Run.open(path)


ODD = (
    "9e999", "-9e999", "-1", "1e308", "9223372036854775807", "-9223372036854775808", "NULL", "''",
    "'x'", "x'ff00'", "x'5b31'", "'{}'", "'[]'", "'[1e999]'", "'null'", "'\"' || char(27) || '\"'",
    "zeroblob(1000)", "'<script>'", "'[' || hex(zeroblob(200000))", "0", "0.5", "4e18",
    "'[99999999999999999999999]'", "json_array(json_array(1))",
    "replace(hex(zeroblob(9999)),'0','[')",
)  # fmt: skip


def assert_used_or_refused(path: Path, *, draw: Path | None = None) -> bool:
    """Read, replay and, where there is a folder, report; whether all that could be done."""
    try:
        measured = read_run(path)
        json.dumps(measured.as_json())
        replay(measured.answers, [Link(rtt_s=0.05, up_bps=1e6, down_bps=1e6)])
        if draw is not None:
            write([measured], draw)
    except RunFileError as error:
        assert_one_line(str(error), path)
        return False
    except UnsupportedError:
        return False
    return True


def odd_cells(path: Path, rng: random.Random) -> None:
    database = sqlite3.connect(path)
    database.execute("PRAGMA ignore_check_constraints = ON")
    for _ in range(rng.choice([1, 1, 2])):
        table = rng.choice(["answers", "rounds", "facts", "rtts", "probes", "outages"])
        columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
        column, value = rng.choice(columns), rng.choice(ODD)
        in_answer = "answer = 1 AND number = 2"
        kind = {"rounds": in_answer, "rtts": in_answer}.get(table, "id = 1")
        if table == "facts":
            name = rng.choice([row[0] for row in database.execute("SELECT name FROM facts")])
            kind = f"name = '{name}'"
        try:
            with database:
                database.execute(f"UPDATE {table} SET {column} = {value} WHERE {kind}")
        except sqlite3.Error:
            continue
    database.close()


def test_odd_cells_are_read_or_refused(path: Path, tmp_path: Path) -> None:
    whole, rng = path.read_bytes(), random.Random(3)
    outcomes = set()
    for _ in range(250):
        path.write_bytes(whole)
        odd_cells(path, rng)
        outcomes.add(assert_used_or_refused(path))
    assert outcomes == {True, False}


def test_odd_cells_are_drawn_or_refused(path: Path, tmp_path: Path) -> None:
    whole, rng = path.read_bytes(), random.Random(4)
    drawn = 0
    while drawn < 3:
        path.write_bytes(whole)
        odd_cells(path, rng)
        drawn += assert_used_or_refused(path, draw=tmp_path / "report")


def test_damaged_bytes_are_read_or_refused(path: Path) -> None:
    """Also when the file is continued."""
    whole, rng = path.read_bytes(), random.Random(5)
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 1, 3, 30])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data[: rng.choice([len(data), len(data), rng.randrange(1, 4096)])]))
        assert_used_or_refused(path)
        try:
            if has_begun(path):
                with Recorder.resume(path) as recorder:
                    recorder.finished_cells()
        except (RunFileError, OSError) as error:
            assert_one_line(str(error), path)
        for rest in path.parent.glob("walk.pilotfish-*"):
            rest.unlink()


def test_what_a_journal_beside_it_puts_back_is_looked_at(path: Path) -> None:
    """A rollback journal is pages to be put back: here those of a file with a trigger."""
    sound = path.read_bytes()
    trigger(path)
    evil = path.read_bytes()
    path.write_bytes(sound)
    (size,) = struct.unpack(">H", evil[16:18])
    count, nonce = len(evil) // size, 7
    head = bytes.fromhex("d9d505f920a163d7") + struct.pack(">5I", count, nonce, count, 512, size)
    records = []
    for number in range(count):
        page = evil[number * size : (number + 1) * size]
        check = (nonce + sum(page[at] for at in range(size - 200, 0, -200))) % 2**32
        records.append(struct.pack(">I", number + 1) + page + struct.pack(">I", check))
    journal = path.with_name(path.name + "-journal")
    journal.write_bytes(head.ljust(512, b"\0") + b"".join(records))
    with pytest.raises(RunFileError, match="journal"):
        Run.open(path)
    assert path.read_bytes() == sound
    with pytest.raises(RunFileError, match="has a 'trigger'"):
        Recorder.resume(path)
