"""Base modules for all packages: settings, files, child processes, metrics, errors."""
