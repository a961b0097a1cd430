"""The training loop on the toy policy: when it evaluates, saves and stops, and which metrics it records."""

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import time
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

import train_grpo
from flow_grpo.algorithm.groups.dynamic_sampling import DynamicSampling
from flow_grpo.cost.forward_count import ForwardCount
from flow_grpo.judging import changes
from flow_grpo.judging.evaluate import Evaluation, Evaluator
from flow_grpo.judging.reward_signal import NoSignalError
from flow_grpo.judging.stop_rules import BrokenPolicyError
from flow_grpo.judging.table import Table
from flow_grpo.records import RewardResult
from flow_grpo.reporting.console import Progress
from flow_grpo.reporting.metric_files import read_rows
from flow_grpo.reporting.metric_names import OUTSIDE_EPOCHS, metric_of
from flow_grpo.reporting.tracker import Tracker
from flow_grpo.rewards.base import RewardSet
from flow_grpo.run import conclusion
from flow_grpo.run import trainer as trainer_module
from flow_grpo.run.run_state import RunState
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime.checkpoints import checkpoint
from flow_grpo.runtime.checkpoints.run_lock import RunLock
from flow_grpo.runtime.checkpoints.saving import Saving
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.process_group import Group, InputError, RankError, World
from flow_grpo.settings.schema import CheckpointConfig, Config, DynamicSamplingConfig, EvalConfig, ModelConfig
from tests import toy
from tests.judging.test_evaluate import ToyData
from tests.workers import run_ranks

DYNAMIC = DynamicSamplingConfig(enabled=True, max_resample_times=1)
OF_ITS_OWN = ModelConfig(kind="tests/toy.py:ToyPolicy", checkpointing="none")  # its operations are not known


def a_config(**changes) -> Config:
    values = {
        "num_epochs": 3,
        "log_videos_every": 0,
        "sample": toy.sample_config(train_batch_size=4),
        "reward": toy.reward_config(),
        "train": toy.train_config(),
        "eval": EvalConfig(every=2, num_conditions=4, batch_size=4, num_steps=6, videos=1, signal_groups=0),
        "checkpoint": CheckpointConfig(every=2, keep=5),
    }
    return Config(**(values | changes))


def make_trainer(folder: Path, world: World, **changes) -> Trainer:
    config, policy = a_config(**changes), toy.ToyPolicy()
    sampling = toy.collector(world, policy, debug=config.debug, train_batch_size=4)
    moving = toy.updater(policy, world=world)
    rewards = RewardSet([toy.BrightnessReward()], {"brightness": 1.0})
    progress = Progress(config.num_epochs, world)
    return Trainer(
        config=config,
        collector=sampling,
        updater=moving,
        evaluator=Evaluator(policy, ToyData(), rewards, None, config, world),
        state=RunState(policy.net, moving.optimizer, sampling.stream.sampler, None, torch.device("cpu"), {}),
        tracker=Tracker(folder, {}, (), world),
        progress=progress,
        world=world,
        device=torch.device("cpu"),
        run_folder=folder,
        lock=RunLock(folder),
        forwards=ForwardCount(policy.net, dataclasses.replace(config, model=OF_ITS_OWN), torch.device("cpu")),
        dynamic_sampling=DynamicSampling(
            config.dynamic_sampling, {"brightness": 0.0}, k=4, local=8, seed=5, world=world, say=progress.say
        )
        if config.dynamic_sampling.enabled
        else None,
    )


@pytest.fixture
def a_trainer(tmp_path, monkeypatch, without_curves):
    """Return how to make a trainer of one rank that draws no curves and saves an empty adapter."""
    monkeypatch.setattr(trainer_module, "save_adapter", lambda policy, folder, world: folder.mkdir())
    return functools.partial(make_trainer, tmp_path, World())


def everything_flat(**changes) -> dict:
    return {"reward": toy.reward_config(flat_eps=1e3), "dynamic_sampling": DYNAMIC} | changes


def run(trainer: Trainer) -> None:
    trainer.train()
    trainer.finish()


def metrics_of(folder: Path, name: str = "reward/mean") -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if name in row]


def steps_of(folder: Path, name: str) -> list[int]:
    return [row["step"] for row in metrics_of(folder, name)]


def test_a_run_evaluates_saves_and_records_when_it_should(a_trainer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(changes, "LEAST_SCENES", 2)
    with (
        mock.patch.object(conclusion, "judge", wraps=conclusion.judge) as judged,
        mock.patch.object(conclusion, "worse_by_camera", wraps=conclusion.worse_by_camera) as listed,
    ):
        run(a_trainer(log_videos_every=2))
    assert steps_of(tmp_path, "eval/brightness") == [0, 2, 3]
    assert steps_of(tmp_path, "reward/mean") == [1, 2, 3]
    assert steps_of(tmp_path, "policy/ratio_after_max_abs_log") == [2]
    assert [path.name[-6:] for path in checkpoint.published(tmp_path / "checkpoints")] == ["000002", "000003"]
    assert len(list((tmp_path / "videos").glob("train_000002_*.mp4"))) == 1
    row = metrics_of(tmp_path)[0]
    phases = ("fetch", "encode", "rollout", "score", "gather", "update", "other")
    assert row["time/epoch_s"] == pytest.approx(sum(row[f"time/{phase}_s"] for phase in phases))
    assert row["system/samples_per_s"] == pytest.approx(8 / row["time/epoch_s"])
    assert {"train/learning_rate", "train/zero_std_ratio", "dyn/flat_groups", "reward/brightness_valid"} <= set(row)
    assert any(name.startswith("system/memory_") for name in row)
    summary = json.loads((tmp_path / "summary.json").read_text())
    parts = {"verdict", "before", "after", "change_by_camera", "measured_on", "train_seconds", "ended_by"}
    assert set(summary) == parts and summary["ended_by"] == "num_epochs"
    assert "ended by num_epochs after epoch 3 of 3\n" in capsys.readouterr().out
    assert summary["verdict"]["overall"] in ("better", "worse", "unclear")
    shown = [Path(file) for kind in ("best", "worst") for file in summary["verdict"][kind]]
    assert [file.name.partition("_val")[0] for file in shown] == ["best_000003_1", "worst_000003_1"]
    assert all(file.stat().st_size for file in shown)
    change = summary["after"]["eval/brightness"] - summary["before"]["eval/brightness"]
    low, high = summary["after"]["eval/brightness_ci95"]
    assert low < change < high
    assert steps_of(tmp_path, "eval_change/brightness") == [2, 3]
    last = metrics_of(tmp_path, "eval_change/brightness")[-1]
    ends = [last[f"eval_change/brightness{end}"] for end in ("", "_low", "_high")]
    assert ends == [pytest.approx(change), low, high]
    # Changes are judged beside the values before training.
    assert judged.call_args.kwargs["before"]["eval/brightness"] == summary["before"]["eval/brightness"]
    by_camera = listed.call_args.args[3]
    assert by_camera and all(name.startswith("eval_by_camera/") for name in by_camera)


def test_a_signal_does_not_cut_short_the_wait_for_a_checkpoint_after_an_error(a_trainer):
    """A launcher that has lost a rank asks the others to end."""
    killed: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: killed.append(number))
    trainer = a_trainer()
    trainer.train = mock.Mock(side_effect=RuntimeError("a crash"))
    trainer.saver.linger = lambda: os.kill(os.getpid(), signal.SIGTERM)
    try:
        with pytest.raises(RuntimeError, match="a crash"):
            trainer.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert trainer.end.signal == "SIGTERM" and not killed


def test_a_resumed_run_gives_the_same_intervals_and_an_older_checkpoint_none(a_trainer, tmp_path, monkeypatch):
    run(a_trainer())
    whole = json.loads((tmp_path / "summary.json").read_text())
    for older in (False, True):
        other = a_trainer(num_epochs=3)
        path = checkpoint.published(tmp_path / "checkpoints")[-1]
        if older:
            found = checkpoint.load(path, identity={}, world=World())
            for name in ("before_rows", "floor", "measured_on"):  # not in checkpoints of earlier versions
                found.state.pop(name)
            monkeypatch.setattr(checkpoint, "load", lambda *_, f=found, **__: f)
        other.state.restore(path, world=World())
        shutil.rmtree(tmp_path / "adapter")
        run(other)
        again = json.loads((tmp_path / "summary.json").read_text())
        names = [name for name in whole["after"] if not (older and name.endswith("_ci95"))]
        assert again["after"] == {name: pytest.approx(whole["after"][name], abs=1e-12) for name in names}


class Judge:
    """The distance of the first frame's brightness from the true one's; counts its calls."""

    name, floor, measures, calls = "judge", 0.0, ("off",), 0

    def __call__(self, videos, conditions):
        self.calls += 1
        true = torch.stack([condition.target_video[:, 0].mean() for condition in conditions])
        off = (videos[:, :, 0].mean(dim=(1, 2, 3)) - true).abs()
        return RewardResult(-off, torch.ones(len(off), dtype=torch.bool), ("",) * len(off), {"off": off})


def test_the_judge_s_floor_is_measured_once_and_reported(a_trainer, tmp_path, capsys):
    trainer = a_trainer(num_epochs=1)
    trainer.evaluator.gold = judge = Judge()
    run(trainer)
    assert steps_of(tmp_path, "eval_floor/off") == [0]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert set(summary["floor"]) == {"eval_floor/judge", "eval_floor/off"}
    assert summary["floor"]["eval_floor/off"] < 0.5 * summary["before"]["eval/off"]
    assert "floor" in capsys.readouterr().out
    assert judge.calls == 3  # before, after, and the floor
    other = a_trainer(num_epochs=1)
    other.state.restore(checkpoint.published(tmp_path / "checkpoints")[-1], world=World())
    assert other.state.floor == summary["floor"]


@pytest.mark.parametrize("end", ["finish", "signal", "refusal"])
def test_no_second_of_a_run_is_in_no_metric(a_trainer, tmp_path, monkeypatch, end):
    """
    Parts are slowed down, those between the phases, before the first and after the last record as well, so that what
    nobody measures would be missed. Time goes by in these parts only.
    """
    seconds = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: sum(seconds))
    config = a_config(num_epochs=3, doctor="fast", checkpoint=CheckpointConfig(every=2, keep=1))

    def built(*given):
        trainer = a_trainer(**vars(config))
        trainer.ledger = given[-1]
        trainer.evaluator.gold = Judge()
        return trainer

    def epoch_of(trainer, epoch):
        if end == "refusal" and epoch == 2:
            trainer.sample()
            raise InputError("a broken video")
        train_epoch(trainer, epoch)
        trainer.end.signal = "SIGTERM" if end == "signal" else ""

    train_epoch = Trainer.train_epoch
    monkeypatch.setattr(Trainer, "train_epoch", epoch_of)
    for name, replaced in (
        ("read_command_line", lambda *_: (config, "")),
        ("rewards_in_words", lambda *_: ""),
        ("set_up_rank", lambda *_, **__: (torch.device("cpu"), World())),
        ("assemble", built),
        ("examine", lambda _: None),
    ):
        monkeypatch.setattr(train_grpo, name, slowed(replaced, seconds))
    for owner, names in (
        (toy.ToyPolicy, "decode"),
        (Tracker, "begin log write_summary close"),
        (RunState, "save"),
        (Saving, "wait"),
        (Evaluator, "run floor clips"),
        (Progress, "finish_epoch say"),
        (trainer_module, "broken paired_changes save_adapter going_on"),
        (conclusion, "print_before_after next_commands"),
        (trainer_module.compare, "advantages"),
        (process_group, "shut_down"),
    ):
        for name in names.split():
            monkeypatch.setattr(owner, name, slowed(getattr(owner, name), seconds))
    imports_s = 5.0
    assert train_grpo.main(begun=-imports_s) == (2 if end == "refusal" else 0)
    finished = {"finish": 3, "signal": 1, "refusal": 2}[end]
    assert checkpoint.published(tmp_path / "checkpoints")[-1].name == f"checkpoint_00000{finished}"
    rows = read_rows(tmp_path / "metrics.jsonl").values()
    found = {name: sum(row.get(f"time/{name}_s", 0.0) for row in rows) for name in ("epoch", *OUTSIDE_EPOCHS)}
    assert found["start"] > imports_s and found["finish"] and found["close"]
    assert end != "finish" or all(found.values())
    last_report = 0.1  # which cannot hold its own seconds
    assert sum(found.values()) == pytest.approx(imports_s + sum(seconds) - last_report)


def slowed(function, seconds: list[float]):
    def slow(*given, **named):
        seconds.append(0.1)
        return function(*given, **named)

    return slow


def test_forwards_are_counted_per_sample_and_summed_over_epochs_resumed_runs_included(a_trainer, tmp_path):
    run(a_trainer(num_epochs=2))
    each = 6 + 2 * 3  # denoising steps, and a forward and backward for each of the window's
    counted = [row["system/forward_equivalents_per_sample"] for row in metrics_of(tmp_path)]
    assert counted == [each, each + 4 / 8]  # a probe of 4 samples, because the evaluation is due
    longer = a_trainer(num_epochs=3)
    longer.state.restore(tmp_path / "checkpoints" / "checkpoint_000002", world=World())
    longer.train()
    assert metrics_of(tmp_path)[-1]["system/forward_equivalents"] == 8 * (3 * each + 4 / 8)


def test_advantages_stay_within_the_recipe_s_bound(a_trainer, tmp_path):
    run(a_trainer(num_epochs=1, train=toy.train_config(adv_clip=0.25)))
    (row,) = metrics_of(tmp_path)
    assert 0 < row["reward/advantage_abs"] <= 0.25
    low, middle, high = (row[f"reward/advantage_p{percent}"] for percent in (10, 50, 90))
    assert -0.25 <= low < middle < high <= 0.25


def test_the_same_state_is_evaluated_once(a_trainer):
    trainer = a_trainer(num_epochs=2)
    run(trainer)
    steps, per_epoch = 6, 2 * 6
    replayed = 2 * 2 * 2 + 1  # epochs, micro-batches, window; the probe
    evaluations = 2
    shown = 2 * 2  # the best and the worst, now and as the starting policy makes them
    assert len(trainer.collector.policy.calls) == 2 * per_epoch + replayed + (evaluations + shown) * steps


def test_a_resumed_run_measures_the_start_no_more_and_counts_the_minutes_it_has_used(a_trainer):
    trainer = a_trainer(max_minutes=1.0)
    trainer.state.before, trainer.state.train_seconds = {"eval/brightness": 0.5}, 61.0
    trainer.evaluate_before()
    assert trainer.collector.policy.calls == [] == list(trainer.epochs()) and trainer.ended_by == "max_minutes"


def test_a_run_that_breaks_a_rule_saves_stops_and_says_so_again_when_it_is_resumed(a_trainer, tmp_path):
    rules = ("policy/clip_fraction<0", "eval/brightness<0.9")
    trainer = a_trainer(num_epochs=4, train=toy.train_config(stop_if=rules))
    trainer.evaluate_before()
    trainer.state.before["eval/brightness"] = 0.95  # or the rule would have held before training
    epochs = trainer.epochs()
    trainer.train_epoch(next(epochs))
    with pytest.raises(BrokenPolicyError, match=r"eval/brightness is 0\.\d+, below 0\.9 after epoch 2: .* is saved"):
        trainer.train_epoch(next(epochs))
    trainer.save()
    (path,) = checkpoint.published(tmp_path / "checkpoints")
    for given, ends in (
        (rules, pytest.raises(BrokenPolicyError, match="after epoch 2")),
        ((), contextlib.nullcontext()),
    ):
        other = a_trainer(num_epochs=4, train=toy.train_config(stop_if=given))
        other.state.restore(path, world=World())
        with ends:
            other.evaluate_before()


def test_ranks_whose_own_metrics_differ_break_a_rule_together(a_trainer, monkeypatch):
    trainer = a_trainer(num_epochs=1, train=toy.train_config(stop_if=("time/score_s>1000",)))
    own = Group.gather_text
    monkeypatch.setattr(trainer, "evaluate_if_due", lambda: None)
    trainer.train_epoch(next(trainer.epochs()))
    monkeypatch.undo()
    other = "time/score_s is 2000, above 1000"
    monkeypatch.setattr(Group, "gather_text", lambda group, text: [*own(group, text), other])
    with pytest.raises(BrokenPolicyError, match="time/score_s is 2000, above 1000 after epoch 1"):
        trainer.evaluate_if_due()


def test_a_run_whose_copies_cannot_be_told_apart_does_not_begin(a_trainer):
    settings = dataclasses.replace(a_config().eval, signal_groups=1)
    for floor, doctor, ends in ((0.0, "fast", False), (10.0, "fast", True), (10.0, "off", False)):
        trainer = a_trainer(eval=settings, doctor=doctor, num_epochs=1)
        trainer.collector.rewards.rewards[0].floor = floor
        with pytest.raises(NoSignalError, match="spread_over_floor") if ends else contextlib.nullcontext():
            trainer.evaluate_before()
    trainer = a_trainer(eval=settings, doctor="fast", num_epochs=1)
    # Rewards without any value are named, and not taken for copies that are alike.
    trainer.collector.rewards.rewards[0].broken = {(index, slot) for index in range(24) for slot in range(4)}
    with pytest.raises(NoSignalError, match=r"^brightness has no value for any copy .* the warnings above say why$"):
        trainer.evaluate_before()


def test_fixed_conditions_are_recorded_beside_their_start_and_a_resumed_run_keeps_it(a_trainer, tmp_path):
    def trainer(epochs: int, seed: int = 7) -> Trainer:
        made = a_trainer(eval=dataclasses.replace(a_config().eval, every=1), num_epochs=epochs)
        sampling = dataclasses.replace(made.collector.sampling, seed=seed, record=False)
        rewards = RewardSet([toy.BrightnessReward()], {"brightness": 1.0})
        made.fixed = Evaluator(made.updater.policy, ToyData(), rewards, None, made.config, World(), sampling)
        return made

    run(trainer(2))
    names = "fixed/brightness", "fixed/brightness_start"
    now, start = ([row[name] for row in metrics_of(tmp_path, name)] for name in names)
    assert len(now) == 3 and start == [now[0]] * 3 and now[0] != now[1] != now[2]
    counted = metrics_of(tmp_path, "system/fixed_forward_equivalents")
    assert [row["system/fixed_forward_equivalents"] for row in counted] == [4 * (len(toy.SIGMAS) - 1)] * 3
    newest = checkpoint.published(tmp_path / "checkpoints")[-1]
    for seed, kept in ((7, True), (8, False)):  # with other noise it is another start
        resumed = trainer(3, seed)
        resumed.state.restore(newest, world=World())
        resumed.evaluate()
        assert (resumed.state.fixed["brightness"] == now[0]) == kept


@pytest.mark.parametrize(("split", "gold"), [("tune", "room_pose"), ("report", "room_pose"), ("tune", "")])
def test_a_reward_that_rises_while_the_gold_camera_gets_worse_ends_the_run(a_trainer, split, gold):
    trainer = a_trainer(eval=dataclasses.replace(a_config().eval, split=split, gold=gold, every=1))
    trainer.evaluator.gold = types.SimpleNamespace(name=gold)
    columns = {"brightness": [0.5, 0.6, 0.5, 0.6, 0.55, 0.5], "room_pose": [-0.2, -0.21, -0.2, -0.22, -0.2, -0.21]}
    labels = tuple("abcdef"), ("c",) * 6, ("",) * 6
    before = Table(*labels, {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()})
    trainer.state.before = {f"eval/{name}": mean for name, mean in before.means().items()}
    trainer.state.table_before = before
    after = Table(*labels, {name: 1.2 * column for name, column in before.values.items()})
    trainer.state.finished, trainer._evaluated = 1, (1, Evaluation(after, []))
    ends = split == "tune" and gold
    with pytest.raises(BrokenPolicyError, match="eval/hacked") if ends else contextlib.nullcontext():
        trainer.evaluate_if_due()


def test_a_resumed_run_makes_up_once_for_an_evaluation_that_was_due_and_failed(a_trainer, tmp_path):
    best = CheckpointConfig(every=1, keep=1, best="eval/brightness")
    first, second = (a_trainer(num_epochs=2, checkpoint=best) for _ in range(2))
    second.tracker = first.tracker
    for trainer in (first, second):
        trainer.state.before, trainer.state.finished = {"eval/brightness": 0.5}, 2
    first.save()
    manifest = tmp_path / "checkpoints" / "checkpoint_000002" / "manifest.json"
    assert json.loads(manifest.read_text())["score"] is None
    for trainer in (first, second):
        trainer.evaluate_before()
    assert first.tracker.recorded(2) >= {"eval/brightness"}
    assert first.collector.policy.calls and not second.collector.policy.calls
    assert json.loads(manifest.read_text())["score"] == first.evaluate().metrics["eval/brightness"]


def test_a_sampler_position_that_moved_since_the_last_save_is_saved(a_trainer, tmp_path):
    """As when an epoch ends in a shortage: a resumed run should draw other conditions."""
    trainer = a_trainer(num_epochs=2)
    trainer.save()
    assert (tmp_path / "checkpoints" / "checkpoint_000000").is_dir()  # before the first epoch as well
    steps = []
    begun = mock.Mock()
    trainer.state.save = lambda *_, **__: steps.append(trainer.state.sampler.next_step) or begun
    trainer.save()
    trainer.sample()
    trainer.save()
    trainer.save()
    assert len(steps) == 1 and steps[0] > 0 and begun.wait.call_count == 1


def test_a_checkpoint_is_written_behind_the_next_epoch_and_its_failure_ends_the_run(a_trainer, monkeypatch):
    trainer = a_trainer(num_epochs=3, checkpoint=CheckpointConfig(every=1, keep=1))
    order = []
    saving = mock.Mock(wait=lambda: order.append("wait"))
    trainer.state.save = lambda *_, **__: order.append(f"begin {trainer.state.finished}") or saving
    monkeypatch.setattr(trainer, "update", lambda *_: order.append("update"))
    trainer.train()
    epochs = [f"begin {n}" for n in (1, 2, 3)]
    assert order == ["update", epochs[0], "update", "wait", epochs[1], "update", "wait", epochs[2]]
    trainer.save()
    assert order[-1] == "wait"

    def fail() -> None:
        raise RankError("rank 1 failed in saving a checkpoint (files): OSError: No space left on device")

    trainer = a_trainer(num_epochs=3, checkpoint=CheckpointConfig(every=1, keep=1))
    trainer.state.save = lambda *_, **__: mock.Mock(wait=fail)
    with pytest.raises(RankError, match="No space left on device"):
        trainer.train()
    assert trainer.state.finished == 2


@pytest.mark.parametrize(("found", "score"), [("brightness", None), ("rot_err_deg", -0.5)])
def test_a_checkpoint_s_score_is_its_best_metric_if_that_has_a_value(a_trainer, tmp_path, found, score):
    trainer = a_trainer(checkpoint=CheckpointConfig(every=1, keep=1, best="-eval/rot_err_deg"))
    row = {"scene": "", "camera": "", "preset": "", "values": {found: 0.5}}
    trainer.evaluator.run = lambda weights: Evaluation(Table.of_rows([row]), [])
    trainer.evaluate()
    trainer.save()
    manifest = tmp_path / "checkpoints" / "checkpoint_000000" / "manifest.json"
    assert json.loads(manifest.read_text())["score"] == score


def test_averaged_weights_are_evaluated_and_saved(a_trainer, monkeypatch):
    trainer = a_trainer(num_epochs=0)
    inside = []

    class Average:
        @contextlib.contextmanager
        def applied(self):
            inside.append("in")
            yield
            inside.append("out")

        def state_dict(self):
            return {}

    trainer.state.ema = Average()
    monkeypatch.setattr(trainer_module, "save_adapter", lambda policy, folder, world: inside.append("save"))
    run(trainer)
    assert inside == ["in", "out", "in", "save", "out"]


def test_samples_without_a_reward_are_printed_and_counted(a_trainer, capsys, tmp_path):
    trainer = a_trainer(num_epochs=1)
    index = trainer.state.sampler.plan(0)[0][0][3]
    trainer.collector.rewards = RewardSet([toy.BrightnessReward(broken=[(index, 2)])], {"brightness": 1.0})
    run(trainer)
    assert "reward brightness: 1 samples of rank 0 have no value, first: broken on purpose" in capsys.readouterr().out
    (row,) = metrics_of(tmp_path)
    assert row["reward/brightness_valid"] == pytest.approx(7 / 8)
    assert row["dyn/incomplete_groups"] == 1
    # In a resample as well.
    trainer = a_trainer(**everything_flat(num_epochs=1))
    later = trainer.state.sampler.plan(2)[0][0][3]
    trainer.collector.rewards = RewardSet([toy.BrightnessReward(broken=[(later, 2)])], {"brightness": 1.0})
    trainer.train()
    assert "reward brightness: 1 samples of rank 0 have no value" in capsys.readouterr().out


def test_a_run_continues_after_a_fallback_with_fresh_conditions_every_time(a_trainer, tmp_path):
    trainer = a_trainer(**everything_flat())
    run(trainer)
    rows = metrics_of(tmp_path)
    assert [(row["dyn/fallback"], row["dyn/resample_rounds"]) for row in rows] == [(1.0, 1.0)] * 3
    assert all(row["train/updates"] == 1 and row["train/grad_norm"] == 0.0 for row in rows)
    assert all(row["system/samples_per_s"] == pytest.approx(16 / row["time/epoch_s"]) for row in rows)
    assert trainer.state.sampler.next_step == 3 * 2 * 2  # epochs, rounds, batches
    assert trainer.state.shortages == [1, 1, 1]


@pytest.mark.parametrize("resampled", [True, False])
def test_an_epoch_without_a_signal_takes_no_step_when_asked_to(a_trainer, tmp_path, resampled):
    skipping = dataclasses.replace(DYNAMIC, enabled=resampled, skip_step_if_all_flat=True)
    run(a_trainer(**everything_flat(num_epochs=1, dynamic_sampling=skipping)))
    (row,) = metrics_of(tmp_path)
    assert (row["train/updates"], row["train/skipped_updates"]) == (0.0, 1.0)


def test_an_epoch_with_some_signal_still_takes_its_step(a_trainer, tmp_path):
    skipping = dataclasses.replace(DYNAMIC, skip_step_if_all_flat=True)
    trainer = a_trainer(num_epochs=1, dynamic_sampling=skipping)
    gathered = trainer.gather(trainer.sample())
    groups = [gathered.rewards["brightness"][gathered.gids == gid] for gid in (0, 1)]
    low, high = sorted(float(group.max() - group.min()) for group in groups)
    between = toy.reward_config(flat_eps=(low + high) / 2)
    trainer = a_trainer(num_epochs=1, dynamic_sampling=skipping, reward=between)
    run(trainer)
    (row,) = metrics_of(tmp_path)
    assert row["train/updates"] == 1.0


def test_weights_follow_their_schedule_and_so_they_do_when_resumed(a_trainer, tmp_path, monkeypatch):
    fading = toy.reward_config(weights={"brightness": 9.0}, schedules={"brightness": ((0, 1.0), (2, 0.5))})
    trainer, shown = a_trainer(reward=fading, log_videos_every=1), []
    monkeypatch.setattr(trainer.gallery, "training", lambda *_, weights, **__: shown.append(weights["brightness"]))
    with mock.patch.object(conclusion, "judge", wraps=conclusion.judge) as judged:
        run(trainer)
    assert judged.call_args.args[2] == ["brightness"]  # has a weight in any epoch
    rows = metrics_of(tmp_path)
    # Copies of a group are shown in the order of the epoch's own weights.
    assert [row["reward/brightness_weight"] for row in rows] == shown == [1.0, 0.75, 0.5]
    assert [row["reward/mean"] / row["reward/brightness_mean"] for row in rows] == pytest.approx([1.0, 0.75, 0.5])
    sizes = [row["reward/advantage_abs"] for row in rows]
    resumed = a_trainer(reward=fading)
    resumed.state.restore(checkpoint.published(tmp_path / "checkpoints")[0], world=World())  # after epoch 1
    resumed.train()
    assert resumed.metrics["reward/brightness_weight"] == 0.5
    assert resumed.metrics["reward/advantage_abs"] == sizes[2]


def test_rewards_are_recorded_by_camera_and_servers_by_epoch(a_trainer, tmp_path):
    class Asked(toy.BrightnessReward):
        calls = 0

        def __call__(self, videos, conditions):
            self.calls += 1
            return super().__call__(videos, conditions)

        def stats(self):
            stats = {"calls": float(self.calls), "failures": 0.0, "p50_s": 0.25, "p95_s": 0.5}
            self.calls = 0
            return stats

    trainer = a_trainer(num_epochs=2, eval=dataclasses.replace(a_config().eval, signal_groups=1))
    trainer.collector.rewards = RewardSet([Asked()], {"brightness": 1.0})
    trainer.cameras = tuple(("pan", "zoom")[index % 2] for index in range(24))
    run(trainer)
    rows = metrics_of(tmp_path)
    assert [row["server/brightness_calls"] for row in rows] == [2.0, 2.0]
    assert all(row["server/brightness_p95_s"] == 0.5 for row in rows)
    for row in rows:
        by_camera = [row[name] for name in (f"reward_by_camera/{k}/brightness" for k in ("pan", "zoom")) if name in row]
        assert min(by_camera) <= row["reward/brightness_mean"] <= max(by_camera)
    assert any(steps_of(tmp_path, f"eval_by_camera/{camera}/brightness") for camera in ("cam02", "zoom_in"))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert not [name for name in summary["before"] if name.startswith("eval_by_camera")]


def test_every_metric_of_dynamic_sampling_is_recorded_which_judges_by_the_weights_of_the_epoch(a_trainer, tmp_path):
    rising = toy.reward_config(schedules={"brightness": ((0, 1.0), (2, 3.0))})
    run(a_trainer(reward=rising, dynamic_sampling=DYNAMIC))
    rows = metrics_of(tmp_path)
    found = [row["dyn/reward_mean_before"] / row["reward/brightness_mean"] for row in rows]
    assert found == pytest.approx([1.0, 2.0, 3.0])
    row = rows[0]
    names = "valid_groups_ratio_initial flat_groups incomplete_groups resample_rounds pool_samples shortage fallback "
    names += "fallback_rate discarded_valid padded_samples moved_samples moved_bytes time reward_mean_after"
    assert {f"dyn/{name}" for name in names.split()} <= set(row)
    assert not [name for name in row if name != "step" and metric_of(name) is None]
    assert row["dyn/reward_mean_before"] == pytest.approx(row["reward/mean"])


def test_a_full_first_round_trains_as_without_dynamic_sampling(a_trainer, tmp_path):
    plain, pooled = a_trainer(num_epochs=2), a_trainer(num_epochs=2, dynamic_sampling=DYNAMIC)
    for trainer in (plain, pooled):
        trainer.train()
    assert torch.equal(toy.weights_of(plain.updater.policy), toy.weights_of(pooled.updater.policy))
    assert not torch.equal(toy.weights_of(plain.updater.policy), toy.weights_of(toy.ToyPolicy()))


def test_a_failing_phase_is_named(a_trainer):
    trainer = a_trainer(**everything_flat())
    samples = trainer.sample()
    gathered = trainer.gather(samples)
    trainer.collector.stream.take = lambda step: 1 / 0
    with pytest.raises(RuntimeError, match="rank 0 failed in resample #1: ZeroDivisionError"):
        trainer.choose(samples, gathered)
    with pytest.raises(RuntimeError, match="rank 0 failed in sampling: ZeroDivisionError"):
        trainer.sample()


def test_a_signal_ends_the_run_after_its_epoch_saved_and_resumable(a_trainer, tmp_path, capsys):
    trainer, start = a_trainer(), tmp_path / "starts" / "001.json"
    start.parent.mkdir()
    start.write_text('{"config": {}, "go_on": ""}')
    trainer.evaluate_before()
    with trainer.end:
        for epoch in trainer.epochs():
            os.kill(os.getpid(), signal.SIGTERM)
            trainer.train_epoch(epoch)
    assert trainer.ended_by == "SIGTERM" and trainer.state.finished == 1
    trainer.leave()
    assert [path.name for path in checkpoint.published(tmp_path / "checkpoints")] == ["checkpoint_000001"]
    assert not (tmp_path / "summary.json").exists()
    assert json.loads(start.read_text()) == {"config": {}, "go_on": "", "ended_by": "SIGTERM"}
    assert trainer.stop(InputError("a.mp4 is cut")) == 2
    assert json.loads(start.read_text())["ended_by"] == "InputError (a.mp4 is cut)"
    place = f"--config.run_name={tmp_path.name} --config.output_root={tmp_path.parent}"
    said = capsys.readouterr().out
    assert f"ended by SIGTERM after epoch 1, saved; go on with --config.resume=auto {place}\n" in said
    assert f"saved after epoch 1; go on with --config.resume=auto {place}\n" in said  # after the input's fault


def _signalled(world: World, folder: Path) -> tuple[list[int], str]:
    trainer = make_trainer(folder, world)
    trainer.end.signal = "SIGTERM" if world.data.rank == 1 else ""
    return list(trainer.epochs()), trainer.ended_by


def test_a_signal_to_one_rank_ends_all(tmp_path):
    assert run_ranks(_signalled, 2, tmp_path) == [([], "SIGTERM")] * 2


def test_the_best_checkpoint_is_that_of_the_best_evaluation(a_trainer, tmp_path, monkeypatch):
    values = iter([0.0, 3.0, 5.0, 4.0])
    trainer = a_trainer(
        checkpoint=CheckpointConfig(every=1, keep=1, best="-eval/brightness"),
        eval=EvalConfig(every=1, num_conditions=4, batch_size=4, num_steps=6, videos=0, signal_groups=0),
    )
    measure = trainer.evaluator.run

    def measured(weights: object) -> Evaluation:
        found = measure(weights)
        found.table.values["brightness"].fill_(next(values))
        return found

    monkeypatch.setattr(trainer.evaluator, "run", measured)
    run(trainer)
    kept = [path.name[-1] for path in checkpoint.published(tmp_path / "checkpoints")]
    assert kept == ["1", "3"]  # less is better; the first epoch's 3 is the least that was saved


def test_a_best_that_is_not_measured_is_refused_with_what_there_is(a_trainer):
    trainer = a_trainer(checkpoint=CheckpointConfig(every=1, keep=1, best="eval/beauty"))
    with pytest.raises(ValueError, match=r"checkpoint\.best: got 'eval/beauty', must be .*eval/brightness"):
        trainer.evaluate_before()
