"""Bundles and their installation: everything between an artifact and a board that serves it.

`deploy.bundle` makes a folder with everything that a machine without a network needs;
`deploy.install` installs it into a root file system or the running system; `deploy.ssh` installs it
on a board.
"""
