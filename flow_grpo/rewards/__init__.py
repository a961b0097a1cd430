"""Rewards: one file each."""
