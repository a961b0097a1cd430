"""Every knob of a run: its type, default, bounds and meaning; loading and checking."""
