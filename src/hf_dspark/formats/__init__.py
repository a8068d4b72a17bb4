"""Other projects' checkpoints, as tables."""
