"""Token distributions, draft trees, rejection sampling and noise: torch and numpy only."""
