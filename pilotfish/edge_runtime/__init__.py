"""The edge: verifies windows for many devices at once with a target model."""
