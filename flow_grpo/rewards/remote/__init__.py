"""Rewards measured by a server over HTTP."""
