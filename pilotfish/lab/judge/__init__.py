"""Make decision heads for `wisv`: mine mismatches, label them, train, and measure thresholds."""
