"""Run GGUF files with llama.cpp: `native` has its C interface, `branches` a slot's sequences."""
