"""The device as a service: an OpenAI-compatible HTTP API, its metrics, its status and its page."""
