"""Sampling, noise, policies, costs, calibration and losses: torch and numpy only."""
