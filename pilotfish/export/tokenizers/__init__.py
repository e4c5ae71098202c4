"""Convert vocabularies in other forms to a `tokenizer.json`; each form is a module.

`gguf` (a GGUF file's metadata), `gpt2` (vocab.json and merges.txt), `sentencepiece`
(tokenizer.model), `tekken` (tekken.json). To add a form of Hugging Face directories, add a module
here and a line in `sources/huggingface_tokenizer.py`.
"""
