"""The edge: a target model that verifies windows for many devices at once."""
