"""The bound of waits that would otherwise be endless."""

LIMIT_S = 900.0  # only what hangs takes so long, however busy the machine; pytest's own timeout is longer
