"""The command line, `hf-dspark`."""
