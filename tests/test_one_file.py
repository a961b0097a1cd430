"""examples/one_file.py is the algorithm of train_grpo.py: the recipe's constants, and the same numbers bit for bit."""

import ast
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train_grpo
from examples import one_file
from flow_grpo import load_config
from flow_grpo.reporting.drawing import plots
from flow_grpo.reporting.metric_files import read_rows

ROOT = Path(__file__).parents[1]
RECIPE = f"{ROOT}/config/grpo.py:tiny_recam"
# Knob of the recipe -> constant of the file, a place in it, or what the file does without naming it.
CONSTANTS = {
    "seed": "SEED",
    "num_epochs": "EPOCHS",
    "num_threads": 1,
    "model.kind": "recam",
    "model.path": "MODEL",
    "model.dtype": "fp32",
    "model.trained": "attention",
    "model.max_prompt_tokens": 8,
    "model.vae_slicing": False,
    "model.boundary_ratio": "BOUNDARY",
    "data.root": "DATA",
    "data.tiny_world": "WORLD",
    "data.num_frames": "SIZE.0",
    "data.height": "SIZE.1",
    "data.width": "SIZE.2",
    "data.tune_scenes": "TUNE_SCENES",
    "data.reference": "source",
    "sample.k": "K",
    "sample.train_batch_size": "BATCH",
    "sample.num_batches_per_epoch": "BATCHES",
    "sample.num_steps": "STEPS",
    "sample.shift": "SHIFT",
    "sample.sde": "flow",
    "sample.noise_level": "NOISE_LEVEL",
    "sample.max_step_std": None,
    "sample.sde_steps": "SDE_STEPS",
    "sample.sde_window": 1,
    "sample.tail_steps": "TAIL_STEPS",
    "sample.guidance_scale": 1.0,
    "sample.same_initial_noise": True,
    "sample.share_prefix": True,
    "reward.weights": "WEIGHTS",
    "reward.adv_norm": "group",
    "reward.flat_eps": "FLAT_EPS",
    "dynamic_sampling.enabled": False,
    "train.objective": "grpo",
    "train.batch_size": "MICRO_BATCH",
    "train.copies": 0,
    "train.updates_per_epoch": 1,
    "train.learning_rate": "LEARNING_RATE",
    "train.camera_learning_rate": 0.0,
    "train.warmup_steps": "WARMUP_STEPS",
    "train.adam_beta1": "BETAS.0",
    "train.adam_beta2": "BETAS.1",
    "train.adam_eps": "EPS",
    "train.weight_decay": "WEIGHT_DECAY",
    "train.max_grad_norm": "MAX_GRAD_NORM",
    "train.max_grad_ratio": "MAX_GRAD_RATIO",
    "train.clip_range": "CLIP_RANGE",
    "train.adv_clip": "ADV_CLIP",
    "train.kl_coef": 0.0,
    "train.step_weight": "inverse_gain",
    "train.guard": False,
    "train.ema_decay": "EMA_DECAY",
    "eval.split": "report",
    "eval.num_conditions": "EVAL_CONDITIONS",
    "eval.batch_size": "EVAL_BATCH",
    "eval.num_steps": "STEPS",
    "eval.gold": "room_pose",
}
# Fewer and other numbers for the comparison, cheap, and to reach every branch: several passes over the data,
# micro-batches of unequal size, warm-up, gradients beyond either bound, advantages beyond theirs.
SMALL = {
    "num_epochs": 7,
    "data.tiny_world": "unit_test",
    "data.tune_scenes": 1,
    "sample.k": 4,
    "sample.train_batch_size": 8,
    "sample.num_batches_per_epoch": 2,
    "train.batch_size": 3,
    "train.warmup_steps": 3,
    "train.max_grad_norm": 0.3,
    "train.max_grad_ratio": 0.9,
    "train.adv_clip": 2.0,
    "eval.num_conditions": 6,
    "eval.batch_size": 4,
}
QUIET = {
    "device": "cpu",
    "doctor": "off",
    "max_minutes": 0,
    "log_videos_every": 0,
    "trackers": "",
    "eval.every": 0,
    "eval.signal_groups": 0,
    "eval.videos": 0,
    "run_name": "run",
}


def test_constants_are_the_recipes():
    config = load_config(RECIPE)
    for knob, expected in CONSTANTS.items():
        value = config
        for part in knob.split("."):
            value = getattr(value, part)
        assert value == constant(expected), knob


def constant(name: object) -> object:
    """Return a constant of the file by its name, an entry of one as in SIZE.0, or anything else itself."""
    head, _, place = str(name).partition(".")
    if not head.isupper():
        return name
    value = getattr(one_file, head)
    return value[int(place)] if place else value


def test_it_takes_only_data_model_and_rewards_from_the_library():
    tree = ast.parse(Path(one_file.__file__).read_text(encoding="utf-8"))
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    rooms = {module.split(".")[1] for module in modules if module.startswith("flow_grpo.")}
    assert rooms == {"data", "models", "rewards", "records", "settings"}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Train twice; return the trainer's run folder, and the metrics, weights and averages of the file."""
    folder = tmp_path_factory.mktemp("one_file")
    knobs = SMALL | QUIET | {"data.root": f"{folder}/world", "model.path": f"{ROOT}/{one_file.MODEL}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw_curves", lambda rows, path, **_: None)  # costs more than an epoch
        words = [f"--config.{knob}={value}" for knob, value in knobs.items()]
        assert train_grpo.main(["--config", RECIPE, f"--config.output_root={folder}", *words]) == 0
        for knob in {"data.root", "model.path", *SMALL}:
            patch.setattr(one_file, CONSTANTS[knob], knobs[knob])
        return folder / "run", one_file.main()


def test_metrics_are_the_trainers(both):
    run, (history, _, _) = both
    recorded = read_rows(run / "metrics.jsonl")
    assert len(history) == 1 + SMALL["num_epochs"]
    for epoch, metrics in enumerate(history):
        assert metrics == {name: recorded[epoch][name] for name in metrics}
    clipped = [recorded[epoch]["train/grad_clipped"] for epoch in range(1, len(history))]
    assert 0 < sum(clipped[:5]) < 5
    assert any(clipped[5:])


def test_weights_and_their_average_are_the_trainers(both):
    run, (_, trained, averages) = both
    (checkpoint,) = (run / "checkpoints").iterdir()
    state = load_file(checkpoint / "state.safetensors")
    assert set(trained) == {name.removeprefix("learned/trained/") for name in state if "/trained/" in name}
    for place, (name, weight) in enumerate(trained.items()):
        assert torch.equal(weight, state[f"learned/trained/{name}"]), name
        assert torch.equal(averages[place], state[f"learned/ema/{place}"]), name
        assert not torch.equal(weight, averages[place]), name
