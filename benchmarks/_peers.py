"""The peers of benchmarks/decode.py: onnxruntime-genai's graph and llama.cpp, on the same weights.

Each is made from a `WeightSource`, by way of the files that the peer's own tools read.
"""

import ctypes
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.export.model_config import ModelConfig
from pilotfish.export.sources import WeightSource
from tests.support.tiny import plain_rope

Step = Callable[[int], None]
"""Runs so many new tokens on the prepared context, and forgets them."""
Tokens = NDArray[np.int64]


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

    def prepare(self, context: int, tokens: Tokens) -> Step:
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

    def prepare(self, context: int, tokens: Tokens) -> Step:
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
    (out / "tokenizer.json").write_text(source.vocabulary.tokenizer_json)
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
                "rope_theta": plain_theta(config),
                "vocab_size": config.vocab_size,
                "tie_word_embeddings": config.tied,
                "hidden_act": "silu",
                "torch_dtype": "float32",
                "bos_token_id": source.vocabulary.bos_id,
                "eos_token_id": source.vocabulary.eos_ids[0],
            }
        )
    )
    return out


def plain_theta(config: ModelConfig) -> float:
    """θ of a model all of whose layers turn whole heads, without scaling."""
    [layer] = config.pattern
    assert layer.rope is not None
    assert 2 * len(layer.rope.frequencies) == config.head_dim
    theta = layer.rope.frequencies[1] ** (-config.head_dim / 2)
    assert np.allclose(plain_rope(theta, config.head_dim).frequencies, layer.rope.frequencies)
    return round(theta, 6)


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
    writer.add_rope_freq_base(plain_theta(config))
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
