"""The README's recording: a real chat in a pseudo-terminal, texts link the emulator breaks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.conftest import Pair

ROOT = Path(__file__).parents[2]
TEXT = "{http://www.w3.org/2000/svg}text"


@pytest.fixture(scope="module")
def drawn(long_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> ElementTree.Element:
    """A recording of the tiny pair."""
    out = tmp_path_factory.mktemp("recording") / "chat.svg"
    command = [sys.executable, "benchmarks/recording.py", "--out", out, "--draft", long_pair.draft,
               "--target", long_pair.target, "--question", "abc", "--tokens", 400,
               "--after", 20, "--cut", 0.4]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return ElementTree.parse(out).getroot()


def origins(drawing: ElementTree.Element) -> list[str]:
    """Whose texts stand there, in their order: the drafter's alone, or the target's."""
    texts = [text for text in drawing.iter(TEXT) if re.search(r"\bt\d+", text.get("class", ""))]
    return ["local" if "magenta" in text.get("class", "").split() else "target" for text in texts]


def test_the_drafter_goes_on_alone_and_the_target_takes_over_again(
    drawn: ElementTree.Element,
) -> None:
    texts = origins(drawn)
    first, last = texts.index("local"), len(texts) - 1 - texts[::-1].index("local")
    assert "target" in texts[:first]
    assert "target" in texts[last:]


def test_each_text_appears_when_it_was_written(drawn: ElementTree.Element) -> None:
    style = next(drawn.iter("{http://www.w3.org/2000/svg}style")).text or ""
    times = [
        (int(number), float(share))
        for number, share in re.findall(
            r"@keyframes t(\d+)\{0%\{visibility:hidden\}([\d.]+)%", style
        )
    ]
    assert len(times) > 5
    assert times == sorted(times)
    assert [share for _, share in times] == sorted(share for _, share in times)


def test_the_shipped_recording_is_one_of_these() -> None:
    texts = origins(ElementTree.parse(ROOT / "docs" / "link-loss.svg").getroot())
    first, last = texts.index("local"), len(texts) - 1 - texts[::-1].index("local")
    assert "target" in texts[:first]
    assert "target" in texts[last:]
