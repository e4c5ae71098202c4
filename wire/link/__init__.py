"""The link itself: what is known about it, how it is measured, and how another one is emulated."""
