"""A caller whose code is checked by mypy --strict can give every protocol its own options."""

from __future__ import annotations

from pathlib import Path

import pytest

from pilotfish import Auto, Device
from pilotfish.wire.protocols.adaptive import RelaxationOptions

CALLER = """\
from pilotfish import AsyncDevice, Device, Generation
from pilotfish.wire.protocols.adaptive import RelaxationOptions
from pilotfish.wire.protocols.decision_head import JudgingOptions

with Device("drafter", "tcp://127.0.0.1:7077") as device:
    answer = device.generate(
        "Hello", protocol="adaptive", temperature=1.0, options=RelaxationOptions(tau=0.3)
    )
    text: str = answer.text
    judging = JudgingOptions(hidden="int4")
    for piece in device.stream("Hello", protocol="wisv-full", options=judging):
        text += piece.text


async def ask() -> Generation | None:
    async with AsyncDevice("drafter", "tcp://127.0.0.1:7077", lanes=2) as device:
        text: str = (await device.generate("Hello", protocol="coupled", seed=3)).text
        async with device.stream("Hello", options=RelaxationOptions(tau=0.3)) as pieces:
            async for piece in pieces:
                text += piece.text
        return pieces.generation
"""


def test_a_struct_says_what_keywords_say(device: Device) -> None:
    requests = {"protocol": "adaptive", "temperature": 1.0, "seed": 3, "max_tokens": 24}
    struct, keywords, strict = (
        device.generate([3, 1, 4], **requests, **ours)
        for ours in ({"options": RelaxationOptions(tau=0.9)}, {"tau": 0.9}, {"tau": 0.0})
    )
    assert struct.tokens == keywords.tokens
    assert struct.notes == keywords.notes != strict.notes
    nearer = device.generate([3, 1, 4], **requests, options=RelaxationOptions(tau=0.9), tau=0.0)
    assert nearer.tokens == strict.tokens  # a keyword wins


def test_auto_takes_it_too(device: Device) -> None:
    among = Auto(among=["adaptive"], lossy=True)
    requests = {"protocol": among, "window": 4, "temperature": 1.0, "seed": 3, "max_tokens": 24}
    result = [
        device.generate([3, 1, 4], **requests, options=RelaxationOptions(tau=tau))
        for tau in (0.9, 0)
    ]
    assert result[0].notes["deviation"] > result[1].notes["deviation"] == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("", ""), ""),
        (("RelaxationOptions(tau=0.3)", "RelaxationOptions(tua=0.3)"), 'keyword argument "tua"'),
        (("RelaxationOptions(tau=0.3)", 'RelaxationOptions(tau="a")'), "incompatible type"),
        (("JudgingOptions(hidden", "dict(hidden"), "incompatible type"),
        (("lanes=2", "lane=2"), 'keyword argument "lane"'),
        (("lanes=2", 'on_link_loss="never"'), "incompatible type"),
        (("seed=3", 'seed="three"'), "incompatible type"),
        (("(await device.generate(", "(device.generate("), "has no attribute"),
    ],
)
def test_mypy_knows_them(tmp_path: Path, change: tuple[str, str], complaint: str) -> None:
    from mypy import api

    caller = tmp_path / "caller.py"
    caller.write_text(CALLER.replace(*change))
    info, trouble, code = api.run(["--strict", "--config-file=pyproject.toml", str(caller)])
    assert (code, trouble) == (int(bool(complaint)), ""), info
    assert complaint in info
