"""Products of few rows on a CPU."""
