"""The files that list a target's nodes: what they may say, and a clear sentence for all else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pilotfish.base.errors import ConfigError, KeysError
from pilotfish.edge_runtime.targets.node_client import expect_encrypted
from pilotfish.edge_runtime.targets.node_list import (
    Federation,
    Pipeline,
    read_addresses,
    read_node_list,
)
from pilotfish.wire import keys
from pilotfish.wire.keys import EdgeKeys

ONE = '[[worker]]\naddress = "tcp://127.0.0.1:1"\n'
TWO = '[[worker]]\naddress = "tcp://127.0.0.1:2"\n'


def listing(folder: Path, text: str | bytes, mode: int = 0o644) -> Path:
    path = folder / "workers.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(mode)
    return path


def test_what_a_list_may_say(tmp_path: Path) -> None:
    read = read_node_list(listing(tmp_path, ONE), Federation)
    assert (read.late, read.kept, read.values, read.reconstruction) == (
        "wait",
        64,
        "fp16",
        "renormalise",
    )
    assert (read.late_s, read.give_up_s) == (10.0, 60.0)
    (item,) = read_addresses(tmp_path / "workers.toml", read.worker)
    assert item == ("tcp://127.0.0.1:1", "tcp://127.0.0.1:1", b"")

    public = keys.create(tmp_path / "theirs", keys.EDGE)
    text = f"""
        late = "drop"
        late_s = 1  # whole numbers will do
        give_up_s = 1.0
        kept = 7
        values = "levels"
        reconstruction = "spread"
        {ONE} name = "one"\n weight = 3\n key = "theirs/edge.pub"\n digest = "0123456789abcdef"
        {TWO}
    """
    read = read_node_list(listing(tmp_path, text), Federation)
    assert [node.weight for node in read.worker] == [3.0, 1.0]
    assert (read.kept, read.values, read.reconstruction) == (7, "levels", "spread")
    assert read.worker[0].digest == "0123456789abcdef"
    addresses = read_addresses(tmp_path / "workers.toml", read.worker)
    assert [place.name for place in addresses] == ["one", "tcp://127.0.0.1:2"]
    assert addresses[0].key == public.read_bytes().strip()
    assert (read.top_k, read.mass) == (7, 0.0)
    read = read_node_list(listing(tmp_path, f'kept = "auto"\n{ONE}'), Federation)
    assert (read.top_k, read.mass) == (4096, 0.99)
    text = f'kept = "auto"\nrho = 0.9\nkept_limit = 100\n{ONE}'
    read = read_node_list(listing(tmp_path, text), Federation)
    assert (read.top_k, read.mass) == (100, 0.9)
    pipeline = read_node_list(listing(tmp_path, ONE.replace("worker", "stage")), Pipeline)
    assert pipeline.states == "fp32"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "missing required field `worker`"),
        ("worker = []", "length >= 1"),
        (ONE * 65, "length <= 64"),
        ("worker = 3", "Expected `array`"),
        ("[[worker]]", "missing required field `address`"),
        (ONE + "addres = 3", "unknown field `addres`"),
        ("lat = 3\n" + ONE, "unknown field `lat`"),
        ('late = "never"\n' + ONE, "Invalid enum value 'never'"),
        ("kept = 0\n" + ONE, "`int` >= 1"),
        ("kept = 2.5\n" + ONE, "Expected `int | str`"),
        ('kept = "all"\n' + ONE, "Invalid enum value 'all'"),
        ("rho = 0.9\n" + ONE, 'only be used together with kept = "auto"'),
        ("kept = 9\nkept_limit = 10\n" + ONE, 'only be used together with kept = "auto"'),
        ('kept = "auto"\nrho = 1.0\n' + ONE, "`float` < 1.0"),
        ('kept = "auto"\nrho = 0.0\n' + ONE, "`float` > 0.0"),
        ('kept = "auto"\nkept_limit = 0\n' + ONE, "`int` >= 1"),
        (f"kept = {2**24}\n" + ONE, "`int` <= 16777215"),
        ('values = "fp8"\n' + ONE, "Invalid enum value 'fp8'"),
        ('reconstruction = "x"\n' + ONE, "Invalid enum value 'x'"),
        ("late_s = 0\n" + ONE, "`float` > 0.0"),
        ("late_s = -1\n" + ONE, "`float` > 0.0"),
        ("late_s = nan\n" + ONE, "`float` > 0.0"),
        ("give_up_s = inf\n" + ONE, "`float` <= 1000000.0"),
        ("late_s = 61\n" + ONE, "late_s is 61, but must not exceed give_up_s, which is 60"),
        (ONE + "weight = 0", "`float` > 0.0"),
        (ONE + "weight = nan", "`float` > 0.0"),
        (ONE + 'weight = "much"', "Expected `float`"),
        ("[[worker]", "workers.toml is not valid"),
        ("worker = [", "workers.toml is not valid"),
        (b"late = '\xff'\n" + ONE.encode(), "workers.toml is not valid"),
        (b"\0\1\2", "workers.toml is not valid"),
        ('late = "wait"\nlate = "drop"\n' + ONE, "workers.toml is not valid"),
    ],
)
def test_what_a_list_may_not_say(tmp_path: Path, text: str | bytes, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_node_list(listing(tmp_path, text), Federation)
    assert says in str(caught.value)
    assert "workers.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ONE + ONE, "uses the name of a node twice"),
        (ONE + "name = 'x'\n" + TWO + "name = 'x'", "give each node its own name"),
        (ONE + "name = 'x'\n" + ONE + "name = 'y'", "lists an address twice"),
    ],
)
def test_nodes_that_cannot_be_told_apart(tmp_path: Path, text: str, says: str) -> None:
    path = listing(tmp_path, text)
    with pytest.raises(ConfigError, match=says):
        read_addresses(path, read_node_list(path, Federation).worker)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_node_list(tmp_path / "nowhere.toml", Federation)
    with pytest.raises(ConfigError, match="Is a directory"):
        read_node_list(tmp_path, Federation)
    with pytest.raises(ConfigError, match="chmod o-w"):
        read_node_list(listing(tmp_path, ONE, 0o646), Federation)
    if os.geteuid() != 0:
        with pytest.raises(ConfigError, match="Permission denied"):
            read_node_list(listing(tmp_path, ONE, 0o000), Federation)


@pytest.mark.parametrize("key", ["nowhere.pub", ".", "nonsense.pub"])
def test_keys_that_are_none(tmp_path: Path, key: str) -> None:
    (tmp_path / "nonsense.pub").write_text("half a key")
    path = listing(tmp_path, f'{ONE} key = "{key}"')
    with pytest.raises(KeysError, match=str(tmp_path / key)):
        read_addresses(path, read_node_list(path, Federation).worker)


def test_what_leaves_the_machine_goes_to_known_keys_only(tmp_path: Path) -> None:
    public = keys.create(tmp_path / "theirs", keys.EDGE)
    keys.create(tmp_path / "ours", keys.EDGE)
    ours = EdgeKeys.load(tmp_path / "ours")
    known = f'key = "{public}"'

    def locked(address: str, key: str, our_value: EdgeKeys | None) -> None:
        path = listing(tmp_path, f'[[worker]]\naddress = "{address}"\n{key}')
        expect_encrypted(
            path, read_addresses(path, read_node_list(path, Federation).worker), our_value
        )

    locked("tcp://127.0.0.1:1", "", None)
    locked("tcp://10.0.0.1:1", known, ours)
    locked("tcp://127.0.0.1:1", known, ours)
    for address in ("tcp://10.0.0.1:1", "tcp://[fe80::1]:1", "tcp://example.org:1", "tcp://*:1"):
        with pytest.raises(KeysError, match="names no key for"):
            locked(address, "", None)
    with pytest.raises(KeysError, match="names no key for"):
        locked("tcp://127.0.0.1:1", "", ours)
    with pytest.raises(KeysError, match="this edge has no keys: use --keys"):
        locked("tcp://10.0.0.1:1", known, None)
