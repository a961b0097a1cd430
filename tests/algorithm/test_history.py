"""What earlier optimizer steps mean for the next one."""

from flow_grpo.algorithm.update.history import UpdateHistory


def after(*norms: float) -> UpdateHistory:
    history = UpdateHistory()
    for norm in norms:
        history.stepped(norm)
    return history


def test_a_gradient_is_bounded_by_the_absolute_bound_and_by_a_multiple_of_the_median_once_five_norms_are_known():
    assert after(1.0, 1.0, 1.0, 1.0).bound(100.0, 5.0) == 100.0
    assert after(1.0, 2.0, 3.0, 4.0, 50.0).bound(100.0, 5.0) == 15.0
    assert after(1.0, 2.0, 3.0, 4.0, 50.0, 60.0).bound(100.0, 5.0) == 17.5
    assert after(*[10.0] * 5).bound(30.0, 5.0) == 30.0
    assert after(*[1.0] * 5).bound(30.0, 0.0) == 30.0


def test_only_the_latest_twenty_norms_count():
    history = after(*[100.0] * 30, *[1.0] * 20)
    assert history.norms == [1.0] * 20
    assert history.bound(1e9, 5.0) == 5.0


def test_steps_without_a_gradient_do_not_stop_later_ones():
    assert after(*[1.0] * 5, *[0.0] * 20).bound(100.0, 5.0) == 5.0
    assert after(*[0.0] * 20).bound(100.0, 5.0) == 100.0


def test_a_step_taken_ends_the_row_of_skipped_ones():
    history = UpdateHistory(bad_steps=["a loss was nan"])
    history.stepped(0.0)
    assert history.bad_steps == []
