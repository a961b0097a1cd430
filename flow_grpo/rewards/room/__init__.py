"""The tiny world's own measures: cameras found by its exact renderer."""
