"""The report of a plan: knobs that save memory one by one, the fewest with which a recipe fits, what was assumed."""

import dataclasses
import itertools
from pathlib import Path

import pytest

from flow_grpo.cost import savings
from flow_grpo.cost.plan import Plan
from flow_grpo.settings.loading import load_config

RECIPE = f"{Path(__file__).resolve().parents[2]}/config/grpo.py:my_recam_8npu"
NOTHING = {field.name: 1 for field in dataclasses.fields(Plan)}


@pytest.fixture(autouse=True)
def planned(monkeypatch):
    """Plan by a formula: 40 GiB and 100 s, less by known amounts for every knob."""

    def plan(config, devices, rate, cores):
        gib = 40 - 10 * bool(config.model.encodings) - 11 * config.model.offload + 8 * (config.model.dtype == "fp32")
        gib -= 4 * (config.train.batch_size == 1) + 6 * (config.train.sharding == "fsdp2")
        seconds = 100 + 30 * (config.train.batch_size == 1) + 7 * config.model.offload
        return Plan(**(NOTHING | {"update_gib": gib, "epoch_s": seconds}))

    monkeypatch.setattr(savings, "make_plan", plan)


def config(*knobs: str):
    alone = ("sample.share_prefix=false", "train.batch_size=2")  # a row of the update for every copy
    return load_config(RECIPE, [f"--config.{knob}" for knob in (*alone, *knobs)])


def said(limit: float, *knobs: str) -> list[str]:
    return savings.report(config(*knobs), 8, limit, 3e14).splitlines()


def test_every_knob_that_saves_memory_is_listed_with_its_gib_and_seconds():
    lines = said(64)
    table = lines[lines.index("what saves memory, each alone (now 40.0 GiB at the peak, 100 s an epoch):") + 1 : -2]
    assert table[-1].endswith("fsdp2  no accelerator has run it")
    assert [line.removesuffix("  no accelerator has run it").split() for line in table] == [
        ["-4.00", "GiB", "+30.0", "s", "--config.train.batch_size=1"],
        ["-10.00", "GiB", "+0.0", "s", "--config.model.encodings=FOLDER"],
        ["-11.00", "GiB", "+7.0", "s", "--config.model.offload=true"],
        ["-6.00", "GiB", "+0.0", "s", "--config.train.sharding=fsdp2"],
    ]
    assert lines[-1] == "fits: 40.0 of 64 GiB at the peak"


@pytest.mark.parametrize(
    ("limit", "ending"),
    [
        # A tenth stays free.
        (44, "it does (30.0 GiB, 100 s an epoch): --config.model.encodings=FOLDER"),
        (34, "it does (30.0 GiB, 100 s an epoch): --config.model.encodings=FOLDER"),
        # Two that cost least in place of one that costs more.
        (29, "s an epoch): --config.train.batch_size=1 --config.model.encodings=FOLDER"),
        (22, "s an epoch): --config.model.encodings=FOLDER --config.model.offload=true"),
        # A mode that no accelerator has run comes behind all that are tried.
        (12, "--config.model.offload=true --config.train.sharding=fsdp2"),
        (8, "no knob helps enough: take fewer frames or a smaller size"),
    ],
)
def test_what_does_not_fit_ends_with_the_fewest_of_the_cheapest_knobs(limit, ending):
    *_, last = said(limit)
    assert last.startswith(f"does not fit: 40.0 of {limit} GiB at the peak, ") and last.endswith(ending)


def test_a_knob_that_changes_what_is_trained_comes_last():
    lines = said(43, "model.dtype=fp32")
    assert lines[-1].endswith("--config.model.encodings=FOLDER")
    assert any(line.endswith("--config.model.dtype=bf16  changes what is trained") for line in lines)
    assert said(11, "model.dtype=fp32")[-1].count("--config.model.dtype=bf16") == 1  # 17 without it


def test_the_assumptions_are_said():
    text = "\n".join(said(64, "model.path=nowhere"))
    assert "8 device(s) of 64 GiB that sustain 300 TFLOP/s" in text and "rewards on 8 cores of the host" in text
    assert "the run: 400 epochs of 100 s and 6 evaluations of 1 s take 1.0 hours, 1 of a device" in text
    assert "Wan2.1-T2V-1.3B's, as there is no folder nowhere" in text and "every video 81x480x832" in text


def words(given, devices: int) -> list[str]:
    return [savings.in_words(knob.values(given)) for knob in savings.knobs(given, devices)]


def test_a_smaller_batch_keeps_whole_groups_and_the_samples_of_an_epoch():
    found = words(config("sample.train_batch_size=4"), 8)
    assert "--config.sample.train_batch_size=1 --config.sample.num_batches_per_epoch=8" in found
    single = words(config("sample.train_batch_size=8"), 1)  # on one device all copies lie in one batch
    assert any("--config.sample.train_batch_size=4 --config.sample.num_batches" in knob for knob in single)


@pytest.mark.parametrize(
    ("given", "devices"),
    [
        ((), 8),
        (("sample.train_batch_size=8", "train.context_parallel=2"), 8),
        (("sample.train_batch_size=4", "train.context_parallel=3"), 12),
    ],
)
def test_no_set_of_exact_knobs_changes_the_samples_of_an_epoch(given, devices):
    recipe = config(*given)
    exact = [knob for knob in savings.knobs(recipe, devices) if knob.price != savings.INEXACT]
    for count in (1, 2, 3):
        for chosen in itertools.combinations(exact, count):
            other, values = savings.turned(recipe, chosen)
            samples = [one.sample.expanded_batch_size / one.train.context_parallel for one in (recipe, other)]
            assert samples[0] == samples[1], savings.in_words(values)


def test_knobs_that_change_the_same_value_name_it_once_with_its_last_value(monkeypatch):
    def plan(config, devices, rate, cores):
        gib = 40 - 10 * (config.sample.train_batch_size == 1) - 10 * (config.train.context_parallel == 2)
        samples = config.sample.expanded_batch_size // config.train.context_parallel  # fewer are faster
        return Plan(**(NOTHING | {"update_gib": gib, "epoch_s": samples}))

    monkeypatch.setattr(savings, "make_plan", plan)
    assert said(23)[-1].endswith(
        "(20.0 GiB, 4 s an epoch): --config.train.context_parallel=2 --config.sample.num_batches_per_epoch=8 "
        "--config.sample.train_batch_size=1"
    )
