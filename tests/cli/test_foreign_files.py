"""Each file that others made is read or refused, by a typed error that names it; no traceback."""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pilotfish.base.errors import PilotfishError
from pilotfish.base.reading import read_content, reading_file
from pilotfish.cli import configuration, generation
from pilotfish.device_runtime.service.access import ApiKeys
from pilotfish.edge_runtime.relaxation_file import read_relaxation, write_relaxation
from pilotfish.edge_runtime.targets.node_list import Federation, read_node_list
from pilotfish.emulation.traces import Trace
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import EngineError
from pilotfish.engines.genai.genai_config import read_genai_config
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.export.export_errors import ExportError
from pilotfish.export.head_tokens import read_texts
from pilotfish.export.sources import open_source
from pilotfish.export.tokenizers.gpt2 import gpt2_tokenizer_json
from pilotfish.export.tokenizers.tekken import tekken_tokenizer_json
from pilotfish.lab.distill.prompt_selection import read_prompts as read_asked
from pilotfish.lab.distill.run_folder import RunFolder
from pilotfish.lab.field.target_answers import AnswerFile, AnswerHeader
from pilotfish.lab.judge.episodes import MiningRecord
from pilotfish.lab.judge.sweep_file import SweepFile
from pilotfish.lab.judge.tasks import Exact, read_task_questions
from pilotfish.lab.prompts import read_questions
from pilotfish.wire.keys import read_public
from tests.conftest import Pair
from tests.engines.test_damaged_files import RELAXATION
from tests.support.foreign_files import damages, no_files, wrong_values
from tests.support.small_checkpoints import SPECIAL, TOKENS, write_directory

INDEX = "model.safetensors.index.json"
TYPED = (EngineError, PilotfishError)
TOLD = {
    "tokenizer_config.json": {
        "bos_token": "t",
        "eos_token": {"content": SPECIAL, "special": True},
        "chat_template": [{"name": "default", "template": "x"}, {"name": "a", "template": "y"}],
    },
    "generation_config.json": {"eos_token_id": [259], "bos_token_id": 0},
    "special_tokens_map.json": {"eos_token": SPECIAL, "bos_token": {"content": "t"}},
    "chat_template.json": {"chat_template": "{{ messages }}"},
    "chat_template.jinja": "{{ messages }}",
}
TEKKEN = {
    "config": {"pattern": "[a-z]+", "version": "v3", "default_vocab_size": 259}
    | {"default_num_special_tokens": 3},
    "vocab": [
        {"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)
    ],
    "special_tokens": [{"rank": n, "token_str": t} for n, t in enumerate(("<unk>", "<s>", "</s>"))],
}
MESSAGES = {"messages": [{"role": "user", "content": "x"}], "kind": "z"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASKING = {"target": "t", "digest": "d", "max_tokens": 1, "temperature": 0.0, "seed": 1}
MINED = {"task": "t", "instruction": "i", "most": 1, "slack": 2, "right_only": True}


def learnt(path: Path) -> object:
    return RunFolder(path.parent).expect({"a": 1}, "settings")


def answered(path: Path) -> object:
    asking = AnswerHeader(prompts=["a"], **ASKING)
    with AnswerFile(path, asking, 10, resume=True) as file:
        return file.answers


def keyed(path: Path) -> object:
    if path.is_file():
        path.chmod(0o600)
    return ApiKeys.load(path)


def message_of(path: Path, **values: Any) -> argparse.Namespace:
    nothing = dict.fromkeys(("tools", "tool_choice", "think", "schema", "lark", "choice", "regex"))
    return argparse.Namespace(**{**nothing, **values})


# name of the file → its content, and what reads it
FILES: dict[str, tuple[Any, Callable[[Path], object]]] = {
    "list.toml": ('late = "drop"\n[[worker]]\naddress = "tcp://a:1"\n', lambda path: read_node_list(
        path, Federation)),
    "config.toml": ("threads = 1\n", lambda path: list(
        configuration._flags(path, {}))),
    "q.jsonl": ({"question": "a", "answer": "1"}, lambda path: read_task_questions(path, Exact())),
    "prompts.jsonl": (MESSAGES, lambda path: (read_questions(path), read_asked(path))),
    "texts.jsonl": ({"answer": "a"}, lambda path: list(read_texts(path))),
    "texts.txt": ("words\n", lambda path: list(read_texts(path))),
    "trace": ("1\n2\n", Trace.load),
    "a.pub": ("JTKVSB%%)wK0E.X)V>+}o?pNmC{O&4W4b!Ni{Lh6\n", read_public),
    "api-keys": ("alice:alice-key-0123456789\n", keyed),
    "tools.json": ([TOOL], lambda path: generation.talk_of(message_of(path, tools=path))),
    "schema.json": ({"a": 1}, lambda path: generation.constraint_of(message_of(path, schema=path))),
    "tekken.json": (TEKKEN, lambda path: tekken_tokenizer_json(path.parent)),
    "run.json": ({"settings": {"a": 1}}, learnt),
    "answers.jsonl": ({"prompts": ["a"], **ASKING}, answered),
    "mined.json": (
        MINED | {"drafter": {}, "target": {}}, lambda path: MiningRecord.read(path.parent)
    ),
    "sweep.jsonl": ({"pace": {"draft_s": 1.0, "verify_s": {"1": 1.0}}}, SweepFile),
}  # fmt: skip


def expect_typed(path: Path, read: Callable[[Path], object]) -> None:
    """Whatever becomes of the file, it is read, or refused by an error that names it."""
    whole, untyped, unnamed = path.read_bytes(), [], []

    def attempt(what: str) -> None:
        try:
            read(path)
        except TYPED as error:
            if path.name not in str(error) and path.parent.name not in str(error):
                unnamed.append((what, str(error)))
        except BaseException as error:
            untyped.append((what, repr(error)))

    spoilt = [*damages(whole)]
    if path.suffix in (".json", ".jsonl"):
        spoilt += wrong_values(whole)
    for what, data in spoilt:
        path.write_bytes(data)
        attempt(what)
    for what in no_files(path):
        attempt(what)
    path.write_bytes(whole)
    assert untyped == []
    assert unnamed == []


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_ones_own_or_anothers(name: str, tmp_path: Path) -> None:
    content, read = FILES[name]
    path = tmp_path / name
    path.write_text(content if isinstance(content, str) else json.dumps(content) + "\n")
    expect_typed(path, read)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", *TOLD])
def test_a_file_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "checkpoint", files=TOLD)
    expect_typed(folder / name, lambda path: open_source(str(path.parent)))


@pytest.mark.parametrize("name", [INDEX, "model-00001-of-00002.safetensors"])
def test_a_file_of_weights(name: str, tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "checkpoint", shards=2)
    expect_typed(folder / name, lambda path: open_source(str(path.parent)))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "vocab.json", "merges.txt"])
def test_a_file_of_an_old_tokenizer(name: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": {"content": "th"}})
    )
    few = [token for token in TOKENS if len(token) <= 2]
    (tmp_path / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(few)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nt h\n")
    expect_typed(tmp_path / name, lambda path: gpt2_tokenizer_json(path.parent))


def test_files_of_an_artifact(pair: Pair, tmp_path: Path) -> None:
    for name in os.listdir(pair.target):
        os.symlink(pair.target / name, tmp_path / name)
    for name in ("manifest.json", "tokenizer.json"):
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes((pair.target / name).read_bytes())
        expect_typed(
            tmp_path / name, lambda path: Vocabulary.from_artifact(Artifact.open(path.parent))
        )


def test_a_relaxation_and_what_genai_writes(tmp_path: Path) -> None:
    write_relaxation(tmp_path / "relaxation.json", RELAXATION)
    expect_typed(tmp_path / "relaxation.json", read_relaxation)
    path = tmp_path / "genai_config.json"
    path.write_text('{"model": {"type": "llama", "decoder": {"inputs": {}}}}')
    expect_typed(path, read_genai_config)


@pytest.mark.timeout(30)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "checkpoint")
    for name in ("chat_template.jinja", "generation_config.json", "config.json"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(ExportError, match=f"{name} cannot be read: it is not a regular file"):
            open_source(str(folder))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (
            UnicodeDecodeError("utf-8", b"a\xff", 1, 2, "invalid"),
            "not UTF-8 text: its byte 1 is 0xff",
        ),
        (RecursionError(), "nested too deeply"),
        (MemoryError(), "too large for this machine"),
        (
            ValueError("Exceeds the limit (4300 digits); use sys.set_int_max_str_digits() to"),
            "limit",
        ),
    ],
)
def test_what_reading_can_raise_is_one_error(fault: Exception, words: str) -> None:
    with pytest.raises(ExportError, match=words) as raised, reading_file(ExportError):
        raise fault
    assert "set_int" not in str(raised.value)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", INDEX])
def test_a_command_ends_with_a_sentence(name: str, tmp_path: Path) -> None:
    folder = write_directory(tmp_path / "checkpoint", files=TOLD)
    (folder / name).write_bytes(b'{"a\xff\xfe": 1}')
    words = ("export", "model", folder, "--out", tmp_path / "out", "--precision", "fp32")
    done = subprocess.run(
        [sys.executable, "-m", "pilotfish", *map(str, words)],
        capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 65
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("pilotfish: ")
    assert name in last
    assert "Traceback" not in done.stderr


def test_a_small_file_takes_little_memory(tmp_path: Path) -> None:
    """Whatever it may have at most: a service with little address space reads its manifest."""
    path = tmp_path / "small.json"
    path.write_text("{}")
    tracemalloc.start()
    try:
        assert read_content(path) == b"{}"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert read_content(Path("/proc/self/status")).startswith(b"Name:")
