"""Seconds per phase."""

from __future__ import annotations

import time

import pytest
import torch

from flow_grpo.algorithm.clock import Clock


def test_a_phase_entered_twice_adds_up_and_others_do_not_mix(monkeypatch):
    now = 5.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock = Clock(torch.device("cpu"))
    for _ in range(2):
        with clock.phase("rollout"):
            now += 0.25
    with clock.phase("score"):
        now += 1.0
    now += 2.0
    metrics = clock.metrics()
    assert metrics == {"time/rollout_s": 0.5, "time/score_s": 1.0, "time/other_s": 2.0, "time/epoch_s": 3.5}


def test_a_phase_that_fails_lets_the_error_through():
    clock = Clock(torch.device("cpu"))
    with pytest.raises(ZeroDivisionError), clock.phase("rollout"):
        raise ZeroDivisionError
