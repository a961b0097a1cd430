"""The recipe of eight devices, small only in size: every shape on every rank.

`make test` runs it in ranks that have imported everything; `make test-slow` also as its users start it, by torchrun:
there a rank tells what it saw because `sitecustomize`, which Python imports before any program, makes it.
"""

import contextlib
import functools
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from config.grpo import my_recam_8npu
from flow_grpo.data.tiny_world import WorldSpec, write_tiny_world
from flow_grpo.maths.keys import key
from flow_grpo.maths.schedule import window_of, windows
from flow_grpo.runtime.ranks.process_group import World
from tests.command import command
from tests.test_train_grpo import _train
from tests.workers import run_ranks

ROOT = Path(__file__).parents[1]
WORLD_SIZE = 8
FRAMES, HEIGHT, WIDTH = 9, 48, 80  # pixels; no two sides of the latents are alike, nor like a count of samples
TEXT_DIM = 32
LIMIT_S = 1200  # of a run, however busy 2 cores are; alone it takes about 90 s, half of that to import libraries
CONDITIONS = 10  # measured, of the 20 there are
EVAL_STEPS = 2  # of the recipe's 50: most of the time would be evaluation's
CHANNELS, TEMPORAL, SPATIAL = 16, 4, 8  # of Wan 2.1's codec, which the recipe is for
CAMERA = 12  # numbers of a 3x4 pose

pytestmark = pytest.mark.timeout(LIMIT_S + 60)
WITNESS = "FLOW_GRPO_WITNESS"  # folder in which every rank leaves what it saw
SITECUSTOMIZE = """
import os, sys
if "RANK" in os.environ and any(word.endswith("train_grpo.py") for word in sys.orig_argv):
    from tests.test_real_recipe import bear_witness
    bear_witness()
"""


# --- in a rank


def bear_witness() -> None:
    """Note the shapes that pass through the verbs of the loop, and write them down when the run is finished."""
    from flow_grpo.algorithm import debug_print
    from flow_grpo.models.wan_policy import WanPolicy
    from flow_grpo.preflight.doctor import examine
    from flow_grpo.rewards.base import RewardSet
    from flow_grpo.run import tail_check
    from flow_grpo.run.trainer import Trainer

    seen: dict[str, Any] = {"calls": Counter(), "videos": [], "repeated": []}
    phase = ["evaluation"]  # what is no other verb's

    def spy(owner, name, note, during: str | None = None):
        original = getattr(owner, name)

        @functools.wraps(original)
        def recorded(*args, **kwargs):
            before, phase[0] = phase[0], during or phase[0]
            result = original(*args, **kwargs)
            phase[0] = before
            note(result, *args)
            return result

        setattr(owner, name, recorded)

    def on_velocity(result, policy, latents, *_):
        kind = "trained" if torch.is_grad_enabled() else "sampled"
        assert result.shape == latents.shape and result.dtype == torch.float32
        seen["calls"][f"{phase[0]} {kind} {list(result.shape)}"] += 1

    def on_sample(batches, trainer):
        weights, sigmas = trainer.collector.rewards.weights, trainer.collector.sampling.sigmas
        seen["batches"] = [shapes(debug_print.batch_view(b, sigmas, weights)) for b in batches]
        log_probs = torch.cat([batch.samples.trajectory.log_probs.flatten() for batch in batches])
        seen["finite"] = bool(log_probs.isfinite().all())

    def on_gather(gathered, *_):
        seen["gids"], seen["slots"] = gathered.gids.tolist(), gathered.slots.tolist()
        seen["rewards"] = {name: list(values.shape) for name, values in gathered.rewards.items()}

    def on_compare(batch, *_):
        held = [int(batch.parts[part].keys[row, 0]) for part, row in batch.table.T.tolist()]
        seen["advantages"] = dict(zip(held, batch.advantages.tolist(), strict=True))

    def on_update(_, trainer, *__):
        trained = [p.detach().double() for p in trainer.updater.policy.trained_parameters()]
        seen["trained"] = [float(p.sum()) for p in trained] + [float(p.abs().sum()) for p in trained]

    def on_finish(_, trainer):
        file = Path(os.environ[WITNESS], f"rank{trainer.world.data.rank}.json")
        file.write_text(json.dumps(seen | {"metrics": trainer.metrics}))

    spy(WanPolicy, "velocity", on_velocity)
    spy(RewardSet, "__call__", lambda _, rewards, videos, *__: seen["videos"].append([phase[0], *videos.shape]))
    spy(debug_print, "repeat_over_steps", lambda result, *_: seen["repeated"].append(list(result.shape)))
    spy(examine, "run_checks", lambda *_: None, during="doctor")
    spy(Trainer, "sample", on_sample, during="sample")
    spy(Trainer, "gather", on_gather)
    spy(tail_check, "ask_if_due", lambda *_: None, during="tail check")
    spy(Trainer, "compare", on_compare)
    spy(Trainer, "update", on_update, during="update")
    spy(Trainer, "finish", on_finish)


def shapes(view: dict[str, Any]) -> dict[str, Any]:
    """Return the shape of every tensor of a batch, and the length of what is a list."""
    inner = {name: shapes(value) for name, value in view.items() if isinstance(value, dict)}
    return inner | {
        name: list(value.shape) if isinstance(value, torch.Tensor) else [len(value)]
        for name, value in view.items()
        if name not in inner
    }


# --- in the test


@dataclass(frozen=True)
class Run:
    lines: list[str]  # of standard output
    folder: Path  # of its files
    ranks: list[dict[str, Any]]  # what every rank saw
    given: dict[str, str]  # overrides


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    from tools import random_model

    folder = tmp_path_factory.mktemp("real")
    sizes = {"heads": 2, "head-dim": 16, "layers": 2, "ffn": 64, "text-dim": TEXT_DIM, "codec": "small"}
    words = [f"--{name}={value}" for name, value in sizes.items()]
    assert random_model.main(["--out", str(folder / "model"), *words]) == 0
    spec = WorldSpec(seed=5, scenes={"train": 1, "val": 2}, frames=FRAMES, height=HEIGHT, width=WIDTH)
    write_tiny_world(folder / "world", spec)
    return {"model.path": str(folder / "model"), "data.root": str(folder / "world")}


@pytest.fixture(scope="module")
def run(places, tmp_path_factory) -> Run:
    """The recipe's epoch. Its 16 loader processes would import everything once more each: a minute on 2 cores."""
    folder = tmp_path_factory.mktemp("run")
    given = knobs(folder, places | {"data.num_workers": "0"})
    words = command(given, recipe="my_recam_8npu")
    assert run_ranks(_witnessed, WORLD_SIZE, folder, words, timeout=LIMIT_S, fresh=True) == [0] * WORLD_SIZE
    return left_by((folder / "said").read_text(encoding="utf-8"), folder, given)


def _witnessed(world: World, folder: Path, given: list[str]) -> int:
    """Train on a rank, for good prepared to tell what it sees; what rank 0 prints goes to a file."""
    os.environ.update(environment(folder))
    os.environ.pop("WANDB_MODE", None)
    bear_witness()
    file = folder / "said" if world.is_main else Path(os.devnull)
    with file.open("w", encoding="utf-8") as said, contextlib.redirect_stdout(said):
        return _train(world, given)


def environment(folder: Path) -> dict[str, str]:
    """Return what a rank finds in its environment; whoever runs this has no key for the tracker."""
    return {"FLOW_GRPO_DEVICE": "cpu", "WANDB_BASE_URL": "http://127.0.0.1:9", WITNESS: str(folder)}


def knobs(folder: Path, changes: dict[str, str]) -> dict[str, str]:
    return {
        "data.num_frames": str(FRAMES),
        "data.height": str(HEIGHT),
        "data.width": str(WIDTH),
        "data.tune_scenes": "0",
        "data.report_scenes": "0",
        "eval.num_conditions": str(CONDITIONS),
        "eval.fixed_conditions": "0",
        "num_epochs": "1",
        "eval.num_steps": str(EVAL_STEPS),
        "debug": "True",
        "run_name": "run",
        "output_root": str(folder),
    } | changes


def launch(folder: Path, given: dict[str, str]) -> Run:
    """Start the recipe by torchrun in `folder` and wait; fails unless it ends well on every rank."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD_SIZE}"]
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
    found = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    found |= environment(folder) | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONUTF8": "1"}
    process = subprocess.Popen(
        [*launcher, "train_grpo.py", *command(given, recipe="my_recam_8npu")],
        cwd=ROOT,
        env=found | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    try:
        out, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.terminate()  # torchrun then ends its ranks, which are no children of ours
        process.wait()
    assert process.returncode == 0, errors[-8000:]
    return left_by(out, folder, given)


def left_by(said: str, folder: Path, given: dict[str, str]) -> Run:
    ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)]
    return Run(said.splitlines(), folder / "run", ranks, given)


@dataclass(frozen=True)
class Expected:
    """The shapes at this size, from the recipe alone; letters as in the requirements."""

    recipe = my_recam_8npu()
    W: int = WORLD_SIZE
    B: int = recipe.sample.train_batch_size
    k: int = recipe.sample.k
    nb: int = recipe.sample.num_batches_per_epoch
    K: int = recipe.sample.sde_window
    L: int = recipe.model.max_prompt_tokens
    micro: int = recipe.train.batch_size
    local: int = nb * B  # samples of a rank and epoch
    latent: tuple[int, ...] = (CHANNELS, (FRAMES - 1) // TEMPORAL + 1, HEIGHT // SPATIAL, WIDTH // SPATIAL)


E = Expected()


def test_the_recipe_finishes_an_epoch_and_leaves_metrics_and_an_adapter(run):
    from safetensors.torch import load_file

    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    (row,) = [row for row in rows if "policy/ratio_mean" in row]
    assert all(math.isfinite(value) for value in row.values())
    assert row["train/grad_norm"] > 0
    assert row["policy/ratio_first_max_abs_log"] == 0  # bf16, and yet update and rollout agree to the last bit
    assert row["policy/ratio_after_max_abs_log"] > 0
    adapter = load_file(run.folder / "adapter" / "pytorch_lora_weights.safetensors")
    assert all(tensor.isfinite().all() for tensor in adapter.values())
    moved = [name for name, tensor in adapter.items() if "lora_B" in name and tensor.abs().max() > 0]
    assert len(moved) == 2 * 4  # of both blocks: q, k, v and out of self-attention
    assert json.loads((run.folder / "summary.json").read_text())["after"]
    assert len(list((run.folder / "checkpoints").glob("checkpoint_000001"))) == 1


def test_nothing_but_size_and_place_was_overridden(run):
    def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in table.items():
            found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        return found

    used = flat(json.loads((run.folder / "config.json").read_text()))
    recipe = flat(json.loads(json.dumps(my_recam_8npu().to_dict())))
    assert {name for name in used if used[name] != recipe[name]} == set(run.given)
    # Its tracker goes offline by itself.
    assert my_recam_8npu().trackers == ("wandb",)
    assert list(run.folder.glob("wandb/offline-run-*"))


def test_rank_0_prints_the_group_structure_with_the_recipe_s_shapes(run):
    words = ("[Batch ", "合并后", "  latents", "  log_probs", "  target_cameras", "  总样本数", "  期望的", "  k (")
    lines = [line for line in run.lines if line.startswith((*words, "Gather", "k (", "期望的", "每个"))]
    prompts = [re.fullmatch(r"\[Batch (\d)\] Prompts \(前30字符\): \['(.+)', '(.+)'\]", line) for line in lines[: E.nb]]
    assert [match and int(match[1]) for match in prompts] == list(range(E.nb))
    assert lines[E.nb :] == [
        "合并后的samples形状（验证k个副本的分布）:",
        f"  latents: torch.Size({[E.local, E.K, *E.latent]})",
        f"  log_probs: torch.Size({[E.local, E.K]})",
        f"  target_cameras: torch.Size({[E.local, E.latent[1], CAMERA]})",
        f"  总样本数（当前GPU）: {E.local}",
        f"  期望的总样本数: {E.local}",
        f"  k (group_size): {E.k}",
        f"Gather后的总样本数（所有GPU）: {E.W * E.local}",
        f"k (group_size): {E.k}",
        f"期望的唯一样本数: {E.W * E.local // E.k}",
        f"每个唯一样本应该有 {E.k} 个副本",
    ]
    groups = [line for line in run.lines if line.startswith("  group ")]
    assert len(groups) == E.W * E.local // E.k and all(line.count(" on rank ") == E.k for line in groups)


def test_every_rank_holds_keys_videos_and_rewards_in_the_recipe_s_shapes(run):
    states = [E.local, E.K, *E.latent]
    rewards = {name: [E.local] for name in (*my_recam_8npu().reward.weights, "avg")}
    expected = {
        "prompts": [E.local],
        "prompt_embeds": [E.local, E.L, TEXT_DIM],
        "source_latents": [E.local, *E.latent],
        "target_cameras": [E.local, E.latent[1], CAMERA],
        "timesteps": [E.local, E.K],
        "latents": states,
        "next_latents": states,
        "log_probs": [E.local, E.K],
        "rewards": rewards,
    }
    for seen in run.ranks:
        assert seen["batches"] == [expected]
        assert seen["finite"]
        videos = [shape for phase, *shape in seen["videos"] if phase == "sample"]
        assert videos == [[E.B, 3, FRAMES, HEIGHT, WIDTH]] * E.nb
        # Rewards are repeated over the trained steps and gathered from all ranks.
        assert seen["repeated"] == [[E.local, E.K]]
        assert seen["rewards"] == {name: [E.W * E.local] for name in my_recam_8npu().reward.weights}
        assert [len(own) for own in seen["advantages"].values()] == [E.k] * (E.local // E.k)


def test_gathered_samples_are_whole_groups_whose_copies_lie_on_different_ranks(run):
    gids, slots = run.ranks[0]["gids"], run.ranks[0]["slots"]
    assert all((seen["gids"], seen["slots"]) == (gids, slots) for seen in run.ranks)
    groups: dict[int, list[tuple[int, int]]] = {}
    for place, (gid, slot) in enumerate(zip(gids, slots, strict=True)):
        groups.setdefault(gid, []).append((slot, place // E.local))
    assert len(groups) == E.W * E.local // E.k
    # Each group is trained on by one rank, that of one of its copies.
    owner = {int(gid): rank for rank, seen in enumerate(run.ranks) for gid in seen["advantages"]}
    assert len(owner) == len(groups) and all(owner[gid] in dict(members).values() for gid, members in groups.items())
    advantages = {int(gid): own for seen in run.ranks for gid, own in seen["advantages"].items()}
    for gid, members in groups.items():
        assert sorted(slot for slot, _ in members) == list(range(E.k))
        assert len({rank for _, rank in members}) == E.k
        assert sum(advantages[gid]) == pytest.approx(0, abs=1e-4)
    assert max(abs(value) for own in advantages.values() for value in own) > 0.1


def rows_of(calls: dict[str, int], kind: str) -> int:
    """Return in how many rows the network was called for `kind`, such as "sample sampled"."""
    return sum(count * json.loads(name.removeprefix(kind))[0] for name, count in calls.items() if name.startswith(kind))


def test_the_transformer_is_called_as_often_as_the_recipe_says(run):
    recipe = my_recam_8npu()
    share = CONDITIONS // E.W
    assert share < recipe.eval.batch_size
    truncated = max(recipe.sample.sde_steps) + 2  # one step past the stochastic ones
    expected = {
        # A batch's rollout, its rows together and two alone, its replay in one call, a micro-batch without gradient.
        "doctor sampled": E.B * truncated + E.B + 2 + E.B * E.K + E.micro,
        "doctor trained": E.B * E.K,
        "update trained": E.local // E.k,
        "update sampled": E.micro,  # the probe that debug asks for; old log-probs are the rollout's
    }
    blocks = windows(recipe.sample.sde_steps, recipe.sample.sde_window)
    own = len(blocks[0]) + recipe.sample.tail_steps  # calls of a copy that shares none
    together = recipe.sample.window_groups
    shared = [window_of(gid // together, blocks, seed=recipe.seed)[0] + 1 for gid in range(E.W * E.local // E.k)]
    sampled = sum(rows_of(seen["calls"], "sample sampled") for seen in run.ranks)
    assert sampled == E.W * E.local * recipe.sample.tail_steps + sum(shared)
    measured = 0
    for rank, seen in enumerate(run.ranks):
        gids = range(rank * recipe.eval.signal_groups, (rank + 1) * recipe.eval.signal_groups)
        chosen = [window_of(gid, blocks, seed=key("signal", recipe.seed)) for gid in gids]
        signal = sum(E.k * (window[0] + own) for window in chosen)  # groups of the signal's measurement
        assert {kind: rows_of(seen["calls"], kind) for kind in expected} == expected
        first = [window_of(gid // together, blocks, seed=recipe.seed) for gid in seen["gids"][rank * E.local :][: E.B]]
        assert rows_of(seen["calls"], "tail check sampled") == sum(recipe.sample.num_steps - 1 - w[-1] for w in first)
        evaluated = rows_of(seen["calls"], "evaluation sampled") - 2 * signal  # before and after
        assert evaluated in (2 * EVAL_STEPS * share, 2 * EVAL_STEPS * (share + 1))
        measured += evaluated // (2 * EVAL_STEPS)
    assert measured >= CONDITIONS  # every rank gets as many batches, some are measured twice


def test_all_ranks_end_with_the_same_finite_weights_and_metrics(run):
    first = run.ranks[0]
    assert all(math.isfinite(value) for value in first["trained"])
    for seen in run.ranks:
        assert seen["trained"] == first["trained"]
        assert all(math.isfinite(value) for value in seen["metrics"].values())
        assert seen["metrics"]["train/grad_norm"] == first["metrics"]["train/grad_norm"]


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S + 60)
def test_the_recipe_is_the_same_as_its_users_start_it_with_its_own_loader_processes(places, tmp_path, run):
    started = launch(tmp_path, knobs(tmp_path, places))
    assert [seen["trained"] for seen in started.ranks] == [seen["trained"] for seen in run.ranks]
    assert [line for line in started.lines if line.startswith("  group ")]
    assert list(started.folder.glob("wandb/offline-run-*"))
