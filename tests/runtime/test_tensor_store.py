"""The cache of tensors: keys, damaged entries, concurrent writers."""

import logging

import pytest
import torch
from safetensors.torch import save_file

from flow_grpo.runtime.tensor_store import TensorStore, content_key, files_key, weights_key


class Maker:
    def __init__(self, value: float = 1.0) -> None:
        self.value, self.calls = value, 0

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return torch.full((2, 3), self.value) + torch.arange(3)


def test_a_tensor_is_computed_once_and_read_by_the_next_run(tmp_path):
    make = Maker()
    first = TensorStore(tmp_path).get("sources", "a", make)
    store = TensorStore(tmp_path)
    assert store.has("sources", "a") and not store.has("sources", "b") and not store.has("prompts", "a")
    again = store.get("sources", "a", make)
    assert make.calls == 1 and torch.equal(first, again) and again.dtype == torch.float32
    assert torch.equal(store.get("sources", "b", Maker(5.0)), Maker(5.0)())


def test_without_a_folder_the_least_recently_used_entry_is_dropped(tmp_path):
    store, make = TensorStore(limit=2 * 24), Maker()  # bytes of two tensors
    for key in ("a", "b", "a", "c", "a", "b"):
        store.get("x", key, make)
    assert make.calls == 4  # a, b, c, and b again, which was the longest unused
    assert store.has("x", "a") and store.has("x", "b") and not store.has("x", "c")


@pytest.mark.parametrize("harm", ["cut", "flip", "other key", "empty"])
def test_a_damaged_entry_is_computed_again_with_a_warning(tmp_path, harm, caplog):
    make = Maker()
    store = TensorStore(tmp_path)
    store.get("x", "a", make)
    path = store.path("x", "a")
    content = path.read_bytes()
    if harm == "other key":
        store.get("x", "b", make)
        path.write_bytes(store.path("x", "b").read_bytes())
    else:
        flipped = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
        path.write_bytes({"cut": content[:-4], "flip": flipped, "empty": b""}[harm])
    calls = make.calls
    with caplog.at_level(logging.WARNING):
        assert not TensorStore(tmp_path).has("x", "a")
        value = TensorStore(tmp_path).get("x", "a", make)
    assert make.calls == calls + 1 and torch.equal(value, make())
    assert str(path) in caplog.text and "made again" in caplog.text
    assert TensorStore(tmp_path).has("x", "a")


def test_a_failed_write_is_an_error_with_the_way_out_and_leaves_no_file(tmp_path, monkeypatch):
    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flow_grpo.runtime.tensor_store.save_file", fail)
    with pytest.raises(OSError, match="No space left"):
        TensorStore(tmp_path).get("x", "a", Maker())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be written .* --config.model.encodings"):
        TensorStore(tmp_path / "file").get("x", "a", Maker())


def test_content_keys_tell_values_shapes_and_types_apart():
    base = torch.arange(6.0)
    others = [base + 1e-7 * (base == 1), base.view(2, 3), base.double(), base.flip(0)]
    assert len({content_key(tensor) for tensor in [base, *others]}) == 5
    assert content_key(base) == content_key(base.clone())
    assert content_key(base.view(2, 3).t()) == content_key(base.view(2, 3).t().contiguous())


def test_files_keys_depend_on_a_models_content_and_not_on_its_folder(tmp_path):
    keys = {}
    weights = torch.randn(1000, 100)
    for name, tensor, config in (
        ("one", weights, "{}"),
        ("same", weights, "{}"),
        ("weights", weights + 1e-3, "{}"),
        ("config", weights, "{ }"),
        ("shape", weights.view(100, 1000), "{}"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        save_file({"w": tensor.contiguous()}, folder / "model.safetensors")
        (folder / "config.json").write_text(config)
        keys[name] = files_key(folder)
    (tmp_path / "same" / ".cache").write_text("left by a download")
    assert keys["one"] == keys["same"] == files_key(tmp_path / "same")
    assert len(set(keys.values())) == 4
    with pytest.raises(ValueError, match="holds no files"):
        files_key(tmp_path / "absent")


def test_one_small_tensor_changed_makes_another_key(tmp_path):
    tensors = {f"norm{n}": torch.ones(64) for n in range(20)} | {f"w{n}": torch.zeros(300_000) for n in range(20)}
    keys = set()
    for changed in ("", "norm3", "norm17", "w4", "w19"):
        folder = tmp_path / (changed or "none")
        folder.mkdir()
        save_file({name: value + (name == changed) for name, value in tensors.items()}, folder / "model.safetensors")
        keys.add(files_key(folder))
    assert len(keys) == 5


def test_weights_keys_depend_on_names_shapes_and_values():
    tensor = torch.arange(64.0)
    variants = [("a", tensor), ("b", tensor), ("a", tensor.view(8, 8)), ("a", tensor + 1e-3)]
    assert len({weights_key([variant]) for variant in variants}) == 4
    assert weights_key([("a", tensor)]) == weights_key([("a", tensor.clone().requires_grad_())])
