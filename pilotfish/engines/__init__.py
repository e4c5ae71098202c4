"""Load an artifact and run it: decoder, KV cache, tokenizer, chat template. No torch, no onnx."""
