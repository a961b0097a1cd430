"""The doors to the outside: devices, ranks, files, trackers."""
