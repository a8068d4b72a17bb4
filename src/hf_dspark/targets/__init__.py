"""What is done to somebody else's model: slot attention, feature capture, adapters, quantised layers."""
