"""Fine-tuning on a filmed tiny world in two sizes, with a random tiny model."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from flow_grpo.data.tiny_world import WorldSpec, ensure_tiny_world, write_tiny_world
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer
from flow_grpo.models.recam import RECAM
from flow_grpo.models.wan_policy import load_networks
from flow_grpo.runtime.checkpoints import checkpoint
from flow_grpo.runtime.checkpoints.run_lock import RunLock
from flow_grpo.runtime.ranks.process_group import Group, World
from tests.command import command
from tests.models.test_recam_transformer import inputs
from tests.refusals import refusal
from tests.test_train_grpo import assert_equal_state, newest
from tests.tiny_models import make_tiny_folder, tiny_settings
from tests.workers import already_met, run_ranks
from tools import finetune_recam

BUCKETS = "5x24x32,5x24x16"  # 24 and 12 tokens
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """A model folder, and a data folder: of 3 scenes to train on and 2 held out, one is filmed upright."""
    folder = tmp_path_factory.mktemp("fine")
    ensure_tiny_world(folder / "world", "unit_test")
    write_tiny_world(folder / "tall", WorldSpec(seed=3, scenes={"train": 1, "val": 1}, height=32, width=24))
    for split in ("train", "val"):
        (scene,) = (folder / "tall" / split).rglob("scene1")
        shutil.move(scene, folder / "world" / split / scene.parent.name / "scene9")
    return {"model.path": make_tiny_folder(folder / "model"), "data.root": str(folder / "world")}


def words(places: dict[str, str], output: Path, *given: str, **changes: object) -> list[str]:
    knobs = {
        **places,
        "output_root": str(output),
        "device": "cpu",
        "data.tiny_world": "",
        "data.tune_scenes": 0,
        "data.buckets": BUCKETS,
        "train.learning_rate": 1e-3,
    }
    options = ["--run-name", "run", "--num-workers", "0", "--max-points", "96", "--log-every", "1"]
    return command(knobs, *options, "--eval-items", "4", *given, **changes)


def metrics_of(run: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


def made(given: list[str], world: World = World()) -> finetune_recam.FineTuning:  # noqa: B008 - frozen
    run = finetune_recam.build(*finetune_recam.read_command_line(given), CPU, world)
    run.lock.release()  # some tests start several runs in one folder
    return run


def test_batches_hold_one_size_and_are_bounded_by_tokens_or_by_items(places, tmp_path) -> None:
    run = made(words(places, tmp_path, "--num-workers", "1", "--prefetch-factor", "3"))
    assert run.batches.loader.prefetch_factor == 3
    sizes = [{condition.size for condition in batch} for batch in run.batches]
    assert {frozenset(found) for found in sizes} == {frozenset({(5, 24, 32)}), frozenset({(5, 24, 16)})}
    assert sorted(map(len, run.batches)) == [2, 4, 4, 4, 4, 4, 8]
    for more, rows in (([], 6), (["--drop-last"], 5)):
        fixed = made(words(places, tmp_path, "--no-use-dynamic-batch", "--batch-size", "3", *more))
        assert sorted(map(len, fixed.batches)) == [1, 2, *[3] * 9]
        plans = [dataclasses.replace(fixed.batches, world=World.of(Group(rank, 2))).plan for rank in range(2)]
        assert [len(plan) for plan in plans] == [rows, rows]  # the same number of batches on every rank


def test_batches_of_fixed_size_drop_what_takes_them_above_the_token_limit(places, tmp_path) -> None:
    limits = ["--batch-size", "3", "--max-points", "48", "--max-steps", "3"]
    given = words(places, tmp_path, "--no-use-dynamic-batch", *limits)
    run = made(given)
    planned, kept = list(run.batches.plan), list(run.batches)
    assert all(sum(run.policy.tokens(condition.size) for condition in batch) <= 48 for batch in kept)
    assert finetune_recam.main(given) == 0
    dropped = [len(whole) - len(rest) for whole, rest in zip(planned, kept, strict=True)]
    assert metrics_of(tmp_path / "run", "train/dropped") == dropped[:3] and any(dropped[:3])


def test_items_are_drawn_by_the_weights_of_a_file(places, tmp_path) -> None:
    data = made(words(places, tmp_path)).batches.dataset
    names = ["/".join(data.name_of(index)) for index in range(len(data))]
    scene = names[0].rpartition("/")[0]
    file = tmp_path / "weights.json"
    file.write_text(json.dumps({"train": 0, scene: 1, names[0]: 0}))
    run = made(words(places, tmp_path, "--weights", str(file), "--num-samples", "50"))
    drawn = [condition.index for batch in run.batches for condition in batch]
    assert len(drawn) == 50
    assert {names[index] for index in drawn} == {name for name in names[1:] if name.startswith(f"{scene}/")}


def test_an_item_drawn_again_gets_other_noise_and_first_draws_that_of_an_unweighted_run(places, tmp_path) -> None:
    (tmp_path / "weights.json").write_text("{}")
    given = ["--weights", str(tmp_path / "weights.json"), "--num-samples", "60", "--eval-items", "0"]
    run = made(words(places, tmp_path, *given))
    plan, draws = run.batches.plan, []
    for number, batch in enumerate(run.batches):
        draws += [(c.index, c.slot) for c in finetune_recam.numbered(batch, plan.drawn_before(number))]
    assert len(set(draws)) == 60 and max(slot for _, slot in draws) > 1
    assert {index for index, _ in draws} == {index for index, slot in draws if slot == 0}
    one = run.batches.dataset.condition(3)
    copies = [dataclasses.replace(one, slot=slot) for slot in (0, 1, 2)]
    losses = finetune_recam.flow_losses(run.policy, copies, 3.0, 42, 0)
    assert len(set(losses.tolist())) == 3
    with mock.patch.object(finetune_recam, "flow_losses", wraps=finetune_recam.flow_losses) as called:
        run.train()
    trained = [(c.index, c.slot) for call in called.call_args_list for c in call.args[1]]
    assert trained == draws


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"train": 10**400}, "must be a number of at least 0"),
        ({"train/nowhere": 1}, "'train/nowhere' names no item or folder; items are named like"),
        ({"train": -1}, "train has weight -1, must be a number of at least 0"),
        ({"train": 0}, "not all zero"),
        ([1], "must be a JSON object"),
    ],
)
def test_a_file_of_weights_that_cannot_be_used_is_one_line(places, tmp_path, capsys, content, message) -> None:
    (tmp_path / "weights.json").write_text(json.dumps(content))
    given = words(places, tmp_path, "--weights", str(tmp_path / "weights.json"))
    assert message in refusal(capsys, finetune_recam.main, given)


def test_an_items_loss_does_not_depend_on_its_batch_but_on_seed_and_epoch(places, tmp_path) -> None:
    run = made(words(places, tmp_path, sample__guidance_scale=5.0))
    assert run.policy.guidance.scale == 1.0  # the recipe's is not trained through
    conditions = [run.batches.dataset.condition(index) for index in (0, 3, 11)]
    together = finetune_recam.flow_losses(run.policy, conditions, 3.0, 42, 0)
    alone = [finetune_recam.flow_losses(run.policy, [one], 3.0, 42, 0) for one in reversed(conditions)]
    torch.testing.assert_close(together, torch.cat(alone).flip(0))
    assert len(set(together.tolist())) == 3
    for seeds in ((43, 0), (42, 1)):
        assert (finetune_recam.flow_losses(run.policy, conditions, 3.0, *seeds) != together).all()


def test_training_noise_changes_every_epoch_and_evaluation_noise_never(places, tmp_path) -> None:
    run = made(words(places, tmp_path, "--epochs", "2", "--max-points", "500000", "--seed", "7"))
    with mock.patch.object(finetune_recam, "flow_losses", wraps=finetune_recam.flow_losses) as losses:
        run.train()
        run.evaluate()
    measured, trained = [("held out",)] * 2, [(7, 0), (7, 0), (7, 1), (7, 1)]
    assert [call.args[3:] for call in losses.call_args_list] == [*measured, *trained, *measured]


def test_the_loss_is_that_of_flow_matching(places, tmp_path) -> None:
    """A network that knows the clean latents has no error, whatever the level; levels follow the shift."""
    run = made(words(places, tmp_path))
    conditions = [run.batches.dataset.condition(index) for index in range(10)]
    clean, levels = run.policy.encode_targets(conditions), []

    def oracle(latents, sigma, conditioning):
        levels.append(sigma)
        return (latents - clean) / sigma.view(-1, 1, 1, 1, 1)

    with mock.patch.object(run.policy, "velocity", oracle):
        losses = [finetune_recam.flow_losses(run.policy, conditions, shift, 42, 0) for shift in (1.0, 5.0)]
    assert torch.cat(losses).max() < 1e-6
    uniform, shifted = levels
    torch.testing.assert_close(shifted, 5 * uniform / (1 + 4 * uniform))
    assert 0 <= uniform.min() < 0.3 < 0.7 < uniform.max() < 1


@pytest.fixture(scope="module")
def finished(places, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("finished")
    changes = {"model__trained": "lora", "train__learning_rate": 1e-2}
    assert finetune_recam.main(words(places, output, "--epochs", "4", "--eval-items", "64", **changes)) == 0
    return output / "run"


def test_the_loss_falls_over_batches_of_two_sizes(finished) -> None:
    before, after = metrics_of(finished, "eval/loss")
    assert after < 0.9 * before and len(metrics_of(finished, "train/loss")) == 4 * 7
    assert len(checkpoint.published(finished / "checkpoints")) == 1


def test_the_finished_folder_is_a_whole_model_that_computes_what_the_adapted_network_does(finished, places) -> None:
    start = load_transformer(ReCamTransformer3DModel, f"{places['model.path']}/transformer")
    given = ["--run-name", "run", "--resume", "--num-workers", "0", "--max-points", "96"]
    resumed = made(words(places, finished.parent, *given, model__trained="lora"))
    model = load_networks(RECAM, tiny_settings(finished / "model"), CPU).transformer
    with torch.no_grad():
        adapted, merged, first = (network(*inputs())[0] for network in (resumed.policy.module, model, start))
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-5)
    assert (merged - first).abs().max() > 0.05
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in start.named_parameters()}
    assert (finished / "adapter").is_dir()


def test_a_resumed_run_equals_the_uninterrupted_one_bit_by_bit(places, tmp_path) -> None:
    """Stopped within the first epoch of seven batches, and at its end."""
    assert finetune_recam.main(words(places, tmp_path / "whole", "--epochs", "2")) == 0
    for steps in (3, 7, 14):
        limit = ["--max-steps", str(steps), "--checkpoint-every", "2"]
        given = words(places, tmp_path / "parts", "--epochs", "2", *limit, *["--resume"] * (steps > 3))
        assert finetune_recam.main(given) == 0
    whole, parts = newest(tmp_path / "whole" / "run"), newest(tmp_path / "parts" / "run")
    assert_equal_state(whole, parts)
    assert any(name.endswith("exp_avg_sq") and value.max() > 0 for name, value in whole.items())
    losses, others = (metrics_of(tmp_path / part / "run", "train/loss") for part in ("whole", "parts"))
    assert losses == others and len(losses) == 14


def test_a_batch_plan_that_changed_is_not_resumed(places, tmp_path, capsys) -> None:
    assert finetune_recam.main(words(places, tmp_path, "--max-steps", "1", "--eval-items", "0")) == 0
    assert finetune_recam.main(words(places, tmp_path, "--resume", "--max-points", "48")) == 2
    assert "max_points was 96, is 48" in capsys.readouterr().err
    assert finetune_recam.main(words(places, tmp_path)) == 2
    assert "already holds checkpoint_000001" in capsys.readouterr().err


def test_a_second_start_in_a_living_run_s_folder_is_refused_and_changes_nothing(places, tmp_path, capsys) -> None:
    given = words(places, tmp_path, "--max-steps", "1", "--eval-items", "0")
    half_written = tmp_path / "run" / "checkpoints" / "checkpoint_000002.tmp-abc"
    half_written.mkdir(parents=True)
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    lock = RunLock(tmp_path / "run")
    lock.take()
    assert finetune_recam.main(given) == 2
    assert f"is in use by process {os.getpid()} on " in capsys.readouterr().err
    assert half_written.is_dir() and (tmp_path / "run" / "metrics.jsonl").read_text() == "{}\n"
    lock.release()
    run = finetune_recam.build(*finetune_recam.read_command_line(given), CPU, World())
    run.train()
    with pytest.raises(ValueError, match="is in use"):
        lock.take()
    run.finish()
    lock.take()


def _tune(world: World, given: list[str]) -> int:
    with already_met(finetune_recam, world):
        return finetune_recam.main(given)


def test_two_ranks_train_as_one_process_that_sees_whole_rows(places, tmp_path) -> None:
    """Seven batches make three rows of two and one with filler; one row holds both sizes."""
    # A large epsilon keeps AdamW from turning rounding of tiny gradients into whole steps.
    given = words(places, tmp_path, "--eval-items", "64", train__adam_eps=1e-3)
    assert run_ranks(_tune, 2, given) == [0, 0]
    alone = made(words(places, tmp_path / "one", "--eval-items", "64", train__adam_eps=1e-3))
    plans = [dataclasses.replace(alone.batches, world=World.of(Group(rank, 2))).plan for rank in range(2)]
    rows, mixed, losses = list(zip(*plans, strict=True)), 0, []
    for number, row in enumerate(rows):
        batches = [batch for plan, batch in zip(plans, row, strict=True) if plan.batch_weight(number)]
        conditions = [[alone.batches.dataset.condition(index) for index in batch] for batch in batches]
        mixed += len({condition.size for batch in conditions for condition in batch}) > 1
        shift = alone.config.sample.shift
        errors = torch.cat([finetune_recam.flow_losses(alone.policy, batch, shift, 42, 0) for batch in conditions])
        errors.mean().backward()
        torch.nn.utils.clip_grad_norm_(alone.policy.trained_parameters(), alone.config.train.max_grad_norm)
        alone.optimizer.step()
        alone.optimizer.zero_grad()
        losses.append(errors.mean().item())
    assert len(rows) == 4 and mixed >= 1
    alone.step = 4
    alone.save()
    two, one = newest(tmp_path / "run"), newest(tmp_path / "one" / "run")
    assert set(one) == set(two)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: f"{name} {text}")
    assert metrics_of(tmp_path / "run", "train/loss") == pytest.approx(losses, rel=1e-4)
    alone.evaluate()
    held_out = metrics_of(tmp_path / "one" / "run", "eval/loss")[0]
    assert held_out == pytest.approx(metrics_of(tmp_path / "run", "eval/loss")[1], rel=1e-4)


@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        (["--epochs", "0"], {}, "--epochs: got 0, must be at least 1"),
        (["--num-workers", "-1"], {}, "--num-workers: got -1, must be at least 0"),
        (["--max-points", "23"], {}, "max_points=23"),
        (["--num-samples", "50"], {}, "--num-samples: got 50 without --weights"),
        (["--steps", "3"], {}, "--steps"),
        (["--run-name", "", "--resume"], {}, "--config.run_name=NAME"),
        ([], {"data__root": "nowhere"}, "nowhere"),
        ([], {"data__buckets": "5x24x36"}, "config.data.buckets: got '5x24x36'"),
    ],
)
def test_invalid_settings_are_one_line_and_exit_code_2(places, tmp_path, capsys, given, changes, message) -> None:
    assert message in refusal(capsys, finetune_recam.main, words(places, tmp_path, *given, **changes))


def test_an_unreadable_item_ends_the_run_in_one_line(places, tmp_path, capsys) -> None:
    """Found by a worker process long after the start, which looks at one item of each size."""
    root = tmp_path / "world"
    shutil.copytree(places["data.root"], root)
    scene = next((root / "train").rglob("scene1"))
    broken = sorted((scene / "videos").iterdir())[4]
    broken.write_bytes(broken.read_bytes()[: broken.stat().st_size // 2])
    given = words(places, tmp_path, "--num-workers", "1", "--eval-items", "0", data__root=root)
    error = refusal(capsys, finetune_recam.main, given)
    assert error.startswith("error: item ") and "cam05.mp4" in error


def _refused(world: World, given: list[str], which: str) -> str:
    """Return the error that a rank meets when the last one has other data, a broken item, or what is not finite."""
    odd = world.data.rank == world.data.size - 1
    if which == "data" and odd:
        given = [*given, "--config.data.train_split=val", "--config.data.eval_split=train"]
    if which == "plan" and odd:
        given = [*given, "--max-points", "48"]
    try:
        run = made(given, world)
    except ValueError as error:
        return str(error)
    before = [parameter.detach().clone() for parameter in run.policy.trained_parameters()]
    if which == "item" and odd:
        run.batches.loader.dataset.dataset = SimpleNamespace(condition=mock.Mock(side_effect=ValueError("torn")))
    elif which == "loss" and odd:
        run.policy.encode_targets = lambda conditions: torch.full((len(conditions), 4, 2, 6, 8), torch.nan)
    elif which == "gradient" and odd:
        run.policy.trained_parameters()[0].register_hook(lambda gradient: gradient + torch.inf)
    try:
        run.train()
    except (ValueError, RuntimeError) as error:
        assert all(map(torch.equal, before, run.policy.trained_parameters()))
        return f"{type(error).__name__} {error}"
    return ""


def test_2_ranks_that_share_every_sample_train_as_one(places, tmp_path) -> None:
    given = {"train__adam_eps": 1e-3, "data__buckets": "", "data__num_frames": 5}
    alone = words(places, tmp_path / "one", "--eval-items", "4", **given)
    assert finetune_recam.main(alone) == 0
    shared = words(places, tmp_path / "two", "--eval-items", "4", train__context_parallel=2, **given)
    assert run_ranks(_tune, 2, shared) == [0, 0]
    one, two = newest(tmp_path / "one" / "run"), newest(tmp_path / "two" / "run")
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-6, msg=lambda text, name=name: f"{name} {text}")
    for metric in ("train/loss", "eval/loss"):
        expected = metrics_of(tmp_path / "one" / "run", metric)
        assert expected and metrics_of(tmp_path / "two" / "run", metric) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("data", "model and data must be the same on all ranks"),
        ("plan", "batch plan must be the same on all ranks"),
        ("lock", "run is in use by process "),
        ("item", "ItemError item "),
        ("gradient", "RuntimeError gradient norm is inf in step 1: weights were left as they are"),
        ("loss", "RankError rank 1 failed in step 1: RuntimeError: loss of items [0, 6, 26, 25] is not finite"),
    ],
)
def test_what_is_wrong_on_one_rank_ends_both(places, tmp_path, which, message) -> None:
    given = words(places, tmp_path, "--eval-items", "0", data__buckets="", data__num_frames=5)
    if which == "lock":
        lock = RunLock(tmp_path / "run")
        lock.take()
    errors = run_ranks(_refused, 2, given, which)
    assert errors[0] == errors[1]
    assert message in errors[0]
