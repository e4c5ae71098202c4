"""TensorRT: engines built on the machine that runs them, and kept for the next start."""
