"""Faults in real runs under torchrun: an error with rank, phase and cause, all processes gone in a minute, no progress
lost.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.runtime.checkpoints import checkpoint
from tests.scripted_server import HEALTH, ScriptedServer, answer
from tests.test_train_grpo import SMALL
from tests.tiny_models import make_tiny_folder
from tools.dev.soak import Family

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BOUND_S = 60.0  # from the fault to the last process gone
KNOBS = SMALL | {
    "num_epochs": 3,
    "doctor": "off",
    "data.num_workers": 0,
    "sample.num_batches_per_epoch": 1,
    "sample.num_steps": 3,
    "sample.sde_steps": "0,1",
    "train.max_bad_steps": 0,
    "eval.every": 1,
    "distributed.dead_s": 12,
    "distributed.silent_s": 25,
    "run_name": "run",
    "resume": "auto",
}


@dataclasses.dataclass
class Ended:
    code: int  # of torchrun
    said: str
    seconds: float  # from the start of the second epoch, in which faults occur, until every process was gone
    left: list[str]  # processes that had to be killed
    saved: int  # finished epochs of the newest checkpoint, -1 for none


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("faults")
    ensure_tiny_world(folder / "world", "unit_test")
    return {"model.path": make_tiny_folder(folder / "model"), "data.root": folder / "world"}


@pytest.fixture
def launch(places, tmp_path) -> Iterator[Callable[..., Ended]]:
    launched: list[subprocess.Popen[bytes]] = []

    def run(fault: str, *, ranks: int = 2, strike=None, torchrun: tuple[str, ...] = (), **knobs: object) -> Ended:
        settings = KNOBS | places | {"output_root": tmp_path}
        settings |= {name.replace("__", "."): value for name, value in knobs.items()}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [*torchrun, str(ROOT / "tests" / "saboteur.py"), "--config", f"{ROOT}/config/grpo.py:tiny_recam"]
        command += [f"--config.{name}={value}" for name, value in settings.items()]
        environment = os.environ | {"FAULT": fault, "FAULTY_RANK": str(ranks - 1), "OMP_NUM_THREADS": "1"}
        output = tmp_path / "output.log"
        with output.open("ab") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
        launched.append(process)
        seconds, left = follow(process, tmp_path / "run" / "begun", strike)
        steps = [int(path.name.rpartition("_")[2]) for path in checkpoint.published(tmp_path / "run" / "checkpoints")]
        return Ended(process.wait(), output.read_text(), seconds, left, max(steps, default=-1))

    yield run
    for process in launched:
        process.poll() is None and process.kill()


def follow(process: subprocess.Popen[bytes], begun: Path, strike) -> tuple[float, list[str]]:
    """Wait until a launcher and its processes are gone; return the seconds since the second epoch and who was left."""
    family = Family(process)
    start, second = time.monotonic(), 0.0
    while time.monotonic() - start < 240 and (not second or time.monotonic() - second < BOUND_S + 30):
        family.look()
        if process.poll() is not None and not family.alive():
            break
        if not second and begun.exists() and begun.read_text() not in ("", "0"):
            second = time.monotonic()
            if strike is not None:
                strike(family)
        time.sleep(0.05)
    seconds, left = time.monotonic() - (second or start), family.alive()
    said = [" ".join(member.cmdline())[-80:] for member in left]
    for member in left:
        member.kill()
    return seconds, said


# Fault of rank 1 of 2 -> what the output contains.
PLANTED = "RuntimeError: the fault that was planted"
SAID = {
    "fetch": [f"rank 1 failed in sampling: {PLANTED}"],
    "fetch while saving": [f"rank 1 failed in sampling: {PLANTED}"],
    "encode": [f"rank 1 failed in sampling: {PLANTED}"],
    "rollout": [f"rank 1 failed in sampling: {PLANTED}"],
    "decode": [f"rank 1 failed in sampling: {PLANTED}"],
    "decode memory": ["rank 1 failed in sampling: RuntimeError: out of memory in decoding", "model.vae_tiling=true"],
    # In the update ranks meet inside the backward pass: rank 0 ends by itself, and its launcher may end rank 1 at any
    # moment after rank 1 has printed its own stack trace.
    "update": [f"\n{PLANTED}\n", f"rank 0 ends in update: rank 1 failed in update: {PLANTED}"],
    "update memory": ["rank 1 failed in update: RuntimeError: out of memory in the update of 4", "train.batch_size=2"],
    "evaluate": [f"rank 1 failed in evaluation: {PLANTED}"],
    "save": ["rank 1 failed in saving a checkpoint (files): OSError: [Errno 28] No space left on device"],
    "freeze": ["rank 1 has not been heard of for", "its process or its machine is gone"],
    "hang": ["rank 1 has made no progress for", "in sampling: it hangs"],
    "hang in update": ["rank 1 has made no progress for", "in update: it hangs"],
}


def assert_gone_in_time(ended: Ended, *, saved: int = 1) -> None:
    assert ended.code != 0 and not ended.left and ended.seconds < BOUND_S
    assert ended.saved == saved


def assert_resumes(launch: Callable[..., Ended], **knobs: object) -> None:
    again = launch("", **knobs)
    assert again.code == 0 and again.saved == 3, again.said[-2000:]


@pytest.mark.parametrize("fault", SAID)
def test_a_fault_of_one_rank_ends_all_ranks_with_its_name(launch, fault):
    ended = launch(fault)
    assert_gone_in_time(ended)
    for words in SAID[fault]:
        assert words in ended.said
    assert_resumes(launch)


def test_a_fault_of_one_of_four_ranks_is_raised_on_all(launch):
    ended = launch("fetch", ranks=4)
    assert_gone_in_time(ended)
    assert ended.said.count(f"error: rank 3 failed in sampling: {PLANTED}; go on with --config.resume=auto") == 4
    assert_resumes(launch, ranks=4)


def test_a_fault_while_peers_are_blocked_in_a_sharded_forward_pass_ends_all_ranks_with_its_name(launch):
    ended = launch("rollout", train__sharding="fsdp2")
    assert_gone_in_time(ended)
    assert f"\n{PLANTED}\n" in ended.said  # rank 1's own stack trace
    assert f"rank 0 ends in sampling: rank 1 failed in sampling: {PLANTED}" in ended.said
    assert_resumes(launch, train__sharding="fsdp2")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("hang", ["rank 0 has made no progress for", "in sampling: it hangs"]),
        ("gradient", ["1 optimizer step(s) in a row are not finite"]),
        ("log", ["rank 0 failed in logging: OSError: [Errno 30] Read-only file system"]),
    ],
)
def test_a_fault_of_a_single_process_ends_it_with_its_name(launch, fault, words):
    ended = launch(fault, ranks=1)
    assert_gone_in_time(ended)
    assert all(word in ended.said for word in words)
    assert_resumes(launch, ranks=1)


def test_a_killed_rank_ends_the_others(launch):
    ended = launch("die")
    assert_gone_in_time(ended)
    (line,) = [line for line in ended.said.splitlines() if line.startswith("error:")]
    assert line.startswith("error: rank 1 is gone: ") and "--config.resume=auto --config.run_name=run" in line
    assert "/gloo/" not in ended.said
    assert_resumes(launch)


def test_a_killed_rank_is_started_again_by_the_launcher_and_goes_on_by_itself(launch):
    ended = launch("die once", torchrun=("--max-restarts=1",), resume="")
    assert ended.code == 0 and not ended.left and ended.saved == 3, ended.said[-2000:]


def test_a_killed_loader_process_ends_all_by_name(launch):
    ended = launch("slow", strike=lambda family: family.workers()[0].kill(), data__num_workers=1, num_epochs=6)
    assert_gone_in_time(ended)
    assert "failed in sampling" in ended.said and "DataLoader worker" in ended.said, ended.said[-4000:]
    assert_resumes(launch)


def test_a_killed_launcher_leaves_no_rank_behind(launch):
    ended = launch("slow", strike=lambda family: family.launcher.kill(), num_epochs=40)
    assert not ended.left and ended.seconds < BOUND_S and 1 <= ended.saved < 40
    assert "the ranks' store has not answered" in ended.said
    assert launch("", num_epochs=ended.saved + 1).saved == ended.saved + 1


@pytest.mark.parametrize("to", ["rank", "launcher"])
def test_a_signal_to_a_rank_or_to_the_launcher_ends_all_after_the_epoch_saved(launch, to):
    def strike(family: Family) -> None:
        if to == "rank":
            family.ranks()[0].send_signal(signal.SIGTERM)
        else:
            family.launcher.send_signal(signal.SIGINT)

    ended = launch("slow", strike=strike, num_epochs=6)
    assert not ended.left and ended.seconds < BOUND_S
    assert "after epoch 2, saved" in ended.said and ended.saved == 2
    assert to == "launcher" or (ended.code == 0 and "ended by SIGTERM" in ended.said)
    assert_resumes(launch)


def test_a_reward_server_that_fails_stops_the_run_saved_with_code_2(launch):
    judged = {"reward__weights": "target_view=1,remote:judge=1"}
    absent = launch("", ranks=1, reward__remote="judge=http://127.0.0.1:9", **judged)
    assert absent.saved == -1 and "error: remote:judge failed" in absent.said and "exitcode  : 2" in absent.said
    with ScriptedServer(answer({"error": "out of memory"}, 400), health=HEALTH | {"rewards": ["judge"]}) as server:
        ended = launch("", ranks=1, reward__remote=f"judge={server.url}", **judged)
    assert_gone_in_time(ended, saved=0)
    assert "reward remote:judge failed to measure" in ended.said and "exitcode  : 2" in ended.said
    assert_resumes(launch, ranks=1)
