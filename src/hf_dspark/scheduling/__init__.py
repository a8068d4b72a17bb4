"""Which draft tokens to verify: policies, step costs, calibration and prompt lookup."""
