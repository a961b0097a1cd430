"""Published reward models: name of `--reward` -> class in adapters.py; apart from those, since help needs no torch."""

PUBLISHED = {
    "videoalign": "VideoAlign",
    "hpsv3": "Hpsv3",
    "clip": "ClipScore",
    "pickscore": "PickScore",
    "mapanything": "MapAnythingPoses",
}
