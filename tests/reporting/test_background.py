"""The thread of reports: in order, never in the way, and what fails or does not end is said."""

import logging
import threading
import time

from flow_grpo.reporting.background import Background


def broken() -> None:
    raise OSError("no network")


def test_pieces_are_done_in_order_and_a_failure_is_warned_about_once(caplog):
    background, done = Background(), []
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            background.add("wandb", broken)
            background.add("files", lambda number=number: done.append(number))
        background.finish(20.0)
    assert done == [0, 1, 2]
    said = "wandb does not get everything (OSError: no network); metrics.jsonl has all numbers"
    assert caplog.messages == [said]


def test_nobody_waits_for_a_report_that_hangs_and_what_is_left_out_is_said(caplog):
    background, go_on, done = Background(most=2), threading.Event(), []
    with caplog.at_level(logging.WARNING):
        background.add("wandb", go_on.wait)
        while background._pieces.qsize():  # until the thread has taken it
            time.sleep(0.001)
        for number in range(5):
            background.add("files", lambda number=number: done.append(number))
        background.finish(0.05)
    assert "files does not get everything (2 reports wait already)" in caplog.text
    assert "3 reports are not done after 0.05 seconds" in caplog.text
    go_on.set()
    background.finish(20.0)
    assert done == [0, 1]
