"""Load an artifact and run it: decoder, KV cache, tokenizer, chat template.

This package imports neither torch nor onnx.
"""
