"""GRPO for flow matching, knowing no vendor, no model and no reward by name."""
