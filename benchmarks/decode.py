"""How long one pass takes: Pilotfish against onnxruntime-genai's graph and llama.cpp.

    python benchmarks/decode.py [--json PATH] [--quick] [--source SOURCE] [--work DIR]

One slot, S new tokens on a context of so many, logits of all S positions, for fp32 and int4
(llama.cpp: f32 and Q4_1). All engines run in turn within each repetition, so that a noisy machine
is noisy for all. Peers are optional and skipped by name:

    onnxruntime-genai   pip install onnxruntime-genai onnx onnx-ir torch transformers
    llama.cpp           pip install llama-cpp-python

Goal: at most 1.05 times the faster peer, for every precision, context and S.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from engines.decoder import Decoder, Pass
from export.model import export_model
from export.sources import WeightSource, open_source

CONTEXTS = (200, 1500)
WINDOWS = (1, 4, 8, 16)
GOAL = 1.05
SETTLE_S = 0.06  # onnxruntime's workers spin for 40 ms after a run, on everyone's cores
console = Console(stderr=True)

Step = Callable[[int], None]  # runs S new tokens on the prepared context, and forgets them


class Pilotfish:
    """The engine under test."""

    name = "pilotfish"

    def __init__(self, source: WeightSource, precision: str, work: Path) -> None:
        out = work / f"pilotfish-{precision}"
        if not out.exists():
            export_model(source, out, precision=precision)
        self._decoder = Decoder(out)
        self.detail = self._decoder.artifact.manifest.dialect

    def prepare(self, context: int, tokens: np.ndarray) -> Step:
        decoder = self._decoder
        decoder.rollback(0, 0)
        decoder.prefill(0, tokens[:context])

        def step(size: int) -> None:
            decoder.forward([Pass(0, tokens[context : context + size])])
            decoder.rollback(0, context)

        return step


class GenAI:
    """The graph that onnxruntime-genai's builder makes, run by onnxruntime with bound buffers."""

    name = "genai"

    def __init__(self, source: WeightSource, precision: str, work: Path) -> None:
        import onnxruntime

        importlib.import_module("onnxruntime_genai.models.builder")  # says what is missing
        out = work / f"genai-{precision}"
        if not (out / "model.onnx").exists():
            directory = huggingface_directory(source, work)
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "onnxruntime_genai.models.builder",
                    "-i",
                    directory,
                    "-o",
                    out,
                    "-p",
                    precision,
                    "-e",
                    "cpu",
                    "-c",
                    work / "cache",
                ],
                check=True,
                capture_output=True,
            )
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        self._session = onnxruntime.InferenceSession(
            str(out / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._inputs = {item.name for item in self._session.get_inputs()}
        self._config = source.config
        self.detail = "GroupQueryAttention"

    def prepare(self, context: int, tokens: np.ndarray) -> Step:
        binding = self._session.io_binding()
        alive: dict[str, np.ndarray] = {}

        def bind(bind_one: Callable[..., None], name: str, array: np.ndarray) -> None:
            bind_one(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

        for name in self._inputs:
            if name.startswith("past_key_values"):
                shape = (1, self._config.kv_heads, context + 64, self._config.head_dim)
                alive[name] = np.zeros(shape, np.float32)
                bind(binding.bind_input, name, alive[name])
                bind(binding.bind_output, name.replace("past_key_values", "present"), alive[name])

        def run(start: int, size: int) -> None:
            feeds = {
                "input_ids": tokens[None, start : start + size],
                "attention_mask": np.ones((1, start + size), np.int64),
                "position_ids": np.arange(start, start + size)[None],
            }
            for name in feeds.keys() & self._inputs:
                alive[name] = np.ascontiguousarray(feeds[name])
                bind(binding.bind_input, name, alive[name])
            alive["logits"] = np.empty((1, size, self._config.vocab_size), np.float32)
            bind(binding.bind_output, "logits", alive["logits"])
            self._session.run_with_iobinding(binding)

        for start in range(0, context, 100):
            run(start, min(100, context - start))
        return lambda size: run(context, size)


class LlamaCpp:
    """llama.cpp through its C interface."""

    name = "llama.cpp"

    def __init__(self, source: WeightSource, precision: str, work: Path) -> None:
        import llama_cpp

        self._api = llama_cpp
        kind = {"fp32": "f32", "int4": "q4_1"}[precision]
        path = work / f"llama-{kind}.gguf"
        if not path.exists():
            plain = work / "llama-f32.gguf"
            if not plain.exists():
                write_gguf(source, plain)
            if kind != "f32":
                parameters = llama_cpp.llama_model_quantize_default_params()
                parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_1
                llama_cpp.llama_model_quantize(
                    str(plain).encode(), str(path).encode(), ctypes.byref(parameters)
                )
        self._llama = llama_cpp.Llama(
            str(path),
            n_ctx=2048,
            n_batch=512,
            logits_all=True,
            verbose=False,
            type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32,
        )
        self._batch = llama_cpp.llama_batch_init(512, 0, 1)
        self._vocabulary = source.config.vocab_size
        self.detail = kind

    def prepare(self, context: int, tokens: np.ndarray) -> Step:
        api, state = self._api, self._llama.ctx
        memory = api.llama_get_memory(state)

        def run(start: int, size: int) -> None:
            batch = self._batch
            batch.n_tokens = size
            for i in range(size):
                batch.token[i] = int(tokens[start + i])
                batch.pos[i] = start + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = 0
                batch.logits[i] = True
            if api.llama_decode(state, batch):
                raise RuntimeError("llama_decode failed")
            np.ctypeslib.as_array(api.llama_get_logits(state), (size, self._vocabulary))

        def step(size: int) -> None:
            run(context, size)
            api.llama_memory_seq_rm(memory, 0, context, -1)

        api.llama_memory_clear(memory, True)
        for start in range(0, context, 500):
            run(start, min(500, context - start))
        return step


def huggingface_directory(source: WeightSource, work: Path) -> Path:
    """The source as a Hugging Face directory, which genai's builder reads."""
    from safetensors.numpy import save_file

    out = work / "huggingface"
    if out.exists():
        return out
    out.mkdir()
    config = source.config
    save_file(
        {name: source.tensor(name) for name in source.names()},
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    (out / "tokenizer.json").write_text(source.tokenizer_json)
    (out / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    (out / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": config.hidden,
                "intermediate_size": config.intermediate,
                "num_hidden_layers": config.layers,
                "num_attention_heads": config.heads,
                "num_key_value_heads": config.kv_heads,
                "head_dim": config.head_dim,
                "max_position_embeddings": config.context,
                "rms_norm_eps": config.norm_eps,
                "rope_theta": config.rope_theta,
                "vocab_size": config.vocab_size,
                "tie_word_embeddings": config.tied,
                "hidden_act": "silu",
                "torch_dtype": "float32",
                "bos_token_id": source.bos_id,
                "eos_token_id": source.eos_ids[0],
            }
        )
    )
    return out


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(source: WeightSource, path: Path) -> None:
    """The source's weights as an f32 GGUF; the vocabulary is a row of numbers."""
    import gguf

    config = source.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.hidden)
    writer.add_feed_forward_length(config.intermediate)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_theta or 10000.0)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([1] * config.vocab_size)
    for name in source.names():
        module = name.removesuffix(".weight")
        values = source.tensor(name)
        if module in GGUF_NAMES:
            target = GGUF_NAMES[module]
        else:
            _, _, layer, part = module.split(".", 3)
            target = f"blk.{layer}.{GGUF_NAMES[part]}"
            if part in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = config.heads if "q_proj" in part else config.kv_heads
                halves = values.reshape(heads, 2, -1, values.shape[1])
                values = halves.swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{target}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(precision: str, source: WeightSource, work: Path) -> list[Any]:
    """Every engine that can be had; the others are named."""
    engines: list[Any] = []
    for kind in (Pilotfish, GenAI, LlamaCpp):
        try:
            console.print(f"loading {kind.name} {precision}")
            engines.append(kind(source, precision, work))
        except ImportError as error:
            console.print(f"[yellow]{kind.name} skipped: {error} (see the top of this file)")
    return engines


def measure(
    engines: list[Any],
    precision: str,
    source: WeightSource,
    repetitions: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Rows of one precision; every repetition runs all engines in turn."""
    tokens = np.random.default_rng(0).integers(0, source.vocab_size, max(CONTEXTS) + 64)
    rows = []
    task = progress.add_task(precision, total=len(CONTEXTS) * len(WINDOWS) * repetitions)
    for context in CONTEXTS:
        steps = [engine.prepare(context, tokens) for engine in engines]
        for size in WINDOWS:
            seconds: list[list[float]] = [[] for _ in engines]
            for _ in range(repetitions):
                for step, kept in zip(steps, seconds, strict=True):
                    time.sleep(SETTLE_S)
                    step(size)  # brings weights and threads back
                    for _ in range(2):
                        begin = time.perf_counter()
                        step(size)
                        kept.append(time.perf_counter() - begin)
                progress.advance(task)
            rows += [
                {
                    "engine": engine.name,
                    "detail": engine.detail,
                    "precision": precision,
                    "context": context,
                    "tokens": size,
                    "p50_ms": statistics.median(kept) * 1e3,
                    "min_ms": min(kept) * 1e3,
                }
                for engine, kept in zip(engines, seconds, strict=True)
            ]
    return rows


def judge(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One goal per precision, context and S: our median over the faster peer's."""
    cells: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in rows:
        cell = cells.setdefault((row["precision"], row["context"], row["tokens"]), {})
        cell[row["engine"]] = row["p50_ms"]
    goals = []
    for (precision, context, size), times in cells.items():
        peers = [value for name, value in times.items() if name != Pilotfish.name]
        if peers:
            ratio = times[Pilotfish.name] / min(peers)
            goals.append(
                {
                    "name": f"{precision}, context {context}, S={size}: time over the faster peer",
                    "value": round(ratio, 3),
                    "goal": GOAL,
                    "met": ratio <= GOAL,
                }
            )
    return goals


def show(rows: list[dict[str, Any]], goals: list[dict[str, Any]]) -> None:
    table = Table(title="one pass, median ms (fastest)")
    names = list(dict.fromkeys(row["engine"] for row in rows))
    for column in ("precision", "context", "S", *names, "over the faster peer"):
        table.add_column(column, justify="right")
    ratios = {goal["name"]: goal for goal in goals}
    for first in range(0, len(rows), len(names)):
        group = rows[first : first + len(names)]
        head = group[0]
        label = f"{head['precision']}, context {head['context']}, S={head['tokens']}"
        goal = next((g for name, g in ratios.items() if name.startswith(f"{label}:")), None)
        ratio = f"{goal['value']:.2f} {'✓' if goal['met'] else '✗'}" if goal else "no peer"
        table.add_row(
            head["precision"],
            str(head["context"]),
            str(head["tokens"]),
            *(f"{row['p50_ms']:.1f} ({row['min_ms']:.1f})" for row in group),
            ratio,
        )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write rows and goals to this file")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--source", default="default", help="what `pilotfish export model` takes")
    parser.add_argument("--work", type=Path, help="keep the converted models here for next time")
    arguments = parser.parse_args()
    repetitions = 4 if arguments.quick else 15
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, Progress(console=console) as progress:
        work = arguments.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        source = open_source(arguments.source)
        for precision in ("fp32", "int4"):
            engines = load(precision, source, work)
            rows += measure(engines, precision, source, repetitions, progress)
            del engines
    goals = judge(rows)
    show(rows, goals)
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "goals": goals}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
