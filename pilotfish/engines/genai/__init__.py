"""Graphs of ONNX Runtime GenAI's model builder, run unchanged."""
