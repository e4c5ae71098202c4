"""Make a drafter better for one target: its answers, training on them, and what that brought."""
