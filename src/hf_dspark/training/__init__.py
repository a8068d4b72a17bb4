"""`DSparkTrainer`: anchored blocks, target states, metrics."""
