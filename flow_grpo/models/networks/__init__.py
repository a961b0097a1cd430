"""The transformers that are trained."""
