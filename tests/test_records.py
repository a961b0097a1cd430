"""Records keep the rows of all their tensors together."""

import dataclasses

import pytest
import torch

from flow_grpo.records import Conditioning, Rows, Samples, TrainingBatch, Trajectory


def conditioning(rows: int, *, guided: bool = False) -> Conditioning:
    number = torch.arange(rows, dtype=torch.float32)
    return Conditioning(
        prompt_embeds=number.view(-1, 1, 1).expand(rows, 3, 2),
        inputs={
            "source_latents": number.view(-1, 1, 1, 1, 1).expand(rows, 4, 2, 3, 3),
            "target_cameras": number.view(-1, 1, 1).expand(rows, 2, 12),
        },
        negative_prompt_embeds=number.view(-1, 1, 1).expand(rows, 3, 2) if guided else None,
    )


def test_rows_are_taken_from_every_tensor() -> None:
    taken = conditioning(5, guided=True).rows(torch.tensor([3, 1, 3]))
    assert len(taken) == 3
    for tensor in (taken.prompt_embeds, *taken.inputs.values(), taken.negative_prompt_embeds):
        assert tensor is not None
        assert tensor.flatten(1)[:, 0].tolist() == [3.0, 1.0, 3.0]


def test_records_are_concatenated_in_order_and_absent_tensors_stay_absent() -> None:
    joined = Conditioning.concatenate([conditioning(2), conditioning(3)])
    assert joined.inputs["source_latents"][:, 0, 0, 0, 0].tolist() == [0.0, 1.0, 0.0, 1.0, 2.0]
    assert joined.negative_prompt_embeds is None
    assert Conditioning.concatenate([conditioning(1, guided=True)] * 2).negative_prompt_embeds is not None


def trajectory(rows: int, size: int = 3) -> Trajectory:
    number = torch.arange(rows, dtype=torch.float32)
    return Trajectory(
        states=number.view(-1, 1, 1, 1, 1, 1).expand(rows, 3, 4, 2, size, size),
        log_probs=number.view(-1, 1).expand(rows, 2),
        steps=torch.tensor([[1, 2]]).repeat(rows, 1),
    )


def samples(rows: int, size: int = 3) -> Samples:
    number = torch.arange(rows, dtype=torch.float32)
    return Samples(
        keys=torch.arange(3 * rows).view(rows, 3),
        noise_ids=torch.zeros((rows, 2), dtype=torch.int64),
        conditioning=conditioning(rows),
        trajectory=trajectory(rows, size),
        final_latents=number.view(-1, 1, 1, 1, 1).expand(rows, 4, 2, size, size),
    )


@dataclasses.dataclass(frozen=True)
class Table(Rows):
    columns: dict[str, torch.Tensor]
    name: str


def test_every_tensor_has_a_dotted_name_and_can_be_replaced_by_it() -> None:
    made = samples(2)
    names = {
        "keys",
        "noise_ids",
        "final_latents",
        "conditioning.prompt_embeds",
        "conditioning.inputs.source_latents",
        "conditioning.inputs.target_cameras",
        "trajectory.states",
        "trajectory.log_probs",
        "trajectory.steps",
    }
    assert set(made.tensors()) == names
    doubled = made.with_tensors({name: tensor * 2 for name, tensor in made.tensors().items()})
    assert torch.equal(doubled.trajectory.states, made.trajectory.states * 2)
    table = Table({"a": torch.arange(3), "b": torch.zeros(3)}, "kept")
    assert set(table.tensors()) == {"columns.a", "columns.b"}
    joined = Table.concatenate([table, table.rows(torch.tensor([2]))])
    assert joined.columns["a"].tolist() == [0, 1, 2, 2]
    assert joined.name == "kept"


def test_replays_find_both_ends_of_every_recorded_step() -> None:
    states = torch.arange(4.0).view(1, 4, 1, 1, 1, 1)
    made = dataclasses.replace(samples(1), trajectory=Trajectory(states, torch.zeros(1, 3), torch.tensor([[2, 3, 4]])))
    steps = [made.replayed(number) for number in range(made.passes)]
    assert [(step.latents.item(), step.drawn.item()) for step in steps] == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]


def test_the_inputs_of_the_network_change_device_and_nothing_else_does() -> None:
    made = samples(2)
    assert made.to("cpu").trajectory.states.data_ptr() == made.trajectory.states.data_ptr()
    moved = made.to("meta")
    latents = (moved.trajectory.states, moved.trajectory.log_probs, moved.final_latents)
    assert {t.device.type for t in (*moved.conditioning.tensors().values(), *latents)} == {"meta"}
    assert moved.keys.device.type == moved.trajectory.steps.device.type == "cpu"


def batch_of(parts: tuple[Samples, ...], table: list[list[int]]) -> TrainingBatch:
    numbers = torch.arange(len(table), dtype=torch.float32)
    return TrainingBatch(parts, torch.tensor(table).T, advantages=10 + numbers, weights=20 + numbers)


def test_samples_are_taken_from_several_parts_in_the_order_of_their_positions() -> None:
    batch = batch_of((samples(3), samples(2), samples(2, size=5)), [[0, 2], [1, 1], [2, 0], [0, 0], [2, 1], [0, 2]])
    assert len(batch) == 6 and batch.sizes().tolist() == [0, 0, 2, 0, 2, 0]
    taken = batch.take(torch.tensor([0, 1, 3, 5]), "cpu")
    assert taken.trajectory.states.flatten(1)[:, 0].tolist() == [2.0, 1.0, 0.0, 2.0]
    assert taken.advantages.tolist() == [10, 11, 13, 15] and taken.weights.tolist() == [20, 21, 23, 25]
    moved = batch.take(torch.tensor([0]), "meta")
    assert moved.trajectory.states.device.type == moved.conditioning.prompt_embeds.device.type == "meta"
    assert moved.keys.device.type == moved.advantages.device.type == "cpu"


def test_samples_of_one_epoch_have_equally_many_stochastic_steps() -> None:
    other = samples(1)
    other = dataclasses.replace(other, trajectory=dataclasses.replace(other.trajectory, steps=torch.tensor([[2]])))
    with pytest.raises(AssertionError, match="equally many stochastic steps"):
        batch_of((samples(1), other), [[0, 0], [1, 0]])
