"""Check every provider of this machine against the CPU, and report differences.

Tiny random models (`models`) and the default model are exported in each provider's formats
(`check_artifacts`, `providers`). A worker process (`worker`) runs passes on each provider whose
answers are also computed in the plainest way on the CPU (`checks`), runs both ends of the protocols
(`protocols`), and times passes (`timing`). A crash or a hang counts as a failed check (`running`).
"""
