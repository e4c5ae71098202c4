"""Export models: weights in (GGUF, safetensors), ONNX graph and manifest out. No torch."""
