"""The doctor: what this machine is, what will therefore run on it, and what is wrong with it.

All readings come from a `Machine`: files below a root, and outputs of commands. So a recording of
another machine takes the place of this machine, and a fact that the recording lacks is unknown.
"""
