"""Texts, conversations and prompt files, to tokens."""
