"""Datasets and samplers."""
