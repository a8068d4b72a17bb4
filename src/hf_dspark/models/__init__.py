"""What a draft is: configurations, backbone, heads, block attention, slot cache."""
