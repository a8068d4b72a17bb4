"""transformers' own generation tests, repeated with a draft beside each call."""
