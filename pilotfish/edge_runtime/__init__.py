"""Edge: the program that verifies the windows of many devices with one target model."""
