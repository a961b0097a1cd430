"""A run goes on with its own configuration, and every start is on record."""

import json
import shlex
from pathlib import Path

import pytest

from flow_grpo.run import starts
from flow_grpo.settings.errors import ConfigError
from flow_grpo.settings.loading import load_config, to_dict
from flow_grpo.settings.schema import Config

ROOT = Path(__file__).resolve().parents[2]
TOY, OTHER = f"{ROOT}/tests/toy_recipe.py:toy", f"{ROOT}/config/grpo.py:tiny_recam"


RECIPE = """
from tests.toy_recipe import toy as _toy

def to_complete():
    config = _toy()
    config.{knob} = {value}
    return config
"""


def to_complete(folder: Path, knob: str, value: object) -> str:
    """Return a recipe that is not valid without a knob of the command line."""
    file = folder / "recipes.py"
    file.write_text(RECIPE.format(knob=knob, value=value))
    return f"{file}:to_complete"


def words(root: Path, *knobs: str) -> list[str]:
    return [f"--config.{knob}" for knob in (f"output_root={root}", "run_name=first", *knobs)]


def started(root: Path, *knobs: str, name: str = "first", epoch: int = 10, spec: str = TOY) -> Path:
    """Return the folder of a run that was started with some knobs and saved a checkpoint."""
    run = root / name
    (run / "checkpoints" / f"checkpoint_{epoch:06d}").mkdir(parents=True)
    config = load_config(spec, words(root, *knobs))
    starts.record(run, config, spec, checkpoint=None, epoch=0, ranks=2, device="cpu", served={})
    starts.begin(run)
    return run


def again(root: Path, *knobs: str, spec: str = TOY) -> tuple[Config, list[str]]:
    return starts.configuration(spec, words(root, *knobs))


def test_a_resume_keeps_the_overrides_of_the_first_start(tmp_path):
    started(tmp_path, "train.learning_rate=2e-4", "reward.weights.exposure=0.2", "sample.k=16")
    config, said = again(tmp_path, "resume=auto", "num_epochs=300")
    assert (config.train.learning_rate, config.reward.weights["exposure"], config.num_epochs) == (2e-4, 0.2, 300)
    assert config.sample.num_image_per_prompt == config.sample.k == 16 and config.resume == "auto"
    assert said[0] == f"goes on with the configuration of {tmp_path / 'first'}, started from {TOY}"
    assert said[said.index("changed on the command line:") + 1] == "  num_epochs: 200 -> 300"
    assert "  train.learning_rate: 0.0001 -> 0.0002" in said[said.index("  num_epochs: 200 -> 300") :]


def test_overrides_of_a_resume_go_on_top_of_the_run_s_own_numbers(tmp_path):
    started(tmp_path, "reward.weights=exposure=0.2,target_view=1", "sample.k=16")
    config, said = again(tmp_path, "resume=auto", "reward.weights.exposure=0.5", "sample.k=8")
    assert config.reward.weights == {"exposure": 0.5, "target_view": 1.0}
    assert config.sample.num_image_per_prompt == config.sample.k == 8
    assert '  reward.weights: {"exposure": 0.2, "target_view": 1.0} -> {"exposure": 0.5, "target_view": 1.0}' in said


def test_a_resume_without_changes_equals_the_first_start(tmp_path):
    run = started(tmp_path, "sample.sde_steps=1,2", "reward.gates.target_view=source_match:-0.5")
    config, said = again(tmp_path, "resume=auto")
    plain = to_dict(config)
    assert plain | {"resume": ""} == json.loads((run / "config.json").read_text())
    assert "changed on the command line:" not in said


def test_a_fresh_start_takes_the_recipe_s_and_a_restart_by_the_launcher_the_run_s_own(tmp_path, monkeypatch):
    run = started(tmp_path, "train.learning_rate=2e-4", "seed=7")
    for knobs in ((), ("resume=",)):
        config, said = again(tmp_path, *knobs)
        assert config == load_config(TOY, words(tmp_path, *knobs)) and said == []
    said = again(tmp_path, "resume=auto", "run_name=frist")[1]
    assert said == [f"nothing to resume in {tmp_path / 'frist'}: starts afresh"]
    assert again(tmp_path, "run_name=frist")[1] == []
    with monkeypatch.context() as restarted:
        restarted.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        assert again(tmp_path)[0].train.learning_rate == 2e-4
    (run / "checkpoints" / "checkpoint_000010").rmdir()
    assert again(tmp_path, "resume=auto")[0].seed == 0


def test_a_run_cannot_go_on_with_another_recipe_or_a_damaged_configuration(tmp_path):
    run = started(tmp_path)
    with pytest.raises(ConfigError, match=r"must be .*toy_recipe.py:toy, from which the run .*first was started"):
        again(tmp_path, "resume=auto", spec=OTHER)
    (run / "config.json").write_text("[")
    with pytest.raises(ValueError, match=r"^[^\n]*config.json is not JSON[^\n]*another run_name$"):
        again(tmp_path, "resume=auto")


def test_a_new_run_takes_the_configuration_of_the_checkpoint_s_run(tmp_path):
    run = started(tmp_path, "train.learning_rate=2e-4", name="before")
    config, said = again(tmp_path, f"resume={run}/checkpoints/checkpoint_000010", "seed=3")
    assert (config.train.learning_rate, config.seed, config.run_name) == (2e-4, 3, "first")
    assert said[0].startswith(f"goes on with the configuration of {run}")


def test_a_run_whose_folder_of_checkpoints_is_a_link_goes_on_with_its_own_configuration(tmp_path):
    run, disk = started(tmp_path, "train.learning_rate=2e-4"), tmp_path / "disk" / "first"
    disk.parent.mkdir()
    (run / "checkpoints").rename(disk)
    (run / "checkpoints").symlink_to(disk)
    for folder, name in ((run / "checkpoints", "first"), (disk, "first"), (run / "checkpoints", "second")):
        config, said = again(tmp_path, f"resume={folder}/checkpoint_000010", f"run_name={name}")
        assert config.train.learning_rate == 2e-4 and said[0].startswith(f"goes on with the configuration of {run},")
    config, said = again(tmp_path, f"resume={disk}/checkpoint_000010", "run_name=second")
    assert said == [f"{disk.parent} holds no config.json: the configuration is that of {TOY}"]


def test_a_link_to_a_checkpoint_leads_to_the_run_that_saved_it(tmp_path):
    run = started(tmp_path, "train.learning_rate=2e-4", name="before")
    links = started(tmp_path, name="other") / "best"
    links.mkdir()
    (links / "of_before").symlink_to(run / "checkpoints" / "checkpoint_000010")
    inside = links.parent / "checkpoints" / "of_before"
    inside.symlink_to(run / "checkpoints" / "checkpoint_000010")
    for link in (links / "of_before", inside):
        said = again(tmp_path, f"resume={link}")[1]
        assert said[0].startswith(f"goes on with the configuration of {run},")


def test_a_run_of_a_recipe_that_the_command_line_completes_goes_on_without_those_words(tmp_path):
    spec = to_complete(tmp_path, "reward.weights.source_match = config.reward.weights.target_view", 0.0)
    started(tmp_path, "reward.weights.target_view=1", spec=spec)
    config, said = again(tmp_path, "resume=auto", spec=spec)
    assert config.reward.weights == {"source_match": 0.0, "target_view": 1.0}
    line = '  reward.weights: {"source_match": 0.0, "target_view": 0.0} -> {"source_match": 0.0, "target_view": 1.0}'
    assert said[-1] == line and said[-2].endswith("where the recipe says otherwise now (recipe -> run):")
    said = starts.rewards_in_words(spec, config)
    assert said == "rewards and their weights: source_match 0, target_view 1 (recipe: 0)"
    with pytest.raises(ConfigError, match="must hold a weight above 0"):
        again(tmp_path, "run_name=second", spec=spec)


def test_a_recipe_out_of_a_knob_s_bounds_is_not_compared_with_what_completes_it(tmp_path):
    spec = to_complete(tmp_path, "num_epochs", -1)
    started(tmp_path, "num_epochs=5", "seed=7", spec=spec)
    config, said = again(tmp_path, "resume=auto", "num_epochs=6", spec=spec)
    assert (config.num_epochs, config.seed) == (6, 7)
    assert said[1:] == ["changed on the command line:", "  num_epochs: 5 -> 6"]
    assert "recipe" not in starts.rewards_in_words(spec, config)


def test_a_new_run_may_begin_from_a_checkpoint_with_another_recipe_and_is_told_every_difference(tmp_path):
    run = started(tmp_path, name="before")
    config, said = again(tmp_path, f"resume={run}/checkpoints/checkpoint_000010", spec=OTHER)
    assert config.data.root == load_config(OTHER).data.root
    assert said[0] == f"new run from a checkpoint of {run}, with the configuration of {OTHER}"
    assert any(line.startswith("  data.root: ") for line in said)


def test_knobs_that_a_start_did_not_know_are_the_recipe_s_and_lost_ones_are_named(tmp_path):
    run = started(tmp_path, "seed=7")
    plain = json.loads((run / "config.json").read_text())
    del plain["train"]["learning_rate"]
    plain["train"]["momentum"] = 0.9
    (run / "config.json").write_text(json.dumps(plain))
    config, said = again(tmp_path, "resume=auto")
    assert (config.seed, config.train.learning_rate) == (7, load_config(TOY).train.learning_rate)
    assert "  train.learning_rate: not known -> 0.0001" in said
    assert "  train.momentum is no knob any more: left out" in said


def test_every_start_is_on_record(tmp_path):
    run = started(tmp_path, "seed=7")
    path = run / "checkpoints/c"
    starts.record(run, load_config(TOY), TOY, path, epoch=10, ranks=1, device="cpu", served={})
    first, second = (json.loads((run / "starts" / f"00{number}.json").read_text()) for number in (1, 2))
    assert (first["config"]["seed"], first["checkpoint"], first["ranks"]) == (7, "", 2)
    assert (second["config"]["seed"], second["epoch"]) == (0, 10)
    assert second["checkpoint"] == str(run / "checkpoints/c") and "torch" in second["versions"]
    assert first["command"] and first["recipe"] == TOY and first["commit"] == starts.commit() != ""


def test_a_start_takes_the_place_of_no_other_where_a_damaged_record_was_removed(tmp_path):
    run = started(tmp_path, "seed=7")
    for epoch in (10, 20):
        starts.record(run, load_config(TOY), TOY, None, epoch=epoch, ranks=1, device="cpu", served={})
    (run / "starts/001.json").unlink()
    starts.record(run, load_config(TOY), TOY, None, epoch=30, ranks=1, device="cpu", served={})
    found = {file.name: json.loads(file.read_text())["epoch"] for file in (run / "starts").iterdir()}
    assert found == {"002.json": 10, "003.json": 20, "004.json": 30}


@pytest.mark.parametrize("spoiled", [{"config": None}, {"go_on": 3}, {"identity": "x"}, {"served": "x"}])
def test_a_record_that_lacks_what_is_read_is_refused_by_its_name(tmp_path, spoiled):
    run = started(tmp_path, "seed=7")
    file = run / "starts/001.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | spoiled))
    with pytest.raises(ValueError, match=r"001\.json is no record of a start: .* remove it"):
        starts.other_parts(run, {})


def test_a_start_says_which_reward_another_model_computes_now(tmp_path):
    def record(**served: str) -> list[str]:
        start = {"checkpoint": None, "epoch": 0, "ranks": 1, "device": "cpu", "served": served}
        return starts.record(tmp_path, load_config(TOY), TOY, **start)

    assert record(judge="hpsv3 v1", other="a 1") == record(judge="hpsv3 v1", new="b 1") == []
    (line,) = record(judge="hpsv3 v2", new="b 1")
    assert record(judge="hpsv3 v2", new="b 1") == [line]
    assert "reward judge is now computed by hpsv3 v2, as the run began by hpsv3 v1" in line


def test_rewards_of_a_run_are_named_with_those_that_are_not_the_recipe_s():
    recipe = starts.rewards_in_words(TOY, load_config(TOY))
    assert recipe.startswith("rewards and their weights: ") and "recipe" not in recipe
    words = ["--config.reward.weights.exposure=0.5", "--config.reward.weights.target_view=0"]
    said = starts.rewards_in_words(TOY, load_config(TOY, words))
    assert "exposure 0.5 (not in the recipe)" in said and "target_view 0 (recipe: 1)" in said
    assert said.endswith("the recipe's stay: a weight of 0 takes one out of training")
    replaced = starts.rewards_in_words(TOY, load_config(TOY, ["--config.reward.weights=exposure=1"]))
    assert replaced == "rewards and their weights: exposure 1 (not in the recipe)"


@pytest.mark.parametrize("rows", [24, 96])
def test_printed_commands_can_be_pasted_wherever_the_run_lies(tmp_path, rows):
    root = tmp_path / "it's my runs"
    run = started(root, f"data.height={rows}", "data.width=96", "max_minutes=5")
    lines = [shlex.split(line.partition(":")[2]) for line in starts.next_commands(run)]
    _film, _measure, report, further = lines
    assert report == ["python", "tools/report.py", str(run)]
    going_on = ["--config.resume=auto", "--config.run_name=first", f"--config.output_root={root}"]
    assert further[-4:] == [*going_on, "--config.max_minutes=0"]  # the minutes ended it: epochs are left
    whole = shlex.split(starts.next_commands(run, finished=200)[-1])
    assert whole[-5:] == [*going_on, "--config.max_minutes=0", "--config.num_epochs=400"]
    assert all(str(run) in words or f"--config.output_root={root}" in words for words in lines)
    # Plain words are not quoted.
    assert not [line for line in starts.next_commands(started(tmp_path)) if "'" in line]
    assert starts.going_on(Path("outputs/first")) == "--config.resume=auto --config.run_name=first"


@pytest.mark.parametrize(
    ("on_node", "launcher"),
    [
        ("2", "torchrun --standalone --nproc_per_node=2 train_grpo.py"),
        ("1", "torchrun --nnodes=2 --node_rank=R --master_addr=HOST --master_port=29500 --nproc_per_node=1 train_grpo"),
    ],
)
def test_a_run_over_nodes_is_continued_over_nodes(tmp_path, monkeypatch, on_node, launcher):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", on_node)
    run = started(tmp_path)
    assert [launcher in line for line in starts.next_commands(run)].count(True) == 2  # measure again, train further
