"""Flags follow from a struct: its types, bounds, defaults and help."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Annotated, Literal

import pytest
from msgspec import Meta, Struct, field

from pilotfish.base.settings import fixed_changes, setting
from pilotfish.cli.flags import add_flags, from_args


class Limits(Struct, frozen=True, kw_only=True):
    most: Annotated[int, Meta(ge=1, description="at once", extra={"live": True})] = 4
    rate: Annotated[float, Meta(gt=0, description="a second", extra={"metavar": "R"})] = 2.5


class Shared(Struct, frozen=True, kw_only=True):
    threads: Annotated[int, Meta(ge=1, description="default: all")] | None = None


class Daemon(Shared, frozen=True, kw_only=True):
    target: Annotated[Path, Meta(description="its 100% model", extra={"metavar": "DIR"})]
    drain_s: Annotated[float, Meta(ge=0, description="seconds")] = 5.0
    share: Annotated[float, Meta(ge=0, le=1, description="of it")] | None = None
    loss: Annotated[Literal["wait", "fail"], Meta(description="then")] = "wait"
    quiet: Annotated[bool, Meta(description="say less")] = False
    heads: Annotated[tuple[str, ...], Meta(description="one", extra={"repeat": True})] | None = None
    lambdas: Annotated[tuple[float, ...], Meta(description="λ,λ")] = (1.0,)
    window: Annotated[Annotated[int, Meta(ge=0)] | Literal["auto"], Meta(description="of it")] = 4
    memory: Annotated[int, Meta(gt=0, le=9000, description="b", extra={"form": "size"})] = 1
    rtt_s: Annotated[float, Meta(description="link", extra={"form": "duration"})] = 0
    keys: Annotated[
        Path, Meta(description="keys", extra={"form": "keys", "metavar": "DIR"})
    ] | None = None  # fmt: skip
    limits: Annotated[Limits, Meta(title="limits", description="by name")] = field(
        default_factory=Limits
    )
    plain: str = "no flag"


def parsed(*words: str, **defaults: object) -> Daemon:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, Daemon, **defaults)
    return from_args(parser.parse_args(["--target", "m", *words]), Daemon)


def test_what_is_not_given_is_as_the_struct_has_it() -> None:
    assert parsed() == Daemon(target=Path("m"))


def test_each_kind_of_value_is_read() -> None:
    result = parsed(
        "--drain", "2", "--share", ".5", "--loss", "fail", "--quiet", "--heads", "a", "--heads",
        "b", "--lambdas", "1,2.5", "--window", "auto", "--rtt", "50ms", "--keys", "k", "--most",
        "9", "--rate", "1e3", "--threads", "2",
    )  # fmt: skip
    assert result == Daemon(
        target=Path("m"), drain_s=2.0, share=0.5, loss="fail", quiet=True, heads=("a", "b"),
        lambdas=(1.0, 2.5), window="auto", rtt_s=0.05, keys=Path("k"),
        limits=Limits(most=9, rate=1000.0), threads=2,
    )  # fmt: skip


def test_a_command_may_have_defaults_of_its_own() -> None:
    assert parsed(loss="fail").loss == "fail"


def test_a_bare_flag_for_keys_is_the_default_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTFISH_KEYS", "/its/keys")
    assert parsed("--keys").keys == Path("/its/keys")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--most", "0"), "0 is not between 1 and 2147483647"),
        (("--most", "x"), "invalid number value"),
        (("--rate", "0"), "0 is not above 0"),
        (("--rate", "nan"), "nan is not above 0"),
        (("--rate", "inf"), "inf is not above 0"),
        (("--drain", "-1"), "-1 is not at least 0"),
        (("--share", "1.1"), "1.1 is not between 0 and 1"),
        (("--share", "nan"), "nan is not between 0 and 1"),
        (("--loss", "cry"), "invalid choice"),
        (("--window", "wide"), "invalid"),
        (("--window", "-1"), "-1 is not between"),
        (("--lambdas", "1,x"), "invalid"),
        (("--rtt", "50"), "write it as 50ms"),
    ],
)
def test_what_is_out_of_bounds_is_refused(words: tuple[str, ...], complaint: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=complaint):
        parsed(*words)


def pair(text: str) -> tuple[tuple[str, str], ...]:
    at = text.index(":")
    return ((text[:at], text[at + 1 :]),)


class Tool(Struct, frozen=True, kw_only=True):
    source: Annotated[str, setting("what", positional=True)]
    parts: Annotated[tuple[Path, ...], setting("some", positional=True)] = ()
    rate: Annotated[float, setting("up", exclusive="up")] = 1.0
    trace: Annotated[str, setting("or this", form=str, exclusive="up")] | None = None
    link: Annotated[bool, setting("not to look", flag="no-link")] = True
    command: Annotated[tuple[str, ...], setting("run", form="command")] = ()
    pairs: Annotated[
        tuple[tuple[str, ...], ...],
        setting("a:b", form=pair),
    ] = (("x", "y"),)


def tool(*words: str) -> Tool:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, Tool)
    return from_args(parser.parse_args(list(words)), Tool)


def test_a_commands_settings_may_be_places_choices_and_forms_of_their_own() -> None:
    assert tool("s") == Tool(source="s")
    assert tool("s", "a", "b").parts == (Path("a"), Path("b"))
    result = tool("s", "--no-link", "--trace", "t", "--command", "a 'b c'", "--pairs", "p:q")
    assert result == Tool(
        source="s", link=False, trace="t", command=("a", "b c"), pairs=(("p", "q"),)
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--rate", "2", "--trace", "t"), "not allowed with argument --rate"),
        (("--pairs", "none"), "substring not found"),
    ],
)
def test_what_excludes_another_and_what_a_form_refuses(
    words: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(argparse.ArgumentError, match=complaint):
        tool("s", *words)


def test_help_shows_defaults_once_and_groups_under_their_title() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Daemon)
    display = " ".join(parser.format_help().split())
    assert "--target DIR its 100% model --drain" in display
    assert "--drain S seconds (5)" in display
    assert "--threads N default: all" in display
    assert "limits: by name --most N at once (4) --rate R a second (2.5)" in display
    assert "plain" not in display


def test_what_is_not_marked_live_needs_a_restart() -> None:
    old = Daemon(target=Path("m"))
    new = Daemon(target=Path("m"), drain_s=1.0, limits=Limits(most=9, rate=3.0), plain="other")
    assert fixed_changes(old, new) == ["drain_s", "rate", "plain"]


@pytest.mark.parametrize("text", ["0", "0B", "10kB"])
def test_a_value_with_a_unit_keeps_its_bounds(text: str) -> None:
    assert parsed("--memory", "9kB").memory == 9000
    with pytest.raises(argparse.ArgumentError, match=f"{text} is not above 0 and at most 9000"):
        parsed("--memory", text)
