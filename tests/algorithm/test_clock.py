"""Seconds per phase."""

from __future__ import annotations

import time

import pytest
import torch

from flow_grpo.algorithm.clock import Clock


def test_a_phase_entered_twice_adds_up_and_others_do_not_mix():
    clock = Clock(torch.device("cpu"))
    for _ in range(2):
        with clock.phase("rollout"):
            time.sleep(0.01)
    with clock.phase("score"):
        pass
    metrics = clock.metrics()
    assert set(metrics) == {"time/rollout_s", "time/score_s", "time/other_s", "time/epoch_s"}
    phases = [metrics[f"time/{name}_s"] for name in ("rollout", "score", "other")]
    assert metrics["time/epoch_s"] == pytest.approx(sum(phases)) and metrics["time/other_s"] >= 0
    assert metrics["time/rollout_s"] >= 0.02 > metrics["time/score_s"]


def test_a_phase_that_fails_lets_the_error_through():
    clock = Clock(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), clock.phase("rollout"):
        raise ZeroDivisionError
