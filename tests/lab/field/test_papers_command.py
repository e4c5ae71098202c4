"""``pilotfish field paper``, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from pilotfish.base.extras import install_command
from pilotfish.cli import main
from pilotfish.lab.drawing import PALETTE
from pilotfish.lab.field.papers import PAPERS
from tests.support.thinned import thinned

MOST_WORKERS = 2  # maximum number of pictures of a measured figure: one for each worker
MOST_PLOTS = 4  # maximum number of pictures that a paper draws from its closed forms


def python(program: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


def field_paper(*arguments: object, before: str = "") -> "subprocess.CompletedProcess[str]":
    """Run the command; ``before`` is Python that runs in its process ahead of it."""
    words = ["field", "paper", *map(str, arguments)]
    return python(
        f"import sys; {before}\nfrom pilotfish.cli import main\nsys.exit(main({words!r}))"
    )


def field_paper_here(
    capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """Run the command in this process: its exit status, and what it wrote to stdout and stderr."""
    try:
        code = main(["field", "paper", *map(str, arguments)])
    except SystemExit as ended:
        code = int(ended.code or 0)
    return code, *capsys.readouterr()


NO_MATPLOTLIB = "sys.modules['matplotlib'] = None"


def refused_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_dssd_table_1_as_json():
    done = subprocess.run(
        [sys.executable, "-m", "pilotfish", "field", "paper", "dssd", "--json", "-"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["table1"]
    assert len(cells) == 24
    assert all(cell.keys() == {"gamma", "alpha", "fraction", "time_ms"} for cell in cells)
    assert cells[0] == {"gamma": 2, "alpha": 0.5, "fraction": 0.75, "time_ms": 26.0}
    assert cells[-1] == {"gamma": 8, "alpha": 0.99, "fraction": 0.08, "time_ms": 20.62}


def test_tables_and_json_need_no_matplotlib(tmp_path: Path):
    done = python(
        f"import sys; {NO_MATPLOTLIB}; from pilotfish.cli import main\n"
        f"for name in {list(PAPERS)}:\n"
        f"    assert main(['field', 'paper', name, '--json', {str(tmp_path)!r} + '/' + name]) == 0"
    )
    assert done.returncode == 0, done.stderr
    for name, paper in PAPERS.items():
        text = (tmp_path / name).read_text(encoding="utf-8")
        figures = json.loads(text, parse_constant=refused_constant)
        assert {constant["whose"] for constant in figures["constants"]} == {"paper", "ours"}
        assert figures["remarks"]
        for sheet in paper.sheets():
            assert sheet.title in done.stdout
            assert len(figures[sheet.key]) == len(sheet.rows) > 0
            assert all(sheet.columns.keys() <= row.keys() for row in figures[sheet.key])


@pytest.mark.parametrize("name", thinned(PAPERS, ["wisv"]))
def test_plots_are_drawn_and_named(name: str, tmp_path: Path, capsys):
    folder = tmp_path / "new" / "plots"
    code, figures, reply = field_paper_here(capsys, name, "--json", "-", "--out", folder)
    assert code == 0, reply
    assert json.loads(figures)["paper"] == PAPERS[name].title
    pictures = sorted(folder.iterdir())
    measured = [path for path in pictures if path.stem.endswith("_measured")]
    drawn = tuple(f"{name}_{each.key}" for each in PAPERS[name].measurable if each.draw is not None)
    assert all(path.stem.startswith(drawn) for path in measured)
    assert len(measured) <= MOST_WORKERS * len(drawn)
    assert 2 <= len(pictures) - len(measured) <= MOST_PLOTS
    for picture in pictures:
        assert str(picture) in reply
        pixels = imread(picture)[:, :, :3]
        for colour in PALETTE[:2]:  # a line's sample in the legend has some 200
            assert np.isclose(pixels, to_rgb(colour), atol=0.01).all(axis=2).sum() > 1000


def test_plots_without_matplotlib_name_the_extra(tmp_path: Path):
    done = field_paper("dssd", "--json", "-", "--out", tmp_path, before=NO_MATPLOTLIB)
    assert done.returncode == 64
    assert install_command("field") in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_unknown_paper_is_refused_with_the_known_ones(capsys):
    code, _, reply = field_paper_here(capsys, "attention")
    assert code == 2
    assert all(name in reply.splitlines()[-1] for name in PAPERS)


@pytest.mark.parametrize("below", [".", "plots"])
def test_a_folder_that_cannot_be_made_is_one_line(below: str, tmp_path: Path, capsys):
    (tmp_path / "taken").write_text("not a folder")
    out = tmp_path / "taken" / below
    code, _, reply = field_paper_here(capsys, "tslt", "--json", "-", "--out", out)
    assert code == 74
    assert len(reply.splitlines()) == 1
    assert "taken" in reply


def test_json_to_a_missing_folder_is_one_line(tmp_path: Path, capsys):
    out = tmp_path / "missing" / "figures.json"
    code, _, reply = field_paper_here(capsys, "tslt", "--json", out)
    assert code == 74
    assert len(reply.splitlines()) == 1


def test_help_teaches_with_an_example():
    done = field_paper("--help")
    assert done.returncode == 0
    assert "pilotfish field paper dssd --out plots" in done.stdout
    assert "FIGURE stands right after PAPER" in done.stdout
