"""The state of the link, and how it is measured."""
