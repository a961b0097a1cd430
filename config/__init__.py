"""Knobs and recipes."""
