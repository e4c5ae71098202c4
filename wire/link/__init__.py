"""The link itself: what is known about it, and how it is measured."""
