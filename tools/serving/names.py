"""Published reward models by the name of `--reward`; apart from adapters.py, since help needs no torch."""

PUBLISHED = ("videoalign", "hpsv3", "clip", "pickscore", "mapanything", "dino", "siglip")
