"""Components and checkpoints: every format gives the same tensors, and a damaged file is refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForTextEncoding

from flow_grpo.models.encoders import codec
from flow_grpo.models.encoders.frozen import load_frozen
from flow_grpo.models.files.model_files import check_component, read_checkpoint, read_tensors
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer
from tests.tiny_models import make_tiny_folder

INDEX = "model.safetensors.index.json"
STATE = {name: torch.randn(2, 3).to(torch.bfloat16) for name in ("a.weight", "blocks.0.norm2.weight", "norm22.weight")}


def sharded(folder: Path, index: str, shards: dict[str, str], state=None) -> Path:
    """Write an index and its shards, by default holding exactly the listed tensors."""
    for file in set(shards.values()):
        listed = {name: torch.zeros(9) for name, place in shards.items() if place == file}
        save_file({name: (state or listed)[name] for name in listed}, folder / file)
    (folder / index).write_text(json.dumps({"weight_map": shards}))
    return folder / index


@pytest.fixture
def component(tmp_path) -> Path:
    (tmp_path / "config.json").write_text('{"width": 3}')
    sharded(tmp_path, INDEX, {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    return tmp_path


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("["), "config.json is not JSON"),
        (lambda folder: (folder / "vocabulary.json").write_text("[]"), "vocabulary.json holds a list"),
        (lambda folder: (folder / "model-2.safetensors").unlink(), "model-2.safetensors is missing or damaged"),
        (lambda folder: truncate(folder / "model-1.safetensors"), "model-1.safetensors is missing or damaged"),
        (lambda folder: (folder / "model-1.safetensors").write_text("<html>" * 9), "model-1.safetensors is missing"),
        (lambda folder: [file.unlink() for file in folder.glob("model*")], "no weights in"),
        (lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "../a"}}'), "names the shard '../a'"),
        (
            lambda folder: save_file({"b": torch.zeros(9, dtype=torch.int8)}, folder / "model-2.safetensors"),
            "model-2.safetensors must hold BF16, F16 or F32 only, got 1 (b: I8)",
        ),
    ],
)
def test_a_damaged_component_is_refused_and_a_sound_one_gives_its_configuration(component, damage, said):
    assert check_component(component) == {"width": 3}
    damage(component)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        check_component(component)
    assert str(component) in str(caught.value)


@pytest.mark.parametrize("kind", ["ckpt", "pt", "safetensors", "safetensors.index.json"])
def test_every_format_gives_the_same_tensors(tmp_path, kind):
    file = tmp_path / f"step.{kind}"
    if kind.endswith("json"):
        sharded(tmp_path, file.name, {name: f"{len(name) % 3}.safetensors" for name in STATE}, STATE)
    elif kind == "safetensors":
        save_file(STATE, file)
    else:
        torch.save(STATE, file)
    found = read_checkpoint(file)
    assert found.keys() == STATE.keys()
    assert all(torch.equal(found[name], STATE[name]) and found[name].dtype == torch.bfloat16 for name in STATE)


class Secret:
    """Something that a weight file may not hold."""


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.ckpt", None, "no checkpoint at"),
        ("x.zip", b"", "ends in '.zip'"),
        ("x.ckpt", b"garbage" * 100, "cannot be read as a state dict"),
        ("x.ckpt", {"a": Secret()}, r"cannot be read as a state dict: Weights only load failed\. \("),
        ("x.pt", torch.zeros(2), "holds a Tensor"),
        ("x.pt", {3: torch.zeros(2)}, "tensors by name"),
        ("x.pt", {"state_dict": {"a": torch.zeros(2)}, "step": 3}, r"2 \(state_dict: dict, step: int\)"),
        ("x.pt", {"a": torch.zeros(2, dtype=torch.int8)}, r"1 \(a: torch.int8\)"),
        ("x.safetensors", b"garbage" * 100, "is missing or damaged"),
        ("x.index.json", b"garbage", "is not JSON"),
        ("x.index.json", b'{"weight_map": {"a": "/etc/b"}}', "names the shard '/etc/b'"),
        ("x.index.json", b'{"weight_map": 3}', "must hold a weight_map"),
        ("x.index.json", b'{"weight_map": {"a": "b"}}', "b is missing or damaged"),
    ],
)
def test_a_file_that_is_no_checkpoint_is_refused_in_one_line(tmp_path, name, content, said):
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(ValueError, match=said) as caught:
        read_checkpoint(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("held", ["a", "abc"])
def test_an_index_and_a_shard_that_disagree_are_refused(tmp_path, held):
    index = sharded(tmp_path, "x.safetensors.index.json", {"a": "a.safetensors", "b": "a.safetensors"})
    save_file({name: torch.zeros(1) for name in held}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"disagree on 1 \((b|c)\)"):
        read_checkpoint(index)


@pytest.mark.parametrize(
    ("part", "load"),
    [
        ("transformer", lambda folder: load_transformer(ReCamTransformer3DModel, folder)),
        ("vae", lambda folder: codec._load_half(folder, "decoder", torch.float32)),
        ("text_encoder", lambda folder: load_frozen(AutoModelForTextEncoding, folder, torch.float32)),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, part, load):
    folder = Path(make_tiny_folder(tmp_path / "model")) / part
    load(folder)
    for file in folder.glob("*.safetensors"):
        tensors, header = read_tensors(file)
        spoilt = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
        save_file(spoilt, file, header)
    with pytest.raises(ValueError, match=rf"{part} holds NaN or infinity in \d+ \("):
        load(folder)
