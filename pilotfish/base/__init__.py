"""Settings, files, child processes, metrics, errors: used by all rooms, sent over no link."""
