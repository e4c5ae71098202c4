"""TensorRT: engines that are built on the machine that runs them, and cached."""
