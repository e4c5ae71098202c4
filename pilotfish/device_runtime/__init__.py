"""The device: drafts windows with a small model and has an edge verify them."""
