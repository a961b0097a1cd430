"""The soak on a fake training program: faults strike, runs resume, results are compared, losses are reported."""

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from flow_grpo.algorithm.update import updater
from flow_grpo.rewards.base import RewardSet
from flow_grpo.rewards.sharpness import Sharpness
from flow_grpo.run.command_line import read_command_line
from flow_grpo.run.trainer import Trainer
from tests import saboteur
from tests.some import some
from tools.dev import soak

EPOCHS = 4
# Called with run folder, kind of damage, and "launcher" or a rank: a launcher starts two ranks and ends them when one
# fails; the ranks end every epoch together, and rank 0 saves a checkpoint and a row of metrics after it. Each has a
# loader process. A launch that is "held" reaches no second checkpoint before a fault.
PROGRAM = f"""
import json, os, signal, subprocess, sys, time
from pathlib import Path

run, damage, role = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if role == "launcher":
    command = [sys.executable, __file__, *sys.argv[1:3]]
    ranks = [subprocess.Popen([*command, str(rank), str(os.getpid())]) for rank in range(2)]
    while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
        time.sleep(0.01)
    for rank in ranks:
        rank.kill()
    sys.exit(int(any(codes)))

stopping = []
signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))
launcher, plan = int(sys.argv[4]), [os.environ[f"FAULT{{end}}"] for end in ("", "Y_EPOCH", "Y_RANK")]
loader = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()", "spawn_main"], stdin=subprocess.PIPE)
if damage == "leftover":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
(run / "checkpoints").mkdir(parents=True, exist_ok=True)
(run / "adapter").mkdir(exist_ok=True)

def wait():
    time.sleep(0.01)
    if os.getppid() != launcher or loader.poll() is not None:
        sys.exit(1)

def told(word, rank):
    return run / f"{{word}}_{{launcher}}_{{rank}}"

def meet(word):
    told(word, role).touch()
    while not all(told(word, rank).exists() for rank in range(2)):
        wait()

meet("started")
finished = max((int(path.name[-6:]) for path in (run / "checkpoints").iterdir()), default=0)
meet("looked")
rows = [{{"step": step, "loss": 1 / step, "time/epoch_s": 0.1}} for step in range(1, finished + 1)]
for number, step in enumerate(range(finished + 1, {EPOCHS} + 1)):
    for _ in range(25):
        wait()
    if plan == ["gradient", str(step - 1), role]:
        sys.exit(1)
    while damage == "held" and number == 1 and not stopping and not told("stop", 1 - int(role)).exists():
        wait()
    if stopping:
        told("stop", role).touch()
    meet(f"ended_{{step}}")
    if role == "0":
        lost = damage == "forgetful" and number == 0 and finished
        rows.append({{"step": step, "loss": 9.0 if lost else 1 / step, "time/epoch_s": time.time()}})
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
        partial = run / f"part_{{step}}"
        partial.mkdir(exist_ok=True)
        (partial / "state.safetensors").write_bytes((2).to_bytes(8, "little") + b"{{}}")  # no tensors
        partial.rename(run / "checkpoints" / f"checkpoint_{{step:06d}}")
    if any(told("stop", rank).exists() for rank in range(2)):
        break
loader.kill()
"""


def prepare(tmp_path: Path, monkeypatch, damage: str = "", *, first: str = "") -> soak.Soak:
    """Return a soak of the fake program, trained undisturbed; launches after that are damaged, the first by `first`."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    damages = itertools.chain(["", first or damage], itertools.repeat(damage))

    def words(self: soak.Soak, name: str) -> list[str]:
        return [sys.executable, str(file), str(self.folder(name).parent), next(damages), "launcher"]

    monkeypatch.setattr(soak.Soak, "words", words)
    made = soak.Soak(options(tmp_path, "--epochs", str(EPOCHS), "--minutes", "0"))
    (tmp_path / "soak").mkdir()
    made.peace()
    made.epoch_s, made.startup_s = 0.02, 0.1
    return made


def options(tmp_path: Path, *words: str):
    return soak.options().parse_args(["--out", str(tmp_path / "soak"), *words])


@pytest.mark.parametrize("fault", some(["kill", "kill_all", "launcher", "worker", "term", "nan"], "kill", "nan"))
def test_a_disturbed_run_is_resumed_to_the_end_and_compared(tmp_path, monkeypatch, fault):
    # However late a fault from outside strikes, it strikes the first launch.
    tried = prepare(tmp_path, monkeypatch, first="held" if fault in soak.OUTSIDE else "")
    tried.args.faults = [fault]
    result = tried.trouble(0)
    assert result["complete"] and result["difference"] == "" and result["left"] == 0
    assert result["struck"].get(fault, 0) >= 1 and result["starts"] >= 2
    starts = [json.loads(line) for line in (tried.args.out / "soak.jsonl").read_text().splitlines()][1:-1]
    assert [row["saved"] for row in starts] == sorted(row["saved"] for row in starts) and starts[-1]["saved"] == EPOCHS
    assert fault == "term" or starts[0]["code"] != 0
    assert not tried.folder("trouble_0").exists()  # kept only if something was lost


def test_a_run_that_forgets_something_on_resuming_is_reported_and_kept(tmp_path, monkeypatch):
    tried = prepare(tmp_path, monkeypatch, "forgetful")
    tried.args.faults = ["nan"]
    tried.draw = SimpleNamespace(choice=lambda values: values[0], randrange=lambda stop: stop - 1)  # epoch 2, rank 1
    result = tried.trouble(0)
    assert result["complete"] and result["difference"].endswith(": loss")
    assert tried.folder("trouble_0").exists()


def test_a_process_left_over_is_counted_and_killed(tmp_path, monkeypatch):
    tried = prepare(tmp_path, monkeypatch, "leftover")
    monkeypatch.setattr(soak, "START_BOUND_S", 3.0)
    started = tried.start("trouble_0", "none")
    assert started.left >= 1 and started.fault == "none" and not started.struck


def save(file: Path, value: float) -> None:
    save_file({"a": torch.tensor(value)}, file)


@pytest.mark.parametrize(
    ("file", "content", "found"),
    [
        (
            "checkpoints/checkpoint_000002/rank_0.safetensors",
            2.0,
            "1 of 2 tensors differ, first checkpoint_000002/rank_0.safetensors: a",
        ),
        ("checkpoints/checkpoint_000001/rank_0.safetensors", 2.0, ""),  # an older one, kept or not
        ("adapter/lora.safetensors", None, "1 tensors on one side only, such as adapter/lora.safetensors: a"),
        ("adapter/more.safetensors", 1.0, "1 tensors on one side only, such as adapter/more.safetensors: a"),
        ("metrics.jsonl", '{"step": 1, "a": 2}\n', "1 of 2 metrics differ, first row 0: a"),
        ("metrics.jsonl", '{"step": 1, "a": 1, "time/x": 7, "system/y": 3}\n', ""),
        ("metrics.jsonl", '{"step": 0, "time/start_s": 7}\n{"step": 1, "a": 1}\n', ""),
        ("metrics.jsonl", '{"step": 1, "a": 1}\n{"step": 2, "a": 1}\n', "2 metrics on one side only, such as row 1: a"),
    ],
)
def test_any_difference_but_in_times_is_named(tmp_path, file, content, found):
    for run in ("one", "other"):
        for step in (1, 2):
            path = tmp_path / run / "checkpoints" / f"checkpoint_00000{step}" / "rank_0.safetensors"
            path.parent.mkdir(parents=True)
            save(path, 1.0)
        (tmp_path / run / "adapter").mkdir()
        save(tmp_path / run / "adapter" / "lora.safetensors", 1.0)
        (tmp_path / run / "metrics.jsonl").write_text('{"step": 1, "a": 1, "time/x": 5}\n')
    changed = tmp_path / "other" / file
    if content is None:
        changed.unlink()
    else:
        save(changed, content) if isinstance(content, float) else changed.write_text(content)
    assert soak.difference(tmp_path / "one", tmp_path / "other") == found


def test_the_command_runs_the_faulty_rank_with_a_recipe_that_training_accepts(tmp_path):
    words = soak.Soak(options(tmp_path)).words("trouble_0")
    place = words.index("--config")
    assert Path(words[place - 1]).samefile(saboteur.__file__)
    config, recipe = read_command_line(words[place:])
    assert (recipe, config.device) == (f"{soak.ROOT}/config/grpo.py:tiny_recam", "cpu")
    assert (config.resume, config.run_name) == ("auto", "trouble_0")


def test_a_run_killed_after_its_last_epoch_has_nothing_left_to_disturb(tmp_path):
    tried = soak.Soak(options(tmp_path, "--epochs", "8"))
    (tried.folder("trouble_0") / "checkpoint_000008").mkdir(parents=True)
    with mock.patch.object(tried, "words", return_value=["true"]):
        for fault in soak.INSIDE:
            started = tried.start("trouble_0", fault)
            assert (started.struck, started.saved, started.done) == (False, 8, True)


RESULT = {"run": "trouble_0", "starts": 2, "complete": True, "difference": "", "struck": {"kill": 1}, "left": 0}


@pytest.mark.parametrize(
    ("found", "code", "runs"),
    [(None, 2, 0), ({}, 0, 1), ({"difference": "adapter"}, 1, 1), ({"left": 1}, 1, 1), ({"complete": False}, 1, 1)],
)
def test_the_exit_code_says_whether_anything_was_lost_or_nothing_tested(tmp_path, capsys, found, code, runs):
    over = itertools.chain([found is None], itertools.repeat(True))
    trouble = mock.patch.object(soak.Soak, "trouble", return_value=RESULT | {"slowest_end_s": 3.0} | (found or {}))
    with mock.patch.object(soak.Soak, "peace"), mock.patch.object(soak.Soak, "over", side_effect=over), trouble:
        assert soak.main(["--out", str(tmp_path / "soak")]) == code
    assert ("--minutes" in capsys.readouterr().err) == (code == 2)
    summary = json.loads((tmp_path / "soak" / "summary.json").read_text())
    assert (summary["runs"], summary["faults"], len(summary["lost"])) == (runs, runs, int(code == 1))


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("fault", [*soak.INSIDE, "none"])
def test_a_fault_inside_a_rank_happens_in_its_epoch_and_on_its_rank_only(monkeypatch, fault, rank):
    naps: list[float] = []
    settings = {"RANK": rank, "FAULTY_RANK": "1", "FAULTY_EPOCH": "1", "FAULT": soak.INSIDE.get(fault, "")}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(saboteur, "launch", lambda main: None)
    monkeypatch.setattr(saboteur.time, "sleep", naps.append)
    monkeypatch.setattr(Trainer, "train_epoch", lambda trainer, epoch: None)
    module, rewards = torch.nn.Linear(1, 1, bias=False), RewardSet([Sharpness()], {"sharpness": 1.0})
    monkeypatch.setattr(updater, "take_step", lambda _: bool(module.weight.grad.isnan().any()))
    monkeypatch.setattr(RewardSet, "call", RewardSet.call)  # put back at the end, as the next one
    monkeypatch.setattr(RewardSet, "__call__", RewardSet.__call__)
    optimizer = torch.optim.SGD(module.parameters())
    saboteur.main()
    seen = []
    for epoch in range(3):
        module.weight.grad = torch.zeros(1, 1)
        Trainer.train_epoch(mock.MagicMock(), epoch)
        broken = bool(rewards(torch.rand(1, 3, 5, 16, 16), [None])["sharpness"].faults.any())
        seen.append({"nan": updater.take_step(optimizer), "reward": broken, "slow": bool(naps)})
        naps.clear()
    due = [rank == "1" and epoch == 1 for epoch in range(3)]
    assert seen == [{name: at and name == fault for name in ("nan", "reward", "slow")} for at in due]
