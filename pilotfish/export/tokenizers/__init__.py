"""Make a `tokenizer.json` of a vocabulary in another form; a form is a file.

`gguf` (a GGUF file's metadata), `gpt2` (vocab.json and merges.txt), `sentencepiece`
(tokenizer.model), `tekken` (tekken.json). To add one of a Hugging Face directory, add a module here
and a line in `sources/huggingface_tokenizer.py`.
"""
