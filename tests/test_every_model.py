"""Every video model trains, resumes, spreads over ranks, is planned, examined, sampled from and exported alike.

`make test` runs each of these with one model, not that of the other tests; `make test-slow` with the others.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train_grpo
from flow_grpo.cost.plan import largest_size, make_plan
from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.models.registry import VIDEO_MODELS
from flow_grpo.preflight.dry_run import epoch_tensors
from flow_grpo.run.starts import configuration_of
from flow_grpo.settings.loading import load_config
from tests.command import command
from tests.some import some
from tests.test_train_grpo import SMALL, _train, assert_equal_state, metrics_of, newest
from tests.workers import run_ranks
from tools import doctor, export_adapter, generate, precompute, random_model
from tools.evaluation.videos import make_videos

pytestmark = pytest.mark.usefixtures("without_curves")
ROOT = Path(__file__).parents[1]
ASSETS = ROOT / "assets" / "prompts"
SIZES = {"heads": 2, "head-dim": 16, "layers": 2, "ffn": 64, "text-dim": 32, "dtype": "fp32", "codec": "small"}
HANDED_OVER = {"model.boundary_ratio": 0.6}  # before the last of five steps
FORWARD = {"train.objective": "forward", "sample.sde": "ode", "train.ema_decay": 0.5}
PLANNED = {"recam": "my_recam_8npu"} | {kind: f"{kind}_8npu" for kind in VIDEO_MODELS if kind != "recam"}


def every_model(chosen: str) -> pytest.MarkDecorator:
    """Run a test with every model, all but the chosen one in `make test-slow`."""
    return pytest.mark.parametrize("knobs", some(VIDEO_MODELS, chosen), indirect=True)


@pytest.fixture(scope="module")
def knobs(request, tmp_path_factory) -> dict[str, object]:
    """A small recipe of one kind on random weights."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    given = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    assert random_model.main(["--kind", kind, "--out", str(folder / "model"), *given]) == 0
    films = "source_video" in VIDEO_MODELS[kind].needs
    if films:
        ensure_tiny_world(folder / "world", "unit_test")
    prompts = {"data.prompts": ASSETS / "train.txt", "data.eval_prompts": ASSETS / "val.txt", "data.tiny_world": ""}
    return SMALL | ({} if films else prompts) | {
        "model.kind": kind,
        "model.path": folder / "model",
        "model.trained": "attention",
        "model.max_prompt_tokens": 24,
        "data.root": folder / "world",
        "data.height": 32,
        "data.width": 32,
        "data.reference": "source",
        "reward.weights": "sharpness=1",
        "train.learning_rate": 1e-3,
        "eval.num_conditions": 2,
        "eval.signal_groups": 0,
    }  # fmt: skip


def words(knobs: dict[str, object], out: Path, **changes: object) -> list[str]:
    recipe = "tiny_wan_t2v" if knobs["model.kind"] == "wan_t2v" else "tiny_recam"
    return command(knobs | {"output_root": out, "run_name": "run"}, recipe=recipe, **changes)


@every_model("wan_t2v")
@pytest.mark.parametrize(
    "objective", [HANDED_OVER, pytest.param(FORWARD, marks=pytest.mark.slow)], ids=["grpo", "forward"]
)
def test_a_resumed_run_equals_the_uninterrupted_one_and_the_first_ratio_is_1(knobs, objective, tmp_path):
    knobs = knobs | objective
    assert train_grpo.main(words(knobs, tmp_path / "whole")) == 0
    for epochs in (1, 2):
        assert train_grpo.main(words(knobs, tmp_path / "parts", num_epochs=epochs, resume="auto")) == 0
    assert_equal_state(newest(tmp_path / "whole" / "run"), newest(tmp_path / "parts" / "run"))
    rows = [row for row in metrics_of(tmp_path / "whole" / "run") if "train/grad_norm" in row]
    assert len(rows) == 2 and all(row["train/grad_norm"] > 0 for row in rows)
    assert all(row["policy/ratio_first_max_abs_log"] == 0.0 for row in rows)


@every_model("wan_t2v")
def test_every_layout_trains_on_2_ranks_to_the_weights_of_one(knobs, tmp_path):
    layouts = ("spread", "shuffled", "contiguous")
    prefix = {"sample__same_initial_noise": True, "sample__share_prefix": True}
    knobs = knobs | HANDED_OVER  # in tails that begin at two places, on two ranks
    half = {"num_epochs": 1, "sample__train_batch_size": 2, "train__batch_size": 2}
    for layout in layouts:
        given = words(knobs, tmp_path / layout, sample__layout=layout, **prefix, **half)
        assert run_ranks(_train, 2, given) == [0, 0]
    sharded = words(knobs, tmp_path / "fsdp2", train__sharding="fsdp2", **prefix, **half)
    assert run_ranks(_train, 2, sharded) == [0, 0]
    alone = words(knobs, tmp_path / "alone", num_epochs=1, sample__layout="spread", **prefix)
    assert train_grpo.main(alone) == 0
    one, two = newest(tmp_path / "alone" / "run"), newest(tmp_path / "spread" / "run")
    moments = [name for name in one if name.endswith("exp_avg")]
    assert moments and max(float(one[name].abs().max()) for name in moments) > 0
    for name in moments:
        torch.testing.assert_close(two[name], one[name], rtol=1e-2, atol=1e-2 * float(one[name].abs().max()) + 1e-12)
    rows = [metrics_of(tmp_path / run / "run") for run in ("alone", "fsdp2")]
    norms = [row["train/grad_norm"] for run in rows for row in run if "train/grad_norm" in row]
    assert len(norms) == 2 and norms[0] > 0 and norms[1] == pytest.approx(norms[0], rel=1e-3)


def first_rows(run: Path) -> dict[str, float]:
    """Return the metrics of the evaluation before training and of the first epoch."""
    found: dict[str, float] = {}
    for row in metrics_of(run):
        found |= row
        if "train/grad_norm" in row:
            break
    return found


@every_model("wan_t2v")
def test_2_ranks_that_share_every_sample_train_as_one_and_a_run_goes_on_without_sharing(knobs, tmp_path):
    shared = {"train__context_parallel": 2, "sample__num_batches_per_epoch": 3, "eval__signal_groups": 1}
    assert train_grpo.main(words(knobs, tmp_path / "one", **shared | {"train__context_parallel": 1})) == 0
    for sharding in ("ddp", "fsdp2"):
        given = words(knobs, tmp_path / sharding, **shared, train__sharding=sharding)
        assert run_ranks(_train, 2, [*given, "--config.num_epochs=1"]) == [0, 0]
    first = {name: first_rows(tmp_path / name / "run") for name in ("one", "ddp", "fsdp2")}
    of_one, of_two = ({n for n in first[run] if not n.startswith("system/sent_")} for run in ("one", "ddp"))
    assert of_one == of_two
    for name in ("reward/mean", "train/grad_norm", "eval/sharpness"):
        assert first["ddp"][name] == pytest.approx(first["one"][name], rel=1e-3), name
        assert first["fsdp2"][name] == pytest.approx(first["one"][name], rel=1e-3), name
    work = "system/forward_equivalents"  # of the samples, however many ranks share one
    assert first["ddp"][work] == first["one"][work]
    assert first["ddp"]["policy/ratio_first_max_abs_log"] == 0.0
    for sharding in ("ddp", "fsdp2"):
        plan = make_plan(configuration_of(tmp_path / sharding / "run"), 2, 1.0)
        kinds = ("gradients", "tokens", "weights")
        sent = {kind: first[sharding].get(f"system/sent_{kind}_gib", 0.0) for kind in kinds}
        expected = {kind: getattr(plan, f"sent_{kind}_gib") for kind in kinds}
        assert sent == pytest.approx(expected, rel=0.25 if sharding == "fsdp2" else 1e-6), sharding
    alone = words(knobs, tmp_path / "ddp", **shared | {"train__context_parallel": 1}, resume="auto")
    assert train_grpo.main(alone) == 0
    expected, found = (newest(tmp_path / folder / "run") for folder in ("one", "ddp"))
    for name in (name for name in expected if name.endswith("exp_avg")):
        largest = float(expected[name].abs().max())
        torch.testing.assert_close(found[name], expected[name], rtol=1e-2, atol=1e-2 * largest)


@every_model("redirector")
def test_a_run_is_sampled_from_exported_and_loaded_by_the_same_tools(knobs, tmp_path):
    knobs = knobs | {"model.trained": "lora", "model.lora_full_modules": ""}
    assert train_grpo.main(words(knobs, tmp_path, num_epochs=1)) == 0
    run = tmp_path / "run"
    source = next((Path(str(knobs["data.root"])) / "val").rglob("cam01.mp4"), None)
    subject = ["--prompts", "a kite"] if source is None else ["--source", str(source), "--camera", "arc_left"]
    subject += ["--source-poses", "static"] if knobs["model.kind"] == "redirector" else []
    assert generate.main(["--run", str(run), *subject, "--out", str(tmp_path / "made"), "--steps", "2"]) == 0
    assert len(list((tmp_path / "made").glob("*_before.mp4"))) == 1
    if source is not None:  # the held-out conditions, as tools/evaluate.py --run films them
        films, cameras = make_videos(configuration_of(run), run / "adapter", tmp_path / "judged", None)
        assert len(list(films.glob("*.mp4"))) == len(json.loads(cameras.read_text())) == 2
    checkpoint = sorted((run / "checkpoints").iterdir())[-1]
    exported = ["--checkpoint", str(checkpoint), "--out", str(tmp_path / "again")]
    assert export_adapter.main([*exported, "--config.model.lora_alpha=8"]) == 2  # would be scaled otherwise
    assert export_adapter.main(exported) == 0
    for file in (run / "adapter").glob("*.safetensors"):
        one, other = load_file(file), load_file(tmp_path / "again" / file.name)
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@every_model("redirector")
def test_the_doctor_finds_no_fault_and_encodings_are_made_before_a_run(knobs, tmp_path, capsys):
    given = words(knobs, tmp_path, model__encodings=tmp_path / "encodings")
    assert precompute.main(given) == 0
    assert " 0 failed" in capsys.readouterr().out
    doctor.main(given)
    said = capsys.readouterr().out
    assert "doctor: " in said and not re.search(r"^fail +(?!reward_order| )", said, re.M)  # which sharpness fails


@pytest.mark.parametrize("kind", some(VIDEO_MODELS, "wan_t2v"))
def test_the_full_size_recipe_is_planned_and_traced(kind):
    config = load_config(f"{ROOT}/config/grpo.py:{PLANNED[kind]}", [])
    model, size = VIDEO_MODELS[kind], largest_size(config)
    plan = make_plan(config, 8, 2e14)
    assert plan.tokens == model.videos * 21 * 30 * 52
    assert 0 < plan.most_gib < 64
    shape = tuple(epoch_tensors(config, size, 8)["decode", "videos"].shape)
    assert shape == (config.sample.train_batch_size, 3, *size)


def test_what_a_model_needs_is_asked_for_at_the_door(tmp_path, capsys):
    given = ["--config", f"{ROOT}/config/grpo.py:tiny_recam", f"--config.output_root={tmp_path}"]
    given += [f"--config.data.prompts={ASSETS}/train.txt", f"--config.data.eval_prompts={ASSETS}/val.txt"]
    assert train_grpo.main([*given, "--config.device=cpu", "--config.data.tiny_world="]) == 2
    assert "the model needs the source_video of every condition, 'prompt-" in capsys.readouterr().err
