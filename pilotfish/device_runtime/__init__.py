"""The device: it drafts windows with a small model, and an edge verifies them."""
