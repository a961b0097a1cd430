"""Devices, ranks, checkpoints, files and trackers: everything outside the algorithm."""
