"""Check that every provider of this machine computes the same answers as the CPU.

Tiny models with random weights (`models`) and the default model are exported in each provider's
formats (`check_artifacts`, `providers`). For each provider a worker process (`worker`) runs passes
and compares their outputs with the CPU's (`checks`), compares the protocols' answers (`protocols`),
and times passes (`timing`). A crash or a hang counts as a failed check (`running`).
"""
