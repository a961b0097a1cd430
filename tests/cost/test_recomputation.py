"""What `model.checkpointing=auto` becomes, by the memory of the device and the length of the video."""

from pathlib import Path

import pytest

from flow_grpo.cost.choose_recomputation import choose_recomputation
from flow_grpo.cost.plan import make_plan
from flow_grpo.settings.loading import load_config

ROOT = Path(__file__).resolve().parents[2]


def config(*knobs: str, recipe: str = "my_recam_8npu"):
    words = [f"--config.{knob}" for knob in ("model.path=nowhere", "model.encodings=encodings", *knobs)]
    return load_config(f"{ROOT}/config/grpo.py:{recipe}", words)


@pytest.mark.parametrize(
    ("gib", "size", "mode", "why"),
    [
        (64, "81x480x832", "keep_attention", "not none, whose update needs "),
        (32, "81x480x832", "blocks", "not keep_attention, whose update needs "),
        (40, "33x240x416", "none", "none, planned "),
        pytest.param(
            *(20, "33x240x416", "blocks", "not keep_attention, which 7,020 tokens are too few for"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_fastest_that_fits_is_taken_and_why_is_said(gib, size, mode, why):
    sides = zip(("num_frames", "height", "width"), size.split("x"), strict=True)
    knobs = [f"data.{name}={value}" for name, value in sides]
    found, said = choose_recomputation(config("model.checkpointing=auto", "train.batch_size=1", *knobs), 8, gib)
    assert found.model.checkpointing == mode
    assert said.startswith("model.checkpointing=auto: ") and why in said and f"{mode}, planned " in said


def test_what_was_decided_stays_and_a_policy_of_one_s_own_recomputes_blocks():
    decided = config("model.checkpointing=none")
    assert choose_recomputation(decided, 8, 1.0) == (decided, "")
    own = config(f"model.kind={ROOT}/tests/cost/test_recomputation.py:config", "model.checkpointing=auto")
    assert choose_recomputation(own, 8, 64.0)[0].model.checkpointing == "blocks"


def test_keeping_attention_saves_its_share_of_the_recomputation():
    modes = ("none", "keep_attention", "blocks")
    plans = {mode: make_plan(config(f"model.checkpointing={mode}"), 8, 2e14) for mode in modes}
    assert plans["none"].update_gib > plans["keep_attention"].update_gib > plans["blocks"].update_gib
    kept, recomputed = (plans[mode].update_forwards - plans["none"].update_forwards for mode in modes[1:])
    assert (kept, recomputed) == (pytest.approx(0.18, abs=0.01), pytest.approx(1.0, abs=0.01))
    for plan in plans.values():
        assert plan.update_s == pytest.approx(plan.update_forwards * plan.forward_tflop / 200)  # of a group
