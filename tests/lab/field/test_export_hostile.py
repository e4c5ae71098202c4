"""Hostile values in each column of a run file: an export is right, or one typed error."""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotfish.base.errors import RunFileError
from pilotfish.cli import main
from pilotfish.device_runtime.record import RttSample
from pilotfish.lab.field.export.columns import TABLES
from pilotfish.lab.field.export.rows import Row, RunRows
from pilotfish.lab.field.export.table_files import FORMATS
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.report.measured import read_run
from pilotfish.lab.field.run import Run
from tests.support.made_answers import answer, chain, chosen, facts, linked

pyarrow = pytest.importorskip("pyarrow")
csv, parquet = (pytest.importorskip(f"pyarrow.{name}") for name in ("csv", "parquet"))

LONG = "a" * 1_000_000
CELLS: tuple[Any, ...] = (
    None, -1, 2**63 - 1, 1e308, float("inf"), 0.5, "", LONG, b"\xff\xfe", "=1+1", 'a\r"b"\n,c\0',
)  # fmt: skip
IN_JSON = ("1" + "0" * 30, "9" * 400, "9" * 5000, str(2**63), "-1", "1e308", "null", '"x"')


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A run file with a row in each table, and a value in each column."""
    path = tmp_path_factory.mktemp("sound") / "walk.pilotfish"
    link = linked(rtt=0.02, jitter=0.001, up=1e6, down=2e6, signal=-70.0)
    item = answer(
        [chain(4, 1), chain(4, 2, notes={"forgiven": 1})], protocol="auto", link=link,
        clock_s=10.0, choice=chosen("greedy", 4, 0.01, [("greedy", 4, 0.01), ("stream", 0, 0.02)]),
    )  # fmt: skip
    with Recorder.create(path, facts(device="van")) as recorder:
        number = recorder.begin(item)
        for at, round_ in enumerate(item.rounds):
            recorder.add_round(number, at, 0.1 * at, round_)
        recorder.add_rtts(number, [RttSample(0.1, 0.02)])
        recorder.end(
            number, finished=True, tokens=5, total_s=0.2, first_token_s=0.1, link=link,
            choice=item.choice, energy_j=1.0, window_used=4, protocol_used="greedy",
            prompt_tokens=3, finish_reason="stop", recording_s=0.01, pings=1, error="",
            probe_uplink_bytes=10, probe_downlink_bytes=10,
        )  # fmt: skip
        recorder.add_probe(
            Probe(
                began_unix_s=1.8e9 + 3000, clock_s=3000.0, took_s=1.5, rtts_s=[0.02, 0.03],
                up_bps=1e6, down_bps=1e6, link=link, signal={"source": "modem", "dbm": -71.5},
                position={"lat": 52.5, "lon": 13.4, "alt_m": 30.0}, power_w=2.0,
            )
        )  # fmt: skip
        recorder.add_outage(
            Outage(
                began_unix_s=1.8e9 + 3600, began_clock_s=3600.0, reason="away",
                ended_unix_s=1.8e9 + 3700, ended_clock_s=3700.0,
            )
        )  # fmt: skip
    return path.read_bytes()


@pytest.fixture
def path(sound: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "walk.pilotfish"
    renew(path, sound)
    return path


def exported(path: Path) -> dict[str, list[Row]]:
    """Export in both forms, which must be alike; return the rows."""
    rows: dict[str, list[Row]] = {name: [] for name in TABLES}
    with Run.open(path) as run:
        for table, row in RunRows(run, "walk"):
            rows[table].append(row)
    read = {}
    for name, columns in TABLES.items():
        files = {}
        for form, opener in FORMATS.items():
            files[form] = file = io.BytesIO()
            table_file = opener(file, columns)
            if rows[name]:
                table_file.write(rows[name])
            table_file.close()
        stored = parquet.read_table(io.BytesIO(files["parquet"].getvalue()))
        if stored.num_rows and len(files["csv"].getvalue()) < 100_000:
            again = csv.read_csv(
                io.BytesIO(files["csv"].getvalue()),
                parse_options=csv.ParseOptions(newlines_in_values=True),
                convert_options=csv.ConvertOptions(
                    column_types=stored.schema, strings_can_be_null=True
                ),
            ).to_pylist()
            expected = [
                {key: spreadsheet(value) for key, value in row.items()}
                for row in stored.to_pylist()
            ]
            assert again == expected
        read[name] = stored.to_pylist()
    return read


def spreadsheet(value: object) -> object:
    """A text as CSV has it: never a formula, and without NUL."""
    if not isinstance(value, str):
        return value
    text = value.replace("\0", "\ufffd")
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else text


def used_or_refused(path: Path) -> bool:
    """Export and report; whether the file was not refused."""
    outcomes = set()
    for use in (exported, lambda path: json.dumps(read_run(path).as_json())):
        try:
            use(path)
            outcomes.add(True)
        except RunFileError as error:
            outcomes.add(False)
            assert_one_line(str(error), path)
    [used] = outcomes  # a report refuses what an export refuses, and nothing else
    return used


def assert_one_line(words: str, path: Path) -> None:
    assert words.isprintable()
    assert str(path) in words
    assert len(words) < 600


def columns_of(path: Path) -> Iterator[tuple[str, str]]:
    database = sqlite3.connect(path)
    for table in ("answers", "rounds", "rtts", "probes", "outages", "facts"):
        for row in database.execute(f"PRAGMA table_info({table})").fetchall():
            yield table, row[1]
    database.close()


def renew(path: Path, content: bytes) -> None:
    """Write the file anew: Python 3.13 may still hold a lock of one that was refused."""
    for each in (path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))):
        each.unlink(missing_ok=True)
    path.write_bytes(content)


def store(path: Path, table: str, column: str, value: object, where: str = "1") -> bool:
    database = sqlite3.connect(path)
    try:
        database.execute("PRAGMA synchronous = OFF")  # this disk need not have it after a power cut
        with database:
            stored = "CAST(? AS TEXT)" if isinstance(value, bytes) else "?"
            database.execute(f"UPDATE {table} SET {column} = {stored} WHERE {where}", (value,))
    except sqlite3.Error:  # the table itself refuses it, such as NULL or a second row of a key
        return False
    finally:
        database.close()
    return True


def test_hostile_cells_are_exported_or_refused(sound: bytes, path: Path) -> None:
    outcomes = []
    for table, column in list(columns_of(path)):
        for value in CELLS:
            renew(path, sound)
            if store(path, table, column, value):
                outcomes.append(used_or_refused(path))
    assert len(outcomes) > 500
    assert set(outcomes) == {True, False}


def leaves(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values within a JSON value."""
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, below in items:
        yield from leaves(below, (*at, key))
    yield at


def replaced(value: Any, at: tuple[Any, ...], by: str) -> str:
    """The JSON text with one value replaced by a text of JSON."""
    if not at:
        return by
    if isinstance(value, dict):
        pairs = (
            f"{json.dumps(k)}:{replaced(v, at[1:], by) if k == at[0] else json.dumps(v)}"
            for k, v in value.items()
        )
        return "{" + ",".join(pairs) + "}"
    inner = (replaced(v, at[1:], by) if k == at[0] else json.dumps(v) for k, v in enumerate(value))
    return "[" + ",".join(inner) + "]"


def test_hostile_values_within_json_are_exported_or_refused(sound: bytes, path: Path) -> None:
    places = []
    database = sqlite3.connect(path)
    for table, column in list(columns_of(path)):
        for (cell,) in database.execute(f"SELECT {column} FROM {table}").fetchall():
            if isinstance(cell, str) and cell.startswith(("{", "[")):
                name = ""
                if table == "facts":
                    query = "SELECT name FROM facts WHERE value = ?"
                    name = database.execute(query, (cell,)).fetchone()[0]
                places += [(table, column, name, json.loads(cell), at)
                           for at in leaves(json.loads(cell))]  # fmt: skip
    database.close()
    assert {column for _, column, *_ in places} >= {
        "link", "choice", "signal", "position", "rtts_s", "tokens", "notes", "point", "value",
    }  # fmt: skip
    outcomes = []
    for number, (table, column, name, cell, at) in enumerate(places):
        for value in IN_JSON[number % 2 :: 2]:  # half of them, since fields alike are neighbours
            renew(path, sound)
            where = f"name = '{name}'" if name else "1"
            if store(path, table, column, replaced(cell, at, value), where):
                outcomes.append(used_or_refused(path))
    assert set(outcomes) == {True, False}


@pytest.mark.parametrize(
    ("table", "column", "change", "words"),
    [
        ("answers", "link", '$.rtt.samples', "answer 1 has 1e+30 as its link's rtt samples"),
        ("answers", "choice", "$.top_k", "answer 1 has 1e+30 as its choice's top_k"),
        ("probes", "link", "$.up.age_s", "probe 1 has 1e+30 as its link's up age"),
        ("probes", "position", "$.alt_m", "probe 1 has 1e+30 as its position's alt_m"),
        ("probes", "signal", "$.dbm", "probe 1 has 1e+30 as its signal's dbm"),
        ("probes", "up_bps", "", "probe 1 has 1e+30 as its goodput up"),
        ("outages", "began_clock_s", "", "outage 1 has 1e+30 as its begin by the run's clock"),
        ("rounds", "at_s", "", "answer 1 has 1e+30 as its time of a round's commit"),
        ("facts", "value", "", "the run has 1e+30 as its start's unix_s"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_the_error_names_row_and_value(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str,
    table: str, column: str, change: str, words: str,
) -> None:  # fmt: skip
    huge = "1" + "0" * 30
    database = sqlite3.connect(path)
    (cell,) = database.execute(
        f"SELECT {column} FROM {table} " + ("WHERE name = 'starts'" if table == "facts" else "")
    ).fetchone()
    database.close()
    value: object = float(huge)
    if table == "facts":
        value = replaced(json.loads(cell), (0, "unix_s"), huge)
    elif change:
        value = replaced(json.loads(cell), tuple(change[2:].split(".")), huge)
    assert store(path, table, column, value, "name = 'starts'" if table == "facts" else "1")
    command = ["field", "export", str(path), f"--{form}", str(tmp_path / "out")]
    assert main(command) == RunFileError.exit_code
    assert words in capsys.readouterr().err
    assert [*(tmp_path / "out").iterdir()] == []


def test_bytes_of_all_rounds_fit_into_64_bits(path: Path) -> None:
    database = sqlite3.connect(path)
    with database:
        columns = ", ".join(
            row[1] if row[1] != "number" else "c.x"
            for row in database.execute("PRAGMA table_info(rounds)").fetchall()
        )
        database.execute("UPDATE rounds SET uplink_bytes = 1e15")
        database.execute(
            "WITH RECURSIVE c(x) AS (SELECT 2 UNION ALL SELECT x + 1 FROM c WHERE x < 9999) "
            f"INSERT INTO rounds SELECT {columns} FROM rounds, c WHERE number = 0"
        )
    database.close()
    with pytest.raises(RunFileError, match=r"answer 1 has 1e\+19 as its bytes up of all rounds"):
        exported(path)


def test_rows_of_an_impossible_time_do_not_move_others(path: Path) -> None:
    """They are read before their turn, for the setting of the wall clock that held longest."""
    columns = "clock_s, took_s, rtts_s, lost, up_bound, down_bound, uplink_bytes, downlink_bytes"
    database = sqlite3.connect(path)
    with database:
        for times in ((2e300, 1e300), (3e300, 2e300)):
            values = "VALUES (?, ?, 0, '[]', 0, 0, 0, 0, 0)"
            database.execute(f"INSERT INTO probes (began_unix_s, {columns}) {values}", times)
    database.close()
    with pytest.raises(RunFileError, match=r"probe 2 has 2e\+300 as its begin"):
        exported(path)


def test_texts_are_no_formulas_in_csv(path: Path, tmp_path: Path) -> None:
    """Spreadsheets compute cells that begin so, also when they are quoted."""
    texts = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1")
    for number, text in enumerate(texts):
        assert store(path, "outages", "reason", text)
        assert store(path, "facts", "value", json.dumps(text), "name = 'device'")
        for form in ("csv", "parquet"):
            folder = tmp_path / f"{form}{number}"
            assert main(["field", "export", str(path), f"--{form}", str(folder)]) == 0
        (row,) = parquet.read_table(tmp_path / f"parquet{number}" / "outages.parquet").to_pylist()
        assert (row["reason"], row["device"]) == (text, text)
        written = (tmp_path / f"csv{number}" / "outages.csv").read_text("utf-8-sig")
        assert written.count(f"'{text}".replace("\r", "\n")) == 2
        rows = csv.read_csv(
            tmp_path / f"csv{number}" / "probes.csv",
            parse_options=csv.ParseOptions(newlines_in_values=True),
        ).to_pylist()
        assert rows[0]["signal_dbm"] == -71.5  # a number stays a number
        assert rows[0]["device"] == f"'{text}"
