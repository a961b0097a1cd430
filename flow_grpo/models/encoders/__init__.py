"""Frozen networks around the transformer: codec, text and image encoder, and a cache of what they make."""
