"""What the tool says about a recipe's signal, and about short tails."""

import json
from unittest import mock

import torch

from flow_grpo.maths.certificate import certify
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.process_group import Group, World
from tests.command import command
from tools import measure_signal


def test_the_tool_prints_spreads_steps_and_what_a_short_tail_changes(one_batch, monkeypatch, capsys) -> None:
    monkeypatch.setattr(measure_signal, "certify", lambda values, exact, _: certify(values, exact))  # hardly a spread
    knobs = one_batch | {"reward.weights": "target_psnr=1", "train.copies": 0}
    knobs |= {"model.boundary_ratio": 0, "sample.sde_steps": "0,1,2,3,4,5"}
    assert measure_signal.main(command(knobs, "--groups", "2", "--tails", "1", "8", "--sparse", "--json")) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0 < found["rewards"]["target_psnr"]["shared"] < 10
    assert [step["step"] for step in found["steps"]] == [0, 1, 2, 3, 4, 5]
    one, eight, *sparse, _, _, _ = found["tails"]
    controls = found["tails"][-3:]
    assert (one["tail_steps"], eight["tail_steps"]) == (1, 8)
    assert [(row["tail_steps"], row["sparse"]) for row in sparse] == [(1, True), (8, True)]
    assert eight["pooled"] > 0.9 and sparse[1]["mean"] != eight["mean"]
    assert one["mean_of_reference"] == eight["mean_of_reference"]
    assert abs(eight["mean"] - eight["mean_of_reference"]) < abs(one["mean"] - one["mean_of_reference"])
    assert eight["correlation"] > 0.9 and eight["groups"] == 2 and not eight["holds"]  # of 24
    assert [row["noise"] for row in controls] == [0.03, 0.06, 0.1]
    assert controls[0]["correlation"] > controls[2]["correlation"]


def test_what_cannot_be_built_is_one_line_on_several_ranks_too(monkeypatch, capsys) -> None:
    watched = World.of(Group(0, 2, heartbeat=mock.Mock()))
    monkeypatch.setattr(measure_signal, "set_up_rank", lambda *_, **__: (torch.device("cpu"), watched))
    refuse = mock.Mock(side_effect=ValueError("model.path 'nowhere' does not exist"))
    monkeypatch.setattr(measure_signal, "assemble", refuse)
    monkeypatch.setattr(process_group, "shut_down", lambda _: None)
    assert measure_signal.main(command({})) == 2
    assert capsys.readouterr().err == "error: model.path 'nowhere' does not exist\n"
    assert not watched.all.heartbeat.fail.called
