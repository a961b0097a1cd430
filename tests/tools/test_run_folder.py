"""What a run's folder says of its rewards, as its configuration gives them."""

from __future__ import annotations

from tests.tools.run_files import make_run
from tools.run_folder import read_run
from tools.run_report.acceptance import record
from tools.run_report.held_out import deciding, held_out, rewards

SCHEDULED = ("--config.reward.weights.room_rot=0", "--config.reward.schedules.room_rot=0:0,20:1", "--config.eval.gold=")


def test_a_reward_that_a_schedule_trains_is_a_trained_one(tmp_path):
    run = read_run(make_run(tmp_path / "run", *SCHEDULED, videos=False))
    assert "room_rot" in rewards(run)
    assert deciding(run, ["eval/room_rot", "eval/trans_err_m"]) == ["eval/trans_err_m"]
    assert {change.name: change.group for change in held_out(run)}["eval/room_rot"] == "trained rewards"
    assert "room_rot" in record(run)["rewards"]
