"""Comparing the k copies of a condition, and choosing the groups to train on."""
