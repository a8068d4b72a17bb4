"""Texts, conversations and prompt files, to rows of tokens."""
