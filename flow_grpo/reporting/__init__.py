"""Metrics, plots, videos, trackers and the console."""
