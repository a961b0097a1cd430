"""Seconds per phase."""

import time

import torch

from flow_grpo.runtime.clock import Clock, Ledger


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


def test_a_ledger_s_entries_add_up_to_all_seconds_since_its_begin(monkeypatch):
    now = 5.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    ledger = Ledger(begun=2.0)
    assert ledger.since() == 3.0
    for seconds, name in ((0.5, "time/log_s"), (1.0, "time/save_s"), (0.25, "time/log_s")):
        now += seconds
        ledger.book(name)
    assert ledger.take() == {"time/log_s": 0.75, "time/save_s": 1.0}
    assert ledger.take() == {} and ledger.since() == 0.0
    assert Ledger().since() == 0.0
