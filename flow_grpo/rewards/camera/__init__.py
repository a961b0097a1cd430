"""Rewards that measure camera motion."""
