"""TensorRT engines, which are built on the machine that runs them, and cached."""
