"""GGUF files through llama.cpp: `native` is its C interface, `branches` a slot's sequences."""
