"""Mutated configurations: each is read, or refused in one short sentence, in little memory.

    python -m tests.config_fuzz [--count N] [--seed N] [--class NAME]

A case is a folder with a class's tiny weights, and a config.json, an index of tensors or a GGUF
file's metadata with one to four mutations: keys that are absent, null, of another type, huge,
negative, infinite, nested, unknown, renamed or stated twice. Each case is opened as the export
opens it. It fails for any exception other than an ExportError, for a message of several lines or of
more than MOST_LETTERS letters (more if it lists keys), and for allocations of more than MOST_BYTES:
the process may not get more address space.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import re
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from math import inf, nan, prod
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from safetensors.numpy import save_file

from pilotfish.export.architectures import ARCHITECTURES, Names
from pilotfish.export.export_errors import ExportError
from pilotfish.export.sources.gguf import GgufSource
from pilotfish.export.sources.huggingface import DirectorySource
from pilotfish.export.sources.huggingface_config import Description
from pilotfish.export.sources.tensor_names import find_weights, stored_name
from pilotfish.export.sources.wrapped import text_config
from pilotfish.export.weight_recorder import shapes
from tests.reference.families import FAMILIES
from tests.reference.test_experts import CLASSES
from tests.support.bounded import limited
from tests.support.small_checkpoints import LLAMA, tokenizer_json, write_gguf

MOST_BYTES = 64 << 20
MOST_LETTERS = 400
DEEP = 3_000
WHOLE = "model.safetensors"

NUMBERS: tuple[Any, ...] = (
    0, 1, 2, 3, 7, -1, -(2**31), 10**9, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64,
    10**30, 10**400, 0.0, -0.0, 0.5, -1.5, 1e-310, 1e30, 1e308, -1e308, inf, -inf, nan,
)  # fmt: skip
OTHERS: tuple[Any, ...] = (
    None, True, False, "", "auto", "silu", "true", "x" * 100_000, "\ud800", "a\nb\x1b[31m", "\0",
    [], {}, [[]], [None], [0], [{}], {"": 0}, {"a": {"b": [1]}}, [1.5] * 5000, ["full_attention"],
    ["sliding_attention", "full_attention"], ["x"] * 3, list(range(4000)), [10**400],
    {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "longrope"}, {"type": "linear"},
    {"__float__": "Infinity"}, [0.0, {"__float__": "Infinity"}], {"quant_method": "fp8"},
)  # fmt: skip
# Keys that change how the rest is read, with plausible values.
ADDED: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (
        {"quant_method": "gptq", "bits": 4}, {"quant_method": "awq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
            "group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}}},
        {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"group_size": 64, "bits": 4},
        {"quant_method": "mxfp4"},
    ),
    "quantization": ({"group_size": 64, "bits": 4}, {"mode": "mxfp4"}),
    "text_config": ({}, LLAMA, {"model_type": "qwen2"}),
    "model_type": (*ARCHITECTURES, "gemma3", "qwen3_vl", "mamba3", "qwen4_moe"),
    "rope_scaling": (
        {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "linear", "factor": 2},
        {"rope_type": "dynamic", "alpha": 1000.0}, {"rope_type": "llama3", "factor": 8.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    ),
    "pard_token": (3, -1, 10**9), "ptd_token_id": (5,), "para_num": (8, 10**9),
    "dflash_config": ({"mask_token_id": 3, "causal": True}, []),
    "per_layer_config": ({"0": {"head_dim": 10**9}}, {"x": 1}, {"9": {}}),
    "head_dim": NUMBERS, "num_key_value_heads": NUMBERS, "sliding_window": NUMBERS,
    "partial_rotary_factor": NUMBERS, "num_experts": NUMBERS, "layer_types": OTHERS,
    "max_position_embeddings": NUMBERS, "num_hidden_layers": NUMBERS,
}  # fmt: skip


# --- mutations -----------------------------------------------------------------------------------


def any_value(random: Random) -> Any:
    if random.random() < 0.03:
        return nest(random.choice((DEEP, 90)), random.random() < 0.5)
    return copy.deepcopy(random.choice(random.choice((NUMBERS, OTHERS))))


def nest(depth: int, in_lists: bool) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if in_lists else {"a": value}
    return value


def places(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield each container in a value with each of its keys or indices."""
    if isinstance(value, dict | list) and depth < 5:
        for key in list(value) if isinstance(value, dict) else range(min(len(value), 8)):
            yield value, key
            yield from places(value[key], depth + 1)


def mutate(values: dict[str, Any], random: Random) -> None:
    """Change a configuration in one place."""
    kind = random.randrange(10)
    if kind == 0:
        key = random.choice(list(ADDED))
        values[key] = copy.deepcopy(random.choice(ADDED[key]))
        return
    if kind == 1:
        other = random.choice(list(ARCHITECTURES.values()))
        values[random.choice(list(other.keys))] = any_value(random)
        return
    if kind == 2:
        values[random.choice(("unknown", "n\nl", "x" * 5000, "", "auto_map"))] = any_value(random)
        return
    holder, key = random.choice([*places(values)] or [(values, "model_type")])
    if kind == 3:
        del holder[key]
    elif kind == 4:
        holder[key] = None
    elif kind == 5 and isinstance(holder, dict) and isinstance(key, str):
        holder[random.choice((key + "s", key.upper(), "n_" + key))] = holder.pop(key)
    elif kind == 6 and isinstance(holder, dict):
        holder[key] = holder[random.choice(list(holder))]
    elif kind == 7:
        holder[key] = random.choice(NUMBERS)
    else:
        holder[key] = any_value(random)


def as_json(values: Any, random: Random) -> str:
    """Write JSON as Python does, at times with a key twice or with damaged text."""
    try:
        text = json.dumps(values)
    except RecursionError:
        depth = 100_000
        text = '{"a":' * depth + "1" + "}" * depth
    chance = random.random()
    if chance < 0.02 and isinstance(values, dict) and values:
        key = random.choice(list(values))
        text = f"{text[:-1]}, {json.dumps(key)}: {json.dumps(random.choice(NUMBERS))}}}"
    elif chance < 0.03:
        at = random.randrange(len(text))
        text = text[:at] + random.choice(("", "{", "\\ud800", "\x00", ",", "]")) + text[at + 1 :]
    return text


# --- folders -------------------------------------------------------------------------------------


def base_settings() -> dict[str, dict[str, Any]]:
    """Return tiny configurations of all classes, those of text models without their wrapper."""
    stated = {name: (each.model_type, each.settings) for name, each in FAMILIES.items()}
    bases = {}
    for name, (model_type, settings) in {**stated, **CLASSES}.items():
        values = json.loads(json.dumps({"model_type": model_type, **settings}))
        bases[name] = text_config(values, name) or values
    return bases


def is_turned(names: Names, name: str, shape: tuple[int, ...]) -> bool:
    """Whether a checkpoint stores this weight as [in, out]."""
    return names.transposed and len(shape) == 2 and f".{names.stack}." in name


def write_folder(folder: Path, values: Mapping[str, Any]) -> Path:
    """Write weights of zeros, by our names where a checkpoint may use them, and a tokenizer."""
    folder.mkdir()
    described = Description(values, "it", "it")
    config, names = described.config, described.architecture.names
    sizes: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes(config).items():
        published = stored_name(names, name)
        parts = find_weights(names, {published: shape})
        if name not in parts or parts[name].expert is not None:
            published = name  # the published tensor has the weights of all experts
        rows = sizes.get(published, (0,))[0] + shape[0]
        sizes[published] = (rows, *shape[1:])
    tensors = {
        name: np.zeros(shape[::-1] if is_turned(names, name, shape) else shape, np.float16)
        for name, shape in sizes.items()
    }
    save_file(tensors, folder / WHOLE)
    (folder / "tokenizer.json").write_text(tokenizer_json(), "utf-8")
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def silent(label: str, done: int, total: int | None) -> None:
    """No progress."""


def mutated_header(folder: Path, model_type: str, random: Random) -> bytes:
    """Return a safetensors file whose index was changed, with few bytes of weights."""
    data = (folder / WHOLE).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header.pop("__metadata__", None)
    names = ARCHITECTURES[model_type].names
    for _ in range(random.randint(1, 3)):
        name = random.choice(list(header))
        entry = header[name]
        change = random.randrange(5)
        if change == 0:
            entry["shape"] = random.choice(
                ([2**40, 0], [0], [], [0, 2**62], [1] * 9, [2**31, 0, 4])
            )
            entry["data_offsets"] = [0, prod(entry["shape"]) * 2]
        elif change == 1:
            entry["dtype"] = random.choice(("U8", "I32", "F8_E4M3", "BOOL", "F64", "X", "U32"))
        elif change == 2:
            layer = f"model.layers.{random.choice((0, 1, 10**9, 2**70))}."
            other = random.choice((*names.stacked, *names.fused, *names.modules, *names.tensors,
                                   *names.listed, "x", "mlp.experts.7.up_proj"))  # fmt: skip
            kinds = ("", ".weight", ".qweight", ".scales", "_blocks", ".0.weight", ".9999.weight")
            header[layer + other + random.choice(kinds)] = entry
        elif change == 3 and len(header) > 1:
            del header[name]
        else:
            header[random.choice((name + "\n", "lm_head.weight", "x" * 3000, ""))] = entry
    at = 0
    for entry in header.values():
        size = {"F64": 8, "I32": 4, "U32": 4, "F16": 2}.get(entry["dtype"], 1) * prod(
            entry["shape"]
        )
        entry["data_offsets"] = [at, at + size]
        at += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(min(at, 1 << 22))


# --- GGUF ----------------------------------------------------------------------------------------


def gguf_value(value: Any) -> bytes:
    """Write a value with its type, as GGUF has it."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        bound = max(min(value, 2**64 - 1), -(2**63))
        return struct.pack("<Iq", 11, bound) if bound < 0 else struct.pack("<IQ", 10, bound)
    if isinstance(value, float):
        return struct.pack("<Id", 12, value)
    if isinstance(value, list):
        items = [gguf_value(each) for each in value if not isinstance(each, list)]
        items = items or [struct.pack("<IB", 7, 0)]
        kind = items[0][:4]
        same = [item[4:] for item in items if item[:4] == kind]
        return struct.pack("<I", 9) + kind + struct.pack("<Q", len(same)) + b"".join(same)
    text = str(value if isinstance(value, str) else "{}").encode("utf-8", "surrogatepass")
    return struct.pack("<IQ", 8, len(text)) + text


def mutated_gguf(path: Path, random: Random) -> bytes:
    """Return a GGUF file with changed metadata; the weights are those of the file at `path`."""
    source = GgufSource(path, silent)
    file = source._file
    metadata: dict[str, Any] = dict(file.metadata)
    for _ in range(random.randint(1, 4)):
        key = random.choice(list(metadata))
        change = random.randrange(5)
        if change == 0:
            del metadata[key]
        elif change == 1:
            metadata[random.choice(("llama.unknown", "split.count", "general.type", "x\n", "clip.x",
                                    "llama.rope.scaling.type", "llama.expert_count",
                                    "llama.attention.key_length"))] = any_value(random)  # fmt: skip
        else:
            metadata[key] = any_value(random)
    data = bytearray(struct.pack("<4sIQQ", b"GGUF", 3, len(file.tensors), len(metadata)))
    for key, value in metadata.items():
        name = key.encode("utf-8", "surrogatepass")
        data += struct.pack("<Q", len(name)) + name + gguf_value(value)
    start = 0
    for name, info in file.tensors.items():
        data += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(info.shape))
        shape = [random.choice(NUMBERS[:12]) if random.random() < 0.001 else n for n in info.shape]
        data += b"".join(struct.pack("<q", n) for n in reversed(shape))
        data += struct.pack("<IQ", GGMLQuantizationType[info.kind], start)
        start += -(-info.size // 32) * 32
    return bytes(data) + bytes(start + 32)


# --- cases ---------------------------------------------------------------------------------------


class Fuzzer:
    """Makes cases in a folder; `outcomes` counts them by what became of them."""

    def __init__(self, folder: Path, seed: int, only: str = "") -> None:
        self.random = Random(seed)
        self.outcomes: Counter[str] = Counter()
        self._bases = {name: each for name, each in base_settings().items() if only in name}
        self._folders = {
            name: write_folder(folder / name.replace("/", "_"), values)
            for name, values in self._bases.items()
        }
        for each in self._folders.values():
            DirectorySource(each, silent)
        self._gguf = write_gguf(folder / "m.gguf", LLAMA)
        self._case = folder / "case.gguf"
        self.text = ""

    def run_one(self) -> str | None:
        """Run one case; return what is wrong with its outcome."""
        random = self.random
        name = random.choice(list(self._bases))
        folder, weights = self._folders[name], None
        chance = random.random()
        if chance < 0.1:
            self.text = "gguf"
            self._case.write_bytes(mutated_gguf(self._gguf, random))
            return self._open(lambda: GgufSource(self._case, silent))
        values = copy.deepcopy(self._bases[name])
        if chance < 0.25:
            weights = (folder / WHOLE).read_bytes()
            (folder / WHOLE).write_bytes(mutated_header(folder, values["model_type"], random))
        for _ in range(random.randint(0 if weights else 1, 4)):
            mutate(values, random)
        self.text = as_json(values, random)
        (folder / "config.json").write_text(self.text, "utf-8", "surrogatepass")
        try:
            return self._open(lambda: DirectorySource(folder, silent))
        finally:
            if weights is not None:
                (folder / WHOLE).write_bytes(weights)

    def _open(self, opening: Any) -> str | None:
        try:
            with limited(MOST_BYTES):
                opening()
        except ExportError as error:
            message = str(error)
            cause = re.sub(r"\S*/\S*|[\d'\"\[\]{}]+", "", message)[:60]
            self.outcomes[f"refused: {cause}"] += 1
            if not message.isprintable():
                return f"a message that cannot be printed on a line: {message!r}"[:3000]
            listed = "unknown keys" in message or "supported are" in message
            if len(message) > MOST_LETTERS * (5 if listed else 1):
                return f"a message of {len(message)} letters: {message[:1500]}"
            if "too large for this machine" in message:
                return message
            return None
        except Exception:  # this is what the cases look for
            return traceback.format_exc()
        self.outcomes["read"] += 1
        return None


def main() -> int:
    """Run cases, and print those that fail, and how many had which outcome."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=10_000, help="number of cases")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--class", default="", dest="only", help="part of a class's name")
    parser.add_argument("--show", type=int, default=10, help="failures to print in full")
    settings = parser.parse_args()
    logging.disable(logging.CRITICAL)
    failures: Counter[str] = Counter()
    began = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        fuzzer = Fuzzer(Path(name), settings.seed, settings.only)
        for number in range(settings.count):
            problem = fuzzer.run_one()
            if problem is None:
                continue
            kind = re.sub(r"\S*/\S*|\d+", "", problem.strip().splitlines()[-1])[:70]
            failures[kind] += 1
            if failures[kind] == 1 and len(failures) <= settings.show:
                print(f"--- case {number}: {fuzzer.text[:600]}\n{problem}", flush=True)
    for cause, count in fuzzer.outcomes.most_common(40):
        print(f"{count:7} {cause}")
    print(
        f"{settings.count} cases, {len(fuzzer.outcomes)} outcomes, {sum(failures.values())} "
        f"failures of {len(failures)} kinds, {time.process_time() - began:.0f} s of CPU time"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
