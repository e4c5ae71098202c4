"""Between a drafter's vocabulary and its target's."""
