"""Graphs that ONNX Runtime GenAI's model builder wrote, run as they are."""
