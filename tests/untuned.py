"""What the demo chose for its own results, undone: tests of small runs of it hold whatever the demo's tuning is."""

UNTUNED = {
    "sample.sde_window": 2,
    "sample.tail_steps": 0,
    "sample.same_initial_noise": False,
    "sample.share_prefix": False,
    "train.copies": 0,
    "train.step_weight": "none",
}
