"""Bundles and their installation: everything between an artifact and a board that serves it.

`deploy.bundle` makes a folder that holds all that a machine without a network needs;
`deploy.install` puts it into a root file system or onto the running system; `deploy.ssh` takes it
to a board.
"""
