"""Datasets and samplers."""

STRATEGIES = ("drop_largest", "drop_last")  # of `LimitedPointsCollateFn`; here, since help needs no torch
