"""The examples of docs/add_a_model.md work as they are written."""

import os
import re
import shlex
from pathlib import Path

import pytest

import train_grpo
from flow_grpo.models.files.adapter_files import WEIGHTS_FILE
from flow_grpo.runtime.ranks.process_group import RankError, World
from tests.test_train_grpo import SMALL, _train, assert_equal_state, metrics_of, newest, places  # noqa: F401 - a fixture
from tests.workers import run_ranks
from tools import random_model

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "add_a_model.md").read_text(encoding="utf-8")
FILES = {re.search(r": (\w+\.py)\"\"\"", code)[1]: code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)}
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch, without_curves):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").symlink_to(ROOT / "config")
    for name, code in FILES.items():
        Path(name).write_text(code)


def command(kind: str, small: dict[str, object], **changes: object) -> list[str]:
    """Return the page's command that trains a kind, on a small world and fewer conditions."""
    (words,) = [words[2:] for words in COMMANDS if f"--config.model.kind={Path(kind).name}" in words]
    words += [f"--config.model.kind={kind}"]
    kept = {"data.tiny_world", "data.root", "data.tune_scenes", "eval.num_conditions", "eval.num_steps", "eval.gold"}
    knobs = {name: value for name, value in small.items() if name in kept} | {"eval.signal_groups": 0, "trackers": ""}
    knobs |= {name.replace("__", "."): value for name, value in changes.items()}
    return [*words, *(f"--config.{name}={value}" for name, value in knobs.items())]


def test_a_policy_of_a_user_s_own_trains_resumes_and_leaves_its_weights(places, capsys):  # noqa: F811
    small = SMALL | {"data.root": places["data.root"]}
    given = {"run_name": "run", "checkpoint__every": 1}
    assert train_grpo.main(command("toy.py:MyPolicy", small, output_root="whole", **given)) == 0
    for epochs in (1, 3):
        resumed = command("toy.py:MyPolicy", small, output_root="parts", resume="auto", **given)
        assert train_grpo.main([*resumed, f"--config.num_epochs={epochs}"]) == 0
    assert_equal_state(newest(Path("whole/run")), newest(Path("parts/run")))
    rows = [row for row in metrics_of(Path("whole/run")) if "train/grad_norm" in row]
    assert len(rows) == 3 and all(row["train/grad_norm"] > 0 for row in rows)
    assert all(row["policy/ratio_first_max_abs_log"] == 0 for row in rows)
    assert (Path("whole/run/adapter") / WEIGHTS_FILE).is_file()
    said = capsys.readouterr().out
    assert "train further:" in said and "tools/generate.py" not in said  # which makes videos of a VideoModel only


@pytest.mark.parametrize(
    ("line", "broken", "told"),
    [
        ("return (latents - clean) /", "return float('nan') * latents /", "latents are not finite: the model's"),
        ("return (latents - clean) /", "return latents[:, :2] /", "velocity has shape (8, 2, 5, 3, 4), latents"),
        ("clean = network(", "with torch.no_grad(): clean = network(", "no gradient reaches the trained weights"),
        ("scale_factor=(1, 8, 8)", "scale_factor=(1, 4, 4)", "decoded videos have shape (2, 3, 5, 12, 16)"),
        ("return list(unwrap(self.module).parameters())", "return unwrap(self.module).parameters()", "got generator;"),
        ("return list(unwrap(self.module).parameters())", "return []", "trained_parameters(), got 0 entries"),
        ("return []", "return [nn.Parameter(torch.ones(1))]", "other parameters from camera_parameters()"),
        ("padding=1).to(device)", "padding=1).to(device).requires_grad_(False)", "have requires_grad=False"),
        ("start = torch.cat([", "start = {}['weights']; torch.cat([", "toy.py:MyPolicy fails in line 15: KeyError"),
    ],
)
def test_what_is_wrong_in_a_policy_is_said_in_one_line(places, line, broken, told, capfd):  # noqa: F811
    code = FILES["toy.py"]
    assert code.count(line) == 1
    Path("toy.py").write_text(code.replace(line, broken))
    small = SMALL | {"data.root": places["data.root"]}
    assert train_grpo.main(command("toy.py:MyPolicy", small, output_root="out", run_name="run")) == 2
    said = capfd.readouterr()
    assert told in said.out + said.err and "Traceback" not in said.err


def _trained_past_the_wrapper(world: World, given: list[str], folder: str) -> str:
    os.chdir(folder)
    with pytest.raises(RankError) as caught:
        _train(world, given)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("self.module if torch.is_grad_enabled() else unwrap(self.module)", "unwrap(self.module)"),
        ("nn.Conv3d(6, 3, 3, padding=1)", "Unused()"),
    ],
)
def test_gradients_that_are_not_averaged_over_the_ranks_end_the_run(places, line, broken):  # noqa: F811
    unused = "class Unused(nn.Conv3d):\n    def __init__(self):\n        super().__init__(6, 3, 3, padding=1)\n"
    unused += "        self.more = nn.Parameter(torch.ones(1))\n\n\nclass MyPolicy"
    code = FILES["toy.py"].replace("class MyPolicy", unused)
    assert code.count(line) == 1
    Path("toy.py").write_text(code.replace(line, broken))
    small = SMALL | {"data.root": places["data.root"]}
    half = {"sample__train_batch_size": 4, "train__batch_size": 4, "num_epochs": 1, "doctor": "off"}
    given = command(f"{Path.cwd()}/toy.py:MyPolicy", small, output_root=Path.cwd() / "out", run_name="run", **half)
    for said in run_ranks(_trained_past_the_wrapper, 2, given, str(Path.cwd())):
        assert "the gradients are not averaged over the ranks, their norms are [" in said


def test_a_video_model_of_a_user_s_own_trains_from_a_random_folder(places):  # noqa: F811
    (made,) = [words[2:] for words in COMMANDS if words[1] == "tools/random_model.py"]
    assert random_model.main(made) == 0
    small = SMALL | {"data.root": places["data.root"]}
    assert train_grpo.main(command("my_models.py:BESIDE", small, output_root="out", run_name="run")) == 0
    assert list(Path("out/run/adapter").glob("pytorch_lora_weights.safetensors"))


def test_the_table_of_models_names_those_there_are():
    from flow_grpo.models.registry import VIDEO_MODELS

    assert all(f"`{kind}.py`" in PAGE for kind in VIDEO_MODELS)
