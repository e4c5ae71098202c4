"""What people write may begin with a byte order mark: Windows' editors and shells put one there."""

from __future__ import annotations

import argparse
import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from pilotfish.base.reading import read_text
from pilotfish.cli import configuration, generation
from pilotfish.deploy import signatures
from pilotfish.device_runtime.service import openai
from pilotfish.device_runtime.service.access import ApiKeys
from pilotfish.device_runtime.service.responses import response_request
from pilotfish.device_runtime.service.tokens import detokenize_request
from pilotfish.edge_runtime.targets.node_list import Federation, read_node_list
from pilotfish.emulation.traces import Trace
from pilotfish.export.head_tokens import read_texts
from pilotfish.lab.prompts import read_prompts
from pilotfish.wire.keys import read_public
from pilotfish.wire.request import Request

KEY, _ = zmq.curve_keypair()


def constraint(**named: Path) -> Any:
    flags = {"schema": None, "lark": None, "choice": None, "regex": None, **named}
    return generation.constraint_of(argparse.Namespace(**flags))


def tools(path: Path) -> Any:
    return generation.talk_of(argparse.Namespace(tool_choice=None, think=None, tools=path))


FILES: dict[str, tuple[Callable[[Path], Any], bytes]] = {
    "settings.toml": (configuration.read_settings, b'draft = "d"\n'),
    "nodes.toml": (
        lambda path: read_node_list(path, Federation),
        b'[[worker]]\naddress = "tcp://127.0.0.1:1"\n',
    ),
    "schema.json": (lambda path: constraint(schema=path), b'{"type": "object"}'),
    "grammar.lark": (lambda path: constraint(lark=path), b'start: "a"'),
    "tools.json": (tools, b'[{"type": "function", "function": {"name": "f"}}]'),
    "device.pub": (read_public, KEY + b"\n"),
    "signer.pub": (signatures.read_public, signatures.public_file(bytes(32))),
    "api-keys": (lambda path: ApiKeys.load(path)._digests, b"me:0123456789abcdef\n"),
    "prompts.txt": (read_prompts, b"One?\nTwo?\n"),
    "answers.jsonl": (lambda path: list(read_texts(path)), b'{"text": "said"}\n'),
    "link.trace": (lambda path: list(Trace.load(path).times_ms), b"1\n5\n"),
    "notes.txt": (read_text, b"words\r\n"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_as_without_its_mark(tmp_path: Path, name: str) -> None:
    read, content = FILES[name]
    path = tmp_path / name
    results = []
    for data in (content, codecs.BOM_UTF8 + content):
        path.write_bytes(data)
        path.chmod(0o600)
        results.append(read(path))
    assert results[0] == results[1]
    assert results[0]


BODIES: dict[str, tuple[Callable[[bytes], Any], bytes]] = {
    "chat": (
        lambda body: openai.chat_request(body, Request()),
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}',
    ),
    "response": (
        lambda body: response_request(body, Request(), lambda _: []).completion,
        b'{"input": "x", "max_output_tokens": 4}',
    ),
    "detokenize": (detokenize_request, b'{"tokens": [1]}'),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_read_as_without_its_mark(name: str) -> None:
    read, body = BODIES[name]
    assert read(codecs.BOM_UTF8 + body) == read(body)
