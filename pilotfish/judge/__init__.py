"""Makes decision heads for `wisv`: traces, labels, training, and what a threshold costs."""
