"""Replaying the recorded steps and taking gradient steps."""
