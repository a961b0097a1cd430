"""`import flow_grpo`: the surface is what docs/library.md lists, costs nothing by itself, and its examples run."""

import ast
import contextlib
import importlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

import flow_grpo
import train_grpo
from flow_grpo.runtime.ranks.process_group import World
from tests.test_train_grpo import SMALL
from tests.tiny_models import make_tiny_folder
from tests.workers import run_ranks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "library.md"
GRPO, COST, REWARDS, TRAINER = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def run(source: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(source, str(PAGE), "exec"), names)
    return names


def _on_a_rank(world: World, source: str) -> str:
    """Return what a rank prints; its process group is there already and stays."""
    said = io.StringIO()
    group, end = mock.patch.object(dist, "init_process_group"), mock.patch.object(os, "_exit")
    with group, end, contextlib.redirect_stdout(said):
        run(source)
    return said.getvalue()


def on_two_ranks(source: str) -> str:
    said, nothing = run_ranks(_on_a_rank, 2, source)
    assert not nothing
    return said


def test_the_surface_is_what_the_page_lists() -> None:
    first_cells = re.findall(r"^\| (`[^|]*`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [name for cell in first_cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(flow_grpo.__all__)


@pytest.mark.parametrize("name", flow_grpo.__all__)
def test_a_name_of_the_surface_is_that_of_its_module(name: str) -> None:
    module = importlib.import_module(f"flow_grpo.{flow_grpo._MODULES[name]}")
    assert getattr(flow_grpo, name) is getattr(module, name)
    assert name in dir(flow_grpo)
    with pytest.raises(AttributeError, match="module 'flow_grpo' has no attribute 'grpo_los'"):
        getattr(flow_grpo, "grpo_los")  # noqa: B009 - a typo, not a name


def test_type_checkers_see_the_names_that_are_there_at_run_time() -> None:
    tree = ast.parse(Path(flow_grpo.__file__).read_text(encoding="utf-8"))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 0]
    seen = {(alias.asname, node.module) for node in found for alias in node.names if alias.asname == alias.name}
    assert seen == {(name, f"flow_grpo.{module}") for name, module in flow_grpo._MODULES.items()}


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        ("import flow_grpo; dir(flow_grpo)", set()),
        (
            "from flow_grpo import DistributedKRepeatSampler, DynamicBatchSampler, grpo_loss, load_config\n"
            "from flow_grpo import build_reward_set, Policy, Reward",
            {"torch"},
        ),
    ],
)
def test_only_what_is_used_is_loaded(code: str, loaded: set[str]) -> None:
    code += "\nimport sys; print(*{'torch', 'diffusers', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == loaded, done.stdout


def test_the_loop_on_the_page_learns_the_same_on_one_rank_and_on_two(capsys) -> None:
    history = run(GRPO)["history"]
    assert history[-1] > 0.5 * history[0], "distances are negative rewards"
    assert on_two_ranks(GRPO) == capsys.readouterr().out


def test_the_loop_with_batches_of_limited_cost_sees_every_clip_once_an_epoch(capsys) -> None:
    run(COST)
    said = capsys.readouterr().out
    assert said == "200 clips in 4 epochs of 50\n"
    assert on_two_ranks(COST) == said


def test_the_rewards_on_the_page_score() -> None:
    scores = run(REWARDS)["scores"]
    assert list(scores) == ["motion_mag", "source_match", "warmth"]
    assert all(result.valid.all() for result in scores.values())


def test_the_trainer_runs_from_python_as_on_the_page(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "config").symlink_to(ROOT / "config")
    monkeypatch.chdir(tmp_path)
    knobs = SMALL | {"num_epochs": 1, "model.path": make_tiny_folder(tmp_path / "m"), "data.root": tmp_path / "world"}
    small = [f"--config.{name}={value}" for name, value in knobs.items()]
    main = train_grpo.main
    monkeypatch.setattr(train_grpo, "main", lambda words: main([*words, *small]))
    assert run(TRAINER)["code"] == 0
    text = capsys.readouterr().out
    assert "8 copies of a condition" in text and (tmp_path / "outputs" / "from_python" / "adapter").is_dir()
