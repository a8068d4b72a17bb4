"""Evaluate, calibrate, profile and regenerate: decoded prompts and what is learnt from them."""
