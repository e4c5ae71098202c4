"""`pilotfish field export`: tables that say what the run file says, and what the docs say."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from pilotfish.base.errors import RunFileError
from pilotfish.cli import main
from pilotfish.lab.field.export.columns import TABLES
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_schema import FORMAT
from tests.support.made_answers import answer, chain, linked, recorded
from tests.support.made_runs import LATER, as_format
from tests.support.measuring import measure

pyarrow = pytest.importorskip("pyarrow")
csv, parquet = (pytest.importorskip(f"pyarrow.{name}") for name in ("csv", "parquet"))

DOCS = Path(__file__).parents[3] / "docs"
NOTEBOOK = DOCS / "field.ipynb"
KINDS = {
    "text": pyarrow.string(),
    "integer": pyarrow.int64(),
    "number": pyarrow.float64(),
    "boolean": pyarrow.bool_(),
    "time": pyarrow.timestamp("ms"),
}
UNITS = {"s": "s", "bps": "bit/s", "dbm": "dBm", "j": "J", "w": "W", "deg": "°", "bytes": "bytes"}


@pytest.fixture(scope="module")
def real(pair, edge, tmp_path_factory):
    """A run that was really measured."""
    path = tmp_path_factory.mktemp("measured") / "walk.pilotfish"
    options = ["--protocols", "greedy,stream,ahead,auto", "--windows", "2,auto", "--repeat", 1]
    assert measure(pair, edge.endpoint, path, *options, "--max-tokens", 8, "--name", "böat, 1") == 0
    return path


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A run file with what a watch writes; the wall clock jumps by an hour after the probe."""
    path = tmp_path_factory.mktemp("watched") / "walk.pilotfish"
    rounds = [chain(4, 1), chain(4, 2, notes={"forgiven": 1})]
    measured = answer(rounds, clock_s=10.0, started_unix_s=1.8e9 + 10, link=linked(rtt=0.02))
    recorded(path, [measured], device="van")
    with Recorder.resume(path) as recorder:
        recorder.add_probe(
            Probe(
                began_unix_s=1.8e9 + 3000, clock_s=3000.0, took_s=1.5, rtts_s=[0.02, 0.03, 0.05],
                lost=1, up_bps=1e6, up_bound=True, link=linked(rtt=0.03, down=2e6),
                signal={"source": "modem", "dbm": -71.5}, position={"lat": 52.5, "lon": 13.4},
            )
        )  # fmt: skip
        jumped = {"began_unix_s": 1.8e9 + 7200, "began_clock_s": 3600.0, "reason": 'a "line"\nmore'}
        recorder.add_outage(Outage(**jumped, ended_unix_s=1.8e9 + 7230, ended_clock_s=3630.0))
        recorder.add_outage(Outage(began_unix_s=1.8e9 + 7260, began_clock_s=3660.0))
    return path


def exported(folder, form, *runs):
    assert main(["field", "export", *map(str, runs), f"--{form}", str(folder)]) == 0
    return {name: read(folder / f"{name}.{form}", name) for name in TABLES}


def read(path, table):
    """The rows of a table, as pyarrow reads its file."""
    if path.suffix == ".parquet":
        return parquet.read_table(path)
    types = {column.name: KINDS[column.kind] for column in TABLES[table]}
    convert = csv.ConvertOptions(column_types=types, strings_can_be_null=True)
    parse = csv.ParseOptions(newlines_in_values=True)
    return csv.read_csv(path, parse_options=parse, convert_options=convert)


def test_csv_and_parquet_hold_the_same_values(real, watched, tmp_path):
    a = exported(tmp_path / "a", "csv", real, watched)
    b = exported(tmp_path / "b", "parquet", real, watched)
    for name in TABLES:
        assert a[name].num_rows > 0
        assert a[name].to_pylist() == b[name].to_pylist()
        assert a[name].schema.equals(b[name].schema)
    assert {row["run"] for row in a["answers"].to_pylist()} == {"walk", "walk (2)"}
    assert {row["device"] for row in a["rtts"].to_pylist()} == {"böat, 1", "van"}
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    for path in (*(tmp_path / "a").iterdir(), *(tmp_path / "b").iterdir()):
        assert path.stat().st_mode & 0o777 == 0o600
    assert len([*(tmp_path / "a").iterdir()]) == len(TABLES)
    assert (
        (tmp_path / "a" / "answers.csv").read_bytes().startswith(b"\xef\xbb\xbfrun,device,answer")
    )


def test_the_rows_are_those_of_the_run_file(real, tmp_path):
    tables = {name: table.to_pylist() for name, table in exported(tmp_path, "csv", real).items()}
    with Run.open(real) as run:
        every = list(run.answers(warm_up=True, finished=False))
    assert [row["answer"] for row in tables["answers"]] == [each.id for each in every]
    assert len(tables["rounds"]) == sum(len(each.rounds) for each in every)
    for row, each in zip(tables["answers"], every, strict=True):
        assert row["configuration"] == str(each.configuration)
        assert row["first_token_s"] == each.first_token_s
        assert row["unix_s"] == pytest.approx(each.started_unix_s, abs=0.5)
        assert row["time_utc"].replace(tzinfo=timezone.utc).timestamp() == pytest.approx(
            row["unix_s"], abs=1e-3
        )
        assert row["link_rtt_s"] == each.link.rtt.value
        mine = [round_ for round_ in tables["rounds"] if round_["answer"] == each.id]
        assert [json.loads(round_["token_ids"]) for round_ in mine] == [
            round_.tokens for round_ in each.rounds
        ]
        steady = sum(round_["total_s"] for round_ in mine[1:])
        if row["token_s"] is not None:
            assert row["token_s"] * (row["tokens"] - mine[0]["tokens"]) == pytest.approx(steady)
        assert (row["choice_protocol"] is not None) == (each.protocol == "auto")
    assert {row["window_auto"] for row in tables["answers"]} == {True, False}


def test_what_a_watch_saw_is_on_one_wall_clock(watched, tmp_path):
    tables = {name: each.to_pylist() for name, each in exported(tmp_path, "csv", watched).items()}
    (probe,) = tables["probes"]
    assert (probe["rtt_median_s"], probe["pings"], probe["lost"]) == (0.03, 3, 1)
    assert (probe["up_bound"], probe["down_bound"], probe["down_bps"]) == (True, False, None)
    assert (probe["signal_dbm"], probe["position_lat_deg"]) == (-71.5, 52.5)
    assert [row["rtt_s"] for row in tables["rtts"]] == [0.02, 0.03, 0.05]
    ended, open_ = tables["outages"]
    assert ended["began_wall_unix_s"] == 1.8e9 + 7200
    assert ended["began_unix_s"] == pytest.approx(1.8e9 + 3600)  # the clock was set forward by 1 h
    assert ended["began_time_utc"] == datetime(2027, 1, 15, 9, 0)
    assert (ended["took_s"], ended["reason"]) == (30.0, 'a "line"\nmore')
    assert (open_["ended_time_utc"], open_["took_s"]) == (None, None)
    assert json.loads(tables["rounds"][1]["notes"])["forgiven"] == 1


def documented(table):
    """The columns of a table in docs/field.md: type and unit by name."""
    text = (DOCS / "field.md").read_text(encoding="utf-8").split("\n## Export\n")[1]
    section = text.split(f"**Table `{table}`**")[1].split("\n**Table")[0].split("\n## ")[0]
    rows = {}
    for names, kind, unit in re.findall(r"^\| (`.*?) \| (\w+) \| ?(.*?) ?\|", section, re.M):
        rows |= {name: (kind, unit.strip()) for name in re.findall(r"`(\w+)`", names)}
    return rows


def test_the_documented_columns_are_those_of_the_tables():
    link = {name: row for name, row in documented("answers").items() if name.startswith("link_")}
    for table, columns in TABLES.items():
        rows = documented(table) | (link if table == "probes" else {})
        assert {name: kind for name, (kind, _) in rows.items()} == dict(columns)
        for name, (kind, unit) in rows.items():
            ending = name.rsplit("_", 1)[-1]
            if kind in ("number", "integer") and name != "tokens_per_s" and ending in UNITS:
                known = {UNITS[ending], "m/s"} if name.endswith("m_s") else {UNITS[ending]}
                assert unit in known, name


@pytest.mark.parametrize("version", LATER)
def test_every_older_format_is_exported(tmp_path, version):
    """Its files lack columns and tables, and so these values are missing."""
    measured = answer([chain(4, 1), chain(4, 2)], link=linked(rtt=0.02))
    path = recorded(tmp_path / "old.pilotfish", [measured])
    as_format(version, path)
    tables = exported(tmp_path / "tables", "parquet", path)
    assert [table.num_rows for table in tables.values()] == [1, 2, 0, 0, 0]
    (row,) = tables["answers"].to_pylist()
    assert (row["clock_s"], row["device"], row["link_rtt_s"]) == (None, None, 0.02)
    assert row["unix_s"] == row["wall_unix_s"] == 1.8e9


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_tables_are_not_overwritten_and_none_is_left_of_a_damaged_file(
    real, watched, tmp_path, capsys, form
):
    exported(tmp_path / "a", form, watched)
    before = (tmp_path / "a" / f"rtts.{form}").read_bytes()
    (tmp_path / "a" / f"answers.{form}").unlink()
    assert main(["field", "export", str(real), f"--{form}", str(tmp_path / "a")]) == 64
    assert "exists: name another folder" in capsys.readouterr().err
    assert (tmp_path / "a" / f"rtts.{form}").read_bytes() == before
    damaged = tmp_path / "damaged.pilotfish"
    damaged.write_bytes(real.read_bytes())
    with sqlite3.connect(damaged) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (FORMAT,)
        database.execute("UPDATE answers SET total_s = -1 WHERE id = 3")
    database.close()
    assert (
        main(["field", "export", str(damaged), f"--{form}", str(tmp_path / "b")])
        == RunFileError.exit_code
    )
    assert "answer 3 has -1 as its time" in capsys.readouterr().err
    assert [*(tmp_path / "b").iterdir()] == []


def test_a_run_that_is_named_twice_is_refused(watched, tmp_path, capsys):
    """Its rows would count double."""
    linked_path = tmp_path / "link.pilotfish"
    linked_path.symlink_to(watched)
    for again in (watched, watched.parent / ".." / watched.parent.name / watched.name, linked_path):
        command = ["field", "export", str(watched), str(again), "--csv", str(tmp_path / "out")]
        assert main(command) == 64
        assert f"{again} is named twice" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_without_pyarrow_the_command_to_install_it_is_told(watched, tmp_path):
    hidden = "import sys; sys.modules['pyarrow'] = None; from pilotfish.cli import main; "
    code = f"{hidden}sys.exit(main(sys.argv[1:]))"
    for form, exit_code in (("parquet", 64), ("csv", 0)):
        words = ["field", "export", str(watched), f"--{form}", str(tmp_path / form)]
        done = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, check=False
        )
        assert done.returncode == exit_code, done.stderr
        assert ("[table]" in done.stderr) == (form == "parquet")


# The notebook


def cells():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]


def test_the_notebook_has_twenty_lines_and_draws_a_real_run(real, tmp_path):
    lines = [line for cell in cells() for line in cell.splitlines() if line.strip()]
    assert len(lines) == 20
    exported(tmp_path / "walk", "parquet", real)
    drawn = "import matplotlib; matplotlib.use('Agg'); import matplotlib.pyplot as plt, itertools; "
    drawn += (
        "n = itertools.count(); plt.show = lambda: (plt.savefig(f'{next(n)}.png'), plt.close())"
    )
    code = "\n".join([drawn, *cells()])
    subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=tmp_path, check=True)
    assert [(tmp_path / f"{n}.png").stat().st_size > 8_000 for n in (0, 1)] == [True, True]


def test_the_notebook_runs_in_jupyter(real, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    exported(tmp_path / "walk", "parquet", real)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
