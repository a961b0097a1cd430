"""Decoding final latents and measuring rewards, during the rollouts or after them."""

import threading

import pytest
import torch

from flow_grpo.algorithm.rollout.scoring import ScoringQueue, decode, share_results
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.clock import Clock
from flow_grpo.runtime.ranks.context_parallel import share_samples
from flow_grpo.runtime.ranks.process_group import World
from tests.toy import FRAMES, SHAPE, BrightnessReward, ToyPolicy, group
from tests.workers import run_ranks

CPU = torch.device("cpu")


def latents_of(gid: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(gid))


class Narrow(ToyPolicy):
    """Has memory to decode so many videos at once."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.sizes = most, []

    def decode(self, latents):
        self.sizes.append(len(latents))
        if len(latents) > self.most:
            raise torch.OutOfMemoryError("3 GiB")
        return super().decode(latents)


class Watching(BrightnessReward):
    """Records who measures which rows, with gradients or not, and may wait for a signal first."""

    def __init__(self, wait_for: threading.Event | None = None) -> None:
        super().__init__()
        self.seen: list[tuple[int, str, bool, int]] = []
        self.slots: list[list[int]] = []
        self.wait_for = wait_for

    def __call__(self, videos, conditions):
        if self.wait_for is not None:
            assert self.wait_for.wait(20), "sampling did not continue while this batch was measured"
        here = threading.current_thread().name
        self.slots.append([condition.slot for condition in conditions])
        self.seen.append((conditions[0].gid, here, torch.is_grad_enabled(), torch.get_num_threads()))
        return super().__call__(videos, conditions)


def queue(reward: BrightnessReward, clock: Clock, *, overlap: bool, policy: ToyPolicy | None = None):
    rewards = RewardSet([reward], {"brightness": 1.0})
    return ScoringQueue(policy or ToyPolicy(), rewards, clock, World(), overlap=overlap).open()


def test_videos_are_fp32_on_the_cpu_without_gradient_and_refused_in_another_size_than_the_source_s():
    videos = decode(ToyPolicy(), group(3, 3), torch.zeros(3, *SHAPE, requires_grad=True))
    assert videos.shape == (3, 3, FRAMES, 2, 2)
    assert (videos.dtype, videos.device.type, videos.requires_grad) == (torch.float32, "cpu", False)
    short = ToyPolicy()
    short.decode = lambda latents: ToyPolicy.decode(short, latents)[:, :, :4]
    with pytest.raises(ValueError, match=r"\(4, 3, 4, 2, 2\), the conditions ask for \(4, 3, 5, 2, 2\)"):
        decode(short, group(3, 4), torch.zeros(4, *SHAPE))


def test_a_batch_without_enough_memory_is_decoded_in_halves(caplog):
    narrow, latents, conditions = Narrow(2), latents_of(0, 5), group(3, 5)
    wanted = torch.cat([decode(ToyPolicy(), conditions[:1], row[None]) for row in latents])
    torch.testing.assert_close(decode(narrow, conditions, latents), wanted, rtol=0, atol=1e-6)
    assert narrow.sizes == [5, 3, 2, 1, 2]
    assert "decoding them in halves" in caplog.text
    with pytest.raises(RuntimeError, match=r"decoding one video .*3 GiB; pass --config.model.vae_tiling=true"):
        decode(Narrow(0), conditions, latents)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_accelerator_decodes_while_sampling_waits_but_is_waited_for_by_who_measures(overlap, monkeypatch):
    places = []

    def to_host(videos):
        places.append(("queued", threading.current_thread().name))

        def ready():
            places.append(("waited", threading.current_thread().name))
            return torch.zeros(videos.shape)

        return ready

    monkeypatch.setattr(device_api, "to_host", to_host)
    with queue(BrightnessReward(), Clock(CPU), overlap=overlap) as scoring:
        scoring.add(tuple(group(3, 4)), torch.zeros(4, *SHAPE, device="meta"))
        (found,) = scoring.rewards()
    assert places == [("queued", threading.current_thread().name), ("waited", "scoring_0")]
    assert found["brightness"].valid.all()


def test_overlapped_scores_equal_serial_ones():
    def measured(reward: BrightnessReward, clock: Clock, *, overlap: bool):
        with queue(reward, clock, overlap=overlap) as scoring:
            for gid in (3, 4, 5):
                scoring.add(tuple(group(gid, 4)), latents_of(gid))
            return [found["brightness"].values for found in scoring.rewards()], scoring.first_videos

    overlapped, serial, clock, serial_clock = Watching(), Watching(), Clock(CPU), Clock(CPU)
    found, videos = measured(overlapped, clock, overlap=True)
    wanted, _ = measured(serial, serial_clock, overlap=False)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert torch.equal(videos, decode(ToyPolicy(), group(3, 4), latents_of(3)))
    assert [gid for gid, *_ in overlapped.seen] == [gid for gid, *_ in serial.seen] == [3, 4, 5]
    assert {name for _, name, *_ in overlapped.seen} == {"scoring_0"}
    assert {(gradients, threads) for *_, gradients, threads in overlapped.seen} == {(False, torch.get_num_threads())}
    assert clock.hidden["score"] >= 0 and not serial_clock.hidden


@pytest.mark.parametrize("overlap", [False, True])
def test_what_depends_on_conditions_alone_is_measured_before_there_are_videos(overlap):
    watching, done = Watching(), threading.Event()

    def prepare(conditions):
        watching.seen.append(([one.gid for one in conditions], threading.current_thread().name))
        done.set()

    watching.prepare = prepare
    with queue(watching, Clock(CPU), overlap=overlap) as scoring:
        scoring.prepare([group(3, 4), group(4, 4)])
        assert done.wait(20 if overlap else 0) == overlap
        scoring.add(tuple(group(3, 4)), latents_of(3))
        scoring.rewards()
    assert (watching.seen[0] == ([3, 4], "scoring_0")) == overlap


def test_a_batch_is_measured_while_the_next_one_is_sampled():
    sampled_on = threading.Event()
    with queue(Watching(sampled_on), Clock(CPU), overlap=True) as scoring:
        scoring.add(tuple(group(3, 4)), latents_of(3))
        sampled_on.set()  # stands for the next batch's rollout; measuring inside `add` would wait forever
        (rewards,) = scoring.rewards()
    assert rewards["brightness"].valid.all()


@pytest.mark.parametrize(("device", "thread"), [("cpu", "scoring_0"), ("meta", "MainThread")])
def test_only_the_cpu_decodes_beside_sampling(device, thread):
    """An accelerator is busy with sampling; "meta" stands for one."""
    seen = []

    class Decoding(ToyPolicy):
        def decode(self, latents):
            seen.append(threading.current_thread().name)
            return super().decode(torch.zeros(latents.shape))

    with queue(BrightnessReward(), Clock(CPU), overlap=True, policy=Decoding()) as scoring:
        for gid in (3, 4):
            scoring.add(tuple(group(gid, 4)), latents_of(gid).to(device))
        scoring.rewards()
    assert seen == [thread] * 2


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_error_is_raised_when_the_rewards_are_asked_for(overlap, device):
    class Broken(ToyPolicy):
        def decode(self, latents):
            raise MemoryError("no room for videos")

    with queue(BrightnessReward(), Clock(CPU), overlap=overlap, policy=Broken()) as scoring:
        scoring.add(tuple(group(3, 4)), latents_of(3).to(device))
        scoring.add(tuple(group(4, 4)), latents_of(4).to(device))
        with pytest.raises(MemoryError, match="no room"):
            scoring.rewards()


def test_after_an_error_elsewhere_nothing_more_is_measured():
    go_on = threading.Event()
    watching = Watching(go_on)
    with pytest.raises(ValueError, match="a file is broken"):  # noqa: PT012, SIM117
        with queue(watching, Clock(CPU), overlap=True) as scoring:
            for gid in (3, 4, 5):
                scoring.add(tuple(group(gid, 4)), latents_of(gid))
            raise ValueError("a file is broken")
    go_on.set()
    assert [gid for gid, *_ in watching.seen] in ([], [3])


def shared_scores(world: World, rows: int):
    world, _ = share_samples(world, 2, CPU)
    watching, clock = Watching(), Clock(CPU)
    watching.broken = [(3, 1)]
    with ScoringQueue(
        ToyPolicy(), RewardSet([watching], {"brightness": 1.0}), clock, world, overlap=True
    ).open() as own:
        for gid in (3, 4, 5):
            own.add(tuple(group(gid, rows)), latents_of(gid, rows))
        results = share_results(own.rewards(), world)
    measured = [(gid, slots) for (gid, *_), slots in zip(watching.seen, watching.slots, strict=True)]
    return [one["brightness"] for one in results], measured, own.first_videos


@pytest.mark.parametrize(
    ("rows", "of_first", "of_second"),
    [
        (4, [(3, [0, 1]), (4, [0, 1]), (5, [0, 1])], [(3, [2, 3]), (4, [2, 3]), (5, [2, 3])]),
        (3, [(3, [0, 1]), (4, [0]), (5, [0, 1])], [(3, [2]), (4, [1, 2]), (5, [2])]),
        (1, [(3, [0]), (5, [0])], [(4, [0])]),
    ],
)
def test_ranks_with_the_same_samples_measure_each_once_and_go_on_with_equal_results(rows, of_first, of_second):
    with queue(BrightnessReward(broken=[(3, 1)]), Clock(CPU), overlap=False) as alone:
        for gid in (3, 4, 5):
            alone.add(tuple(group(gid, rows)), latents_of(gid, rows))
        expected = [one["brightness"] for one in alone.rewards()]
    (first, measured, videos), (second, others, _) = run_ranks(shared_scores, 2, rows)
    assert (measured, others) == (of_first, of_second)
    torch.testing.assert_close(videos, alone.first_videos[: len(of_first[0][1])])
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.values.view(torch.int32), other.values.view(torch.int32))  # NaN included
    for results in (first, second):
        for found, one in zip(results, expected, strict=True):
            torch.testing.assert_close(found.values, one.values, equal_nan=True)  # other rows share its call
            assert torch.equal(found.valid, one.valid) and torch.equal(found.faults, one.faults)
            assert found.causes == one.causes and found.info.keys() == one.info.keys()
            torch.testing.assert_close(found.info, one.info, equal_nan=True)
    assert first[0].valid.tolist() == [slot != 1 for slot in range(rows)]
