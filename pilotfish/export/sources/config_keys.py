"""The key names of config.json, and the keys that need not be read.

The keys that need not be read come from the configuration classes of llama, mistral, qwen2, qwen3
and opt in transformers 4.40 to 5.23, and from published checkpoints.
"""

from __future__ import annotations

from typing import Any

# Keys for training, the Python interface and other tasks.
INERT = frozenset({
    "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "_name_or_path", "name_or_path", "_commit_hash", "_attn_implementation_autoset",
    "attn_implementation", "initializer_range", "attention_dropout", "hidden_dropout",
    "resid_pdrop", "embd_pdrop", "classifier_dropout", "use_bfloat16", "torchscript",
    "tf_legacy_loss", "return_dict", "output_hidden_states", "output_attentions", "is_decoder",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id",
    "decoder_start_token_id", "tokenizer_class", "prefix", "problem_type", "id2label",
    "label2id", "num_labels", "finetuning_task", "task_specific_params", "is_llama_config",
    "pretraining_tp",
    "transformers.js_config", "max_sequence_length", "unsloth_version", "unsloth_fixed",
    # Sampling settings, which do not change the model's distribution.
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "min_p",
    "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
    "encoder_repetition_penalty", "length_penalty", "no_repeat_ngram_size",
    "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "assistant_confidence_threshold", "assistant_lookbehind",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "target_lookbehind",
})  # fmt: skip
# Keys with an effect → their values that have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "chunk_size_feed_forward": (0,),
    "per_layer_config": (None,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
    "layer_types": (None,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "num_local_experts": (0, None),
    "num_experts": (0, None),
    "n_routed_experts": (0, None),
}

# Fields of `ModelConfig` → Llama's keys, for errors.
FIELDS = {
    "model_type": "model_type",
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate": "intermediate_size",
    "context": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "tied": "tie_word_embeddings",
    "embedding": "word_embed_proj_dim",
    "activation": "hidden_act",
    "token_inputs.width": "hidden_size_per_layer_input",
    "token_inputs.rows": "vocab_size_per_layer_input",
    "streams.count": "altup_num_inputs",
    "streams.rank": "laurel_rank",
    "experts.count": "num_experts",
    "experts.width": "moe_intermediate_size",
    "experts.shared": "shared_expert_intermediate_size",
    "experts.latent": "moe_latent_size",
}
