"""Export models: read weights (GGUF, safetensors), write an ONNX graph and a manifest; no torch."""
