"""Replaying the remembered steps and taking gradient steps."""
