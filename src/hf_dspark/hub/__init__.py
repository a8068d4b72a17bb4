"""Hub repository, model card, conversion between formats."""
