"""The registry of metrics: its page is current, it knows what is logged, and what it knows is logged."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from flow_grpo.judging.changes import OF_TRAVEL
from flow_grpo.reporting import metric_names
from flow_grpo.reporting.metric_names import METRICS, PLACEHOLDERS, healthy_text, metric_of, page
from flow_grpo.rewards.base import REWARDS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "<where>": "eval",
    "<reward>": "my/rewards.py:warmth",
    "<camera>": "arc_left",
    "<percent>": "50",
    "<end>": "low",
    "<phase>": "gather",
    "<kind>": "peak",
    "<name>": "of_my_own",
}


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield every string of a file that is no docstring."""
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.value


@pytest.fixture(scope="module")
def written() -> str:
    """All strings of the code that logs; what draws metrics names them, too."""
    reporting = Path(metric_names.__file__).parent
    files = [file for file in sorted((ROOT / "flow_grpo").rglob("*.py")) if reporting not in file.parents]
    return "\n".join(text for file in files for text in texts(ast.parse(file.read_text(encoding="utf-8"))))


def test_the_page_is_current() -> None:
    """Else run: make docs."""
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == page()
    assert [page().count(f"| `{metric.name}` |") for metric in METRICS] == [1] * len(METRICS)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_name_of_a_family_finds_its_own_entry(metric: metric_names.Metric) -> None:
    assert metric_of(re.sub(r"<\w+>", lambda found: EXAMPLES[found[0]], metric.name)) is metric


MADE_OF_PIECES = {"dyn/reward_mean_before": "dyn/reward_mean_", "dyn/reward_mean_after": "dyn/reward_mean_"}
MADE_OF_PIECES |= {f"eval/equal_travel_{name}": "eval/equal_travel_" for name in OF_TRAVEL}


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_registered_metric_is_logged_somewhere(metric: metric_names.Metric, written: str) -> None:
    """By its last fixed piece: names are made of a section, a prefix by reward and an ending."""
    last = re.split("|".join(PLACEHOLDERS), MADE_OF_PIECES.get(metric.name, metric.name).partition("/")[2])
    piece = next((piece for piece in reversed(last) if piece.strip("/")), f"{metric.name.partition('/')[0]}/")
    assert re.search(rf"(?<![A-Za-z]){re.escape(piece.removeprefix('_'))}", written)


def measures(reward: str) -> tuple[str, ...]:
    module, _, kind = REWARDS[reward].partition(":")
    return getattr(importlib.import_module(f"flow_grpo.rewards.{module}"), kind).measures  # type: ignore[no-any-return]


@pytest.mark.parametrize("reward", REWARDS)
def test_what_a_reward_measures_has_an_entry_of_its_own(reward: str) -> None:
    entries = {one: metric_of(f"reward/{reward}_{one}") for one in measures(reward)}
    assert not [one for one, entry in entries.items() if entry is None or not entry.name.startswith("<where>/")]


@pytest.mark.parametrize("name", ["reward", "rewards/mean", "policy/other", "system/memory_gib", "time/Epoch_s", ""])
def test_what_no_run_logs_is_not_known(name: str) -> None:
    assert metric_of(name) is None


@pytest.mark.parametrize(
    ("name", "said"),
    [("train/bad_steps", "0"), ("policy/spread_over_floor", "at least 0.5"), ("train/zero_std_ratio", "0 to 0.5")],
)
def test_bounds_are_said_in_words(name: str, said: str) -> None:
    metric = metric_of(name)
    assert metric is not None and healthy_text(metric) == said
