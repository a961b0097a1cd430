"""The planner: what a recipe costs, before there are weights."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.cost import plan as planning
from flow_grpo.cost import savings
from flow_grpo.cost.choose_recomputation import USABLE
from flow_grpo.cost.codec_cost import codec_cost
from flow_grpo.cost.round_steps import sample_steps
from flow_grpo.models.fake_policy import FakePolicy
from flow_grpo.run import starts
from flow_grpo.settings.loading import load_config
from flow_grpo.settings.schema import Config
from tools import plan

ROOT = Path(__file__).parents[2]
SMALL = ["--config.model.path=nowhere", "--config.data.height=64", "--config.data.width=64"]
ALONE = ["--config.sample.share_prefix=false", "--config.train.batch_size=2"]  # a row of the update for every copy
SHARDED = ["--config.model.trained=full", "--config.train.sharding=fsdp2"]


def planned(capsys, *words: str, recipe: str = "my_recam_8npu") -> tuple[int, dict[str, float]]:
    code = plan.main(["--config", f"{ROOT}/config/grpo.py:{recipe}", "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_the_plan_of_the_8_npu_recipe_is_the_arithmetic_of_its_numbers(capsys):
    code, found = planned(capsys, "--tflops", "300", "--memory", "64GiB")
    assert code == 0 and found["fits"]
    assert (found["tokens"], found["samples_per_epoch"], found["rollout_calls"], found["update_calls"]) == (
        65_520,
        32,
        5 + 1 + 2 * 5,  # of a group with the last window, and the tails of two batches
        1,
    )
    shared = ((0 + 1 + 2 + 3 + 4 + 5) / 6 + 1) / 4  # steps up to the window's first, once for 4 copies
    update = found["update_forwards"]
    assert update == pytest.approx(3.8, abs=0.03)
    assert found["forward_equivalents_per_sample"] == pytest.approx(shared + 5 + update / 4)
    forward = found["forward_tflop"]
    assert forward == pytest.approx(955, rel=0.01)
    assert found["rollout_s"] == pytest.approx((shared + 5) * 4 * forward / 300, rel=1e-3)  # of 4 samples
    assert found["update_s"] == pytest.approx(update * forward / 300, rel=1e-3)  # of a group
    latent = 4 * 16 * 21 * 60 * 104
    prompts = 4 * 4 * 512 * 4096
    # Of 4 samples two states, the final and the source's latents; of their group five states and the source's.
    assert found["trajectories_gib"] == pytest.approx((22 * latent + 1.25 * prompts) / 2**30, rel=1e-3)
    assert 20 < found["update_gib"] < 30


def test_shared_steps_a_single_one_and_a_short_tail_are_counted(capsys):
    one = ["--config.sample.sde_window=1", "--config.sample.sde_steps=1,3", "--config.sample.share_prefix=false"]
    words = [*one, "--config.sample.tail_steps=5"]
    _, short = planned(capsys, *words)
    assert short["forward_equivalents_per_sample"] == pytest.approx(
        2 + 1 + 5 + short["update_forwards"]
    )  # the window starts at step 1 or 3
    shared = ["--config.sample.share_prefix=true"]
    _, found = planned(capsys, *words, *shared)
    assert found["forward_equivalents_per_sample"] == pytest.approx((2 + 1) / 4 + 5 + found["update_forwards"] / 4)
    latent = (
        4 * 16 * 21 * 60 * 104
    )  # of one group a rank, sent to the three ranks with its other copies, and a velocity
    assert found["sent_prefixes_gib"] == pytest.approx(3 * 3 * latent / 2**30, rel=1e-6)  # and the draws back
    two = ["--config.sample.sde_window=2", "--config.sample.sde_steps=0,1,2,3", *words[3:], *shared]
    _, found = planned(capsys, *two)
    update = found["update_forwards"]
    assert found["forward_equivalents_per_sample"] == pytest.approx((1 + 1) / 4 + 1 + 5 + update * (1 / 4 + 1))
    assert found["sent_prefixes_gib"] == pytest.approx(3 * 4 * latent / 2**30, rel=1e-6)
    assert short["sent_prefixes_gib"] == 0


def test_sparse_calls_take_six_tenths_of_prefix_and_tail_and_memory_for_the_source(capsys):
    exact, sparse = (planned(capsys, f"--config.sample.ode_calls={calls}")[1] for calls in ("exact", "sparse"))
    update = exact["update_forwards"] / 4 + 1 / 4  # with the trained step
    walks = [found["forward_equivalents_per_sample"] - update for found in (exact, sparse)]
    assert 0.4 < walks[1] / walks[0] < 0.6
    assert sparse["rollout_s"] < 0.6 * exact["rollout_s"] and sparse["rollout_calls"] == exact["rollout_calls"]
    kept = 30 * 2 * 32_760 * 1536 * 2  # blocks, rows, tokens of the source, in bf16
    assert sparse["rollout_gib"] - exact["rollout_gib"] == pytest.approx(kept / 2**30, rel=1e-3)
    assert sparse["update_gib"] == exact["update_gib"]


def test_the_codec_counted_by_its_first_frames_is_the_codec_counted_whole():
    config = load_config(f"{ROOT}/config/grpo.py:tiny_recam", ["--config.data.num_frames=9"])
    policy, size = FakePolicy(config), planning.largest_size(config)
    found = codec_cost(config.model, size)
    for flops, call in (
        (found.encode_flops, lambda: policy.codec.encode(torch.empty(3, *size))),
        (found.decode_flops, lambda: policy.decode(torch.empty(1, *found.latents))),
    ):
        with FlopCounterMode(display=False) as counter, policy.fake_mode:
            call()
        assert flops == counter.get_total_flops() > 0


def test_the_codec_has_a_rate_of_its_own_and_a_source_is_encoded_once(capsys):
    """Measured on an H100, docs/devices.md: 81x480x832 pixels are decoded in 10.25 s, at 27 TFLOP/s."""
    _, found = planned(capsys, "--tflops", "450", "--config.model.vae_dtype=fp32")
    assert found["decode_s"] == pytest.approx(4 * 10.25, rel=0.03)
    assert found["encode_s"] == pytest.approx(found["encode_tflop"] / 27, rel=0.01)  # 8 conditions on 8 devices
    parts = ("encode", "rollout", "decode", "reward", "update", "sent")
    assert found["epoch_s"] == pytest.approx(sum(found[f"{part}_s"] for part in parts))
    _, fast = planned(capsys, "--tflops", "450", "--config.model.vae_dtype=bf16", "--config.model.encodings=enc")
    assert fast["encode_s"] == 0 and fast["decode_s"] == pytest.approx(found["decode_s"] * 0.06 / 0.29)
    assert fast["decode_gib"] < found["decode_gib"]


def test_the_command_prints_the_report_and_its_exit_code_says_whether_it_fits(capsys, monkeypatch):
    numbers = dict.fromkeys((field.name for field in dataclasses.fields(planning.Plan)), 1) | {"update_gib": 3}
    # The report plans every set of knobs; a network's count for each takes a minute.
    monkeypatch.setattr(savings, "make_plan", lambda *_: planning.Plan(**numbers))
    words = ["--config", f"{ROOT}/config/grpo.py:tiny_recam", "--devices", "2"]
    for memory, code, verdict in (("64GiB", 0, "fits: 3.0 of 64 GiB"), ("10MiB", 1, "does not fit: 3.0 of 0.009765")):
        assert plan.main([*words, "--memory", memory]) == code
        first, *_, last = capsys.readouterr().out.splitlines()
        assert first.startswith("counting the costs of ") and last.startswith(verdict)


def test_guidance_doubles_the_work_and_kl_adds_a_reference_call(capsys):
    tiny, whole = {"recipe": "tiny_recam"}, ("--devices", "2", "--config.model.boundary_ratio=0")
    _, plain = planned(capsys, *whole, **tiny)
    _, guided = planned(capsys, *whole, "--config.sample.guidance_scale=5.0", **tiny)
    _, penalised = planned(capsys, *whole, "--config.train.kl_coef=0.1", **tiny)
    _, handed_over = planned(capsys, "--devices", "2", **tiny)
    assert handed_over["optimizer_gib"] == penalised["optimizer_gib"] > plain["optimizer_gib"]  # a copy of the start
    assert guided["rollout_s"] == pytest.approx(2 * plain["rollout_s"], rel=1e-3)
    assert penalised["update_forwards"] == pytest.approx(plain["update_forwards"] + 1)  # nothing is recomputed here


def test_the_model_folder_is_measured_where_there_is_one(capsys):
    code, found = planned(capsys, "--devices", "2", "--memory", "2048MiB", recipe="tiny_recam")
    assert code == 0
    assert found["tokens"] == 2 * 5 * 3 * 4
    assert found["weights_gib"] < 0.1


@pytest.mark.parametrize(
    ("change", "smaller", "larger"),
    [
        (SHARDED[1:], ["weights_gib", "optimizer_gib", "update_gib"], ["sent_weights_gib"]),
        (["--config.model.offload=true"], ["weights_gib", "update_gib"], ["host_gib"]),
        (["--config.model.encodings=enc"], ["weights_gib", "update_gib", "rollout_gib"], []),
        (["--config.sample.offload=true"], ["trajectories_gib"], ["host_gib"]),
        ([*ALONE, "--config.train.copies=2"], ["trajectories_gib"], ["host_gib"]),  # chosen from a whole round
        ([*ALONE, "--config.train.batch_size=1"], ["activations_gib", "update_gib"], ["update_calls"]),
        (["--config.train.ema_decay=0.9"], [], ["optimizer_gib"]),
        (["--config.model.trained=attention", "--config.train.kl_coef=0.1"], [], ["optimizer_gib", "update_s"]),
    ],
)
def test_every_way_out_moves_the_numbers_it_is_named_for(capsys, change, smaller, larger):
    tiny = {"recipe": "my_recam_8npu_tiny"}
    words = [*SMALL, "--config.model.dtype=bf16", "--config.model.trained=lora", "--config.train.ema_decay=0"]
    words += ALONE if change[:2] == ALONE else []
    _, before = planned(capsys, *words, **tiny)
    _, after = planned(capsys, *words, *change, **tiny)
    assert all(after[name] < before[name] for name in smaller), (before, after)
    assert all(after[name] > before[name] for name in larger), (before, after)


def test_shards_divide_what_a_rank_holds(capsys):
    words = [*SMALL, *SHARDED, "--config.model.encodings=enc"]
    four, eight = (planned(capsys, *words, "--devices", n, recipe="my_recam_8npu_tiny")[1] for n in "48")
    assert four["optimizer_gib"] == pytest.approx(2 * eight["optimizer_gib"])


def test_old_log_probabilities_that_are_scored_again_take_their_time(capsys):
    one_update = ["--devices", "1", "--tflops", "300"]
    half = ["--config.train.copies=2"]  # for groups the price is the same
    plain = planned(capsys, *one_update, recipe="my_recam_1gpu")[1]["update_forwards"]
    again = ["--config.train.old_log_prob=recompute"]
    for words, more, rows in (([], 0, 1), (again, 1, 1), (half, 0, 1), ([*ALONE, *half], 0, 2)):
        _, found = planned(capsys, *one_update, *words, recipe="my_recam_1gpu")
        assert found["update_forwards"] == pytest.approx(plain + more, rel=1e-3)
        assert found["update_s"] == pytest.approx(4 * rows * (plain + more) * found["forward_tflop"] / 300, rel=1e-3)
    two_updates = ["--config.train.updates_per_epoch=2", "--config.train.guard=true", "--config.train.step_weight=none"]
    _, several = planned(capsys, *one_update, *two_updates, recipe="my_recam_1gpu")
    assert several["update_forwards"] == pytest.approx(plain + 1, rel=1e-3)


def test_frozen_parts_are_counted_as_they_are_loaded_not_as_they_are_stored(capsys, tmp_path):
    (tmp_path / "text_encoder").mkdir()
    save_file({"w": torch.zeros(2**20, dtype=torch.float64)}, tmp_path / "text_encoder" / "model.safetensors")
    words = [*SMALL[1:], f"--config.model.path={tmp_path}", "--config.model.trained=lora"]
    found = [
        planned(capsys, *words, f"--config.model.dtype={dtype}", recipe="my_recam_8npu_tiny")[1]["weights_gib"]
        for dtype in ("bf16", "fp32")
    ]
    parameters = 1_490_420_800 + 2**20
    assert found[1] - found[0] == pytest.approx(2 * parameters / 2**30, rel=0.01)


def test_states_of_more_steps_and_of_guidance_are_counted(capsys):
    tiny = {"recipe": "my_recam_8npu_tiny"}
    latent = 4 * 16 * 2 * 8 * 8
    sizes = [
        planned(capsys, *SMALL, *ALONE, *words, **tiny)[1]["trajectories_gib"] * 2**30 / 4
        for words in (
            ["--config.sample.sde_steps=1,2,3", "--config.sample.sde_window=0"],
            ["--config.sample.sde_steps=1,2,3,4,5", "--config.sample.sde_window=0"],
            ["--config.sample.sde_steps=1,2,3", "--config.sample.sde_window=0", "--config.sample.guidance_scale=5"],
        )
    ]
    assert sizes[1] - sizes[0] == pytest.approx(2 * latent)  # 6 states instead of 4
    assert sizes[2] - sizes[0] == pytest.approx(4 * 8 * 4096)


def test_weights_in_shards_travel_for_every_forward_and_its_backward(capsys):
    _, plain = planned(capsys, *SMALL, *SHARDED, recipe="my_recam_8npu_tiny")
    _, kl = planned(capsys, *SMALL, *SHARDED, "--config.train.kl_coef=0.1", recipe="my_recam_8npu_tiny")
    weights = 4 * plain["trained_parameters"] * 7 / 8 / 2**30
    gathers = plain["rollout_calls"] + 2 * plain["update_calls"]
    assert plain["sent_weights_gib"] == pytest.approx(weights * gathers, rel=1e-6)
    assert plain["sent_gradients_gib"] == pytest.approx(weights * plain["update_calls"], rel=1e-6)
    more = kl["sent_weights_gib"] - plain["sent_weights_gib"]
    assert more == pytest.approx(weights * plain["update_calls"], rel=1e-6)


def test_ranks_that_share_samples_have_a_part_of_their_activations_and_seconds(capsys):
    _, alone = planned(capsys)
    _, four = planned(capsys, "--config.train.context_parallel=4")
    for name in ("activations_gib", "rollout_s", "decode_s", "update_s"):  # all decode one of 4 samples
        assert four[name] == pytest.approx(alone[name] / 4), name
    _, three = planned(capsys, "--config.train.context_parallel=3", "--devices", "24")
    assert three["decode_s"] == pytest.approx(alone["decode_s"] / 2), "a rank decodes two of 4"
    assert four["samples_per_epoch"] == alone["samples_per_epoch"] / 4
    assert alone["sent_tokens_gib"] == 0 and four["sent_gradients_gib"] == alone["sent_gradients_gib"]
    sent = sum(four[f"sent_{kind}_gib"] for kind in ("tokens", "gradients", "weights", "prefixes"))
    assert four["sent_s"] == pytest.approx(sent * 2**30 / 25e9) and four["sent_s"] > 4 > alone["sent_s"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "lots"], "--memory: got 'lots'"),
        (["--cores", "0"], "--cores: got 0, must be at least 1"),
        (["--devices", "0"], "--devices: got 0, must be at least 1"),
        (["--tflops", "0"], "--tflops: got 0, must be finite and above 0"),
        (["--tflops", "nan"], "--tflops: got nan, must be finite and above 0"),
        (["--devices", "3"], "config.sample.train_batch_size: got 2, 3 rank(s)"),
        (["--config.train.context_parallel=3"], "context_parallel: got 3, must divide the number of ranks, 8"),
        (["--config.sample.kk=3"], "config.sample.kk: no such knob"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(capsys, words, message):
    assert plan.main(["--config", f"{ROOT}/config/grpo.py:my_recam_8npu", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def make_run(run: Path, device: str, *knobs: str) -> Config:
    config = load_config(f"{ROOT}/config/grpo.py:tiny_recam", [f"--config.output_root={run.parent}", *knobs])
    recipe = "config/grpo.py:tiny_recam"
    starts.record(run, config, recipe, checkpoint=None, epoch=0, ranks=2, device=device, served={})
    starts.begin(run)
    return config


def test_the_plan_of_a_run_stands_beside_what_it_measured(tmp_path, capsys):
    run = tmp_path / "first"
    config = make_run(run, "device cpu (x86_64, 2 cores); no npu: torch_npu is not installed")
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/x": 1}\n')
    assert plan.main(["--run", str(run)]) == 2
    assert "has no finished epoch yet" in capsys.readouterr().err
    row = {
        "time/epoch_s": 3.0,
        "time/rollout_s": 1.5,
        "time/update_s": 1.0,
        "system/sent_gradients_gib": 0.5,
    }
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row | {"step": step, "time/epoch_s": float(step)}) + "\n" for step in (1, 2, 9))
        file.write('{"step": 10, "time/ep')  # it was killed in mid-write
    assert plan.main(["--run", str(run)]) == 0
    said = capsys.readouterr().out
    assert "3 epochs on 2 rank(s), device cpu (x86_64, 2 cores); seconds planned at the " in said
    found = {line[:34].strip(): line[34:].split() for line in said.splitlines()[2:-1]}
    work = planning.make_plan(config, 2, 1.0)
    expected = planning.make_plan(config, 2, (work.rollout_s + work.update_s) / 2.5, 1)
    assert expected.rollout_s + expected.update_s == pytest.approx(2.5)
    assert found["seconds of an epoch"] == [f"{expected.epoch_s:.4g}", "2"]
    assert found["GiB sent: gradients"] == [f"{expected.sent_gradients_gib:.4g}", "0.5"]
    assert found["seconds of encoding"][1] == "-"
    assert plan.main([]) == 2 and plan.main(["--run", str(run), "--config", "x"]) == 2


@pytest.mark.parametrize(
    ("device", "ranks_in_memory", "mode"),
    [("device npu", 1, "none"), ("device cpu", 2, "none"), ("device cpu", 1, "blocks")],
)
def test_the_plan_of_a_run_recomputes_what_the_run_decided_to(tmp_path, capsys, device, ranks_in_memory, mode):
    """`ranks_in_memory`: for how many ranks that keep all activations the device has memory."""
    auto = make_run(tmp_path / "first", device, "--config.model.checkpointing=auto")
    modes = {name: dataclasses.replace(auto.model, checkpointing=name) for name in ("none", "blocks")}
    plans = {name: planning.make_plan(dataclasses.replace(auto, model=model), 2, 1.0) for name, model in modes.items()}
    gib = 1.01 * ranks_in_memory * plans["none"].update_gib / USABLE
    row = {"step": 1, "time/epoch_s": 1.0, "system/memory_total_gib": gib}
    (tmp_path / "first" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert plan.main(["--run", str(tmp_path / "first")]) == 0
    said = capsys.readouterr().out
    assert f"{mode}, planned" in said and plans["none"].update_gib > plans["blocks"].update_gib
    (line,) = (line for line in said.splitlines() if line.startswith("forwards a sample"))
    assert line.split()[3] == f"{plans[mode].forward_equivalents_per_sample:.4g}"


@pytest.mark.parametrize(("groups", "waits"), [(1, True), (8, False)])
def test_ranks_wait_for_the_longest_prefix_unless_their_groups_share_a_window(capsys, groups, waits):
    _, found = planned(capsys, f"--config.sample.window_groups={groups}", "--tflops", "300")
    mean = (3.5 + 4 * 5) * found["forward_tflop"] / 300  # a prefix of 1 to 6 steps, and four tails
    most = (6 + 4 * 5) * found["forward_tflop"] / 300
    assert mean * 1.05 < found["rollout_s"] <= most if waits else found["rollout_s"] == pytest.approx(mean)


def test_the_run_is_its_epochs_and_evaluations_with_their_rewards(capsys):
    few = ["--config.num_epochs=160", "--config.eval.every=80", "--config.eval.num_conditions=16"]
    _, found = planned(capsys, *few, "--tflops", "300", "--config.eval.fixed_conditions=0", "--cores", "2")
    seconds = 160 * found["epoch_s"] + 3 * found["evaluation_s"]
    assert found["run_hours"] == pytest.approx(seconds / 3600)
    assert found["device_hours"] == pytest.approx(8 * found["run_hours"])
    assert found["evaluation_share"] == pytest.approx(3 * found["evaluation_s"] / seconds)
    sampling = (2 * 50 * 2 + 4 * 8.5) * found["forward_tflop"] / 300  # guided; a group shows the rewards' signal
    assert found["evaluation_s"] > sampling + 2 * 33  # and the true views of two videos are compared on one core
    _, more = planned(capsys, *few, "--tflops", "300", "--config.eval.fixed_conditions=0", "--cores", "8")
    assert more["reward_s"] <= found["reward_s"] and more["evaluation_s"] < found["evaluation_s"]


@pytest.mark.slow  # the network's operations are counted for every recipe
@pytest.mark.parametrize(
    ("recipe", "devices"),
    [
        ("my_recam_8npu", 8),
        ("my_recam_8npu_fast", 8),
        ("my_recam_8npu_small", 8),
        ("my_recam_1gpu", 1),
        ("my_recam_full", 8),
        ("my_recam_2node", 16),
        ("redirector_8npu", 8),
        ("wan_t2v_8npu", 8),
        ("tiny_recam", 2),
    ],
)
def test_evaluations_take_a_quarter_of_a_run_at_most_and_the_fixed_conditions_3_percent(recipe, devices):
    config = load_config(f"{ROOT}/config/grpo.py:{recipe}", [])
    found = planning.make_plan(config, devices, savings.ASSUMED_RATE)
    assert found.evaluation_share <= 0.25
    fixed = planning.evaluations(config) * config.eval.fixed_conditions * sample_steps(config)
    assert fixed / (config.num_epochs * found.samples_per_epoch * found.forward_equivalents_per_sample) <= 0.04
