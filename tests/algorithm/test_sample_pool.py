"""The pool of one rank: what it keeps, joins and hands out; how samples travel is tested in test_dynamic_sampling."""

import dataclasses

import torch

from flow_grpo.algorithm.groups.compare import everything
from flow_grpo.algorithm.groups.sample_pool import SamplePool
from flow_grpo.algorithm.groups.selection import place
from flow_grpo.records import Trajectory
from flow_grpo.runtime.ranks.process_group import World
from tests.memory import peak_mib, resident_mib
from tests.rounds import Rounds, kinds_of, rows_by_position
from tests.workers import run_ranks


def test_samples_of_several_rounds_come_out_in_the_order_of_the_placement():
    rounds = Rounds(World(), kinds_of([4, 4], 4), local=16)
    pool = SamplePool(World())
    for number, wanted in enumerate((range(16), {18, 22, 26, 30})):
        batches, gathered = rounds.draw(number)
        pool.add(everything(batches, gathered, World()), wanted)
    placement = place([0, 4, 8, 12, 18, 22, 26, 30], pool.rank_of, 1)
    chosen, moved = pool.take(placement)
    assert moved == 0
    # Slot-major rows of 4 groups: row 4 s + j is copy s of group j.
    assert rows_by_position(chosen) == dict(enumerate([(0, s) for s in range(4)] + [(6, s) for s in range(4)]))
    assert chosen.gathered.gids.tolist() == [0] * 4 + [6] * 4
    assert chosen.placement == (tuple(range(8)),)


def test_a_part_of_a_round_does_not_keep_the_whole_in_memory_and_a_sample_that_is_taken_twice_is_held_once():
    rounds = Rounds(World(), kinds_of([4], 4), local=16)
    batches, gathered = rounds.draw(0)
    pool = SamplePool(World())
    pool.add(everything(batches, gathered, World()), {0, 4})
    ((kept, _), _) = pool._held.values()
    whole = batches[0].samples.trajectory.states
    assert kept.trajectory.states.untyped_storage().nbytes() == 2 * whole[0].nbytes
    pool = SamplePool(World())
    pool.add(everything(batches, gathered, World()), range(16))
    chosen, _ = pool.take(place([0, 4, 8, 12, 0, 4, 8, 12], pool.rank_of, 1))
    assert rows_by_position(chosen) == dict(enumerate([(0, slot) for slot in range(4) for _ in range(2)]))
    assert chosen.parts == (batches[0].samples,)


MEBIBYTE = 2**20


def _move_large_samples(world: World, local: int, mebibytes: int) -> tuple[float, float, int]:
    """Return how much memory the move of two samples took at most, and what the samples of a rank and round hold."""
    rounds = Rounds(world, kinds_of([3, 3], world.data.size * local // 4), local=local, layout="contiguous")
    pool = SamplePool(world)
    for number in range(2):
        (batch,), gathered = rounds.draw(number)
        samples = batch.samples
        states = torch.full((local, mebibytes, MEBIBYTE // 4), float(world.data.rank))
        large = dataclasses.replace(
            samples,
            conditioning=dataclasses.replace(
                samples.conditioning, inputs=samples.conditioning.inputs | {"source_latents": states[:, 0, :1]}
            ),
            trajectory=Trajectory(states, samples.trajectory.log_probs, samples.trajectory.steps),
        )
        per_round = local * world.data.size
        wanted = range(per_round) if number == 0 else range(per_round, per_round + 4)
        pool.add(everything([dataclasses.replace(batch, samples=large)], gathered, world), wanted)
        del states, large, samples, batch
    groups = [tuple(range(4 * j, 4 * j + 4)) for j in range(world.data.size - 1)]
    groups.append(tuple(range(per_round, per_round + 4)))
    placement = place([row for rows in groups for row in rows], pool.rank_of, world.data.size)
    before = resident_mib()
    chosen, moved = pool.take(placement)
    after = peak_mib()
    assert chosen.table.shape[1] == local
    return after - before, local * mebibytes, moved


def test_no_rank_s_memory_grows_by_more_than_the_samples_that_leave_or_arrive():
    """A gather of objects puts every rank's samples on every rank, and their pickles beside them."""
    results = run_ranks(_move_large_samples, 4, 4, 8, fresh=True)
    grown = [growth for growth, *_ in results]
    own = results[0][1]
    assert results[0][2] > 4 * 8 * MEBIBYTE
    # A group leaves or arrives once; all samples of all ranks would be 4 times `own`, and their pickles more.
    assert max(grown) <= own + 8, grown
