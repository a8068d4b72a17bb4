"""Evaluate, calibrate, profile: rounds that were recorded, to numbers."""
