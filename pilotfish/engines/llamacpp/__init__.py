"""GGUF files through llama.cpp: `library` is its C interface, `branches` a slot's sequences."""
