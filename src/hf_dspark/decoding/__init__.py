"""`generate(assistant_model=draft)`: hook, checks, call, loop, drafter."""
