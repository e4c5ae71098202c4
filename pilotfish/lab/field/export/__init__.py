"""Export run files as tables for other programs (`field export`)."""
