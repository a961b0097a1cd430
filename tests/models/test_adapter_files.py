"""Saved adapters: they load here into the same model, and into plain diffusers."""

import dataclasses
import json
import re
import types
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file
from torch import nn

from flow_grpo.models import adapters
from flow_grpo.models.files import adapter_files, lora_files
from flow_grpo.models.files.model_files import read_tensors
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.ranks.sharding import parallelize
from tests.models.test_adapters import LORA, SELF_ATTENTION, move, output, trained_model
from tests.models.test_recam_transformer import base_wan, inputs
from tests.tiny_models import CPU, tiny_transformer
from tests.workers import run_ranks


def saved(model: nn.Module, folder: Path) -> Path:
    adapter_files.save_adapter(types.SimpleNamespace(module=model), folder)
    return folder


def test_without_lora_the_whole_transformer_is_saved_for_its_own_class_and_refused_by_plain_diffusers(tmp_path):
    model = trained_model(trained="camera")
    move(model)
    folder = saved(model, tmp_path / "adapter")
    assert not (folder / adapter_files.LORA_FILE).is_file()
    card = (folder / adapter_files.CARD).read_text()
    assert "without camera control" in card.replace("\n", " ") and "from_pretrained" in card
    assert torch.equal(output(adapter_files.load_adapter(tiny_transformer(), folder)), output(model))
    half = adapter_files.load_adapter(tiny_transformer(), folder, torch.bfloat16)
    assert half.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    with pytest.raises(OSError, match="no file named diffusion_pytorch_model"):
        WanTransformer3DModel.from_pretrained(str(folder))
    assert torch.equal(output(ReCamTransformer3DModel.from_pretrained(folder)), output(model))
    assert torch.equal(output(ReCamTransformer3DModel.from_pretrained(tmp_path, subfolder="adapter")), output(model))
    model.save_pretrained(str(tmp_path / "plain"))
    assert torch.equal(output(ReCamTransformer3DModel.from_pretrained(tmp_path / "plain")), output(model))


WITH_PROJECTOR = r"blocks\.\d+\.(attn1\.(to_q|to_k|to_v|to_out\.0)|projector)"


@pytest.mark.parametrize("targets", [SELF_ATTENTION, WITH_PROJECTOR, r"blocks\.\d+\.projector"])
@torch.no_grad()
def test_plain_wan_takes_all_of_an_adapter_but_the_camera_modules(targets, tmp_path, caplog):
    """With neutral camera modules both networks compute the same from the same shared weights."""
    model = tiny_transformer(neutral=True)
    adapters.apply_training_mode(model, dataclasses.replace(LORA, lora_targets=targets))
    move(model)
    folder = saved(model, tmp_path)
    for name, parameter in adapters.trained_parameters(model).items():
        if "cam_encoder" in name or "projector" in name:
            parameter.zero_()
    plain = base_wan(tiny_transformer(neutral=True))
    caplog.clear()
    plain.load_lora_adapter(str(folder), weight_name=adapter_files.LORA_FILE)
    assert ("attn1" in targets) == (not caplog.records)  # nothing was left over; or it says that there is nothing
    latents, timestep, text, _ = inputs()
    torch.testing.assert_close(plain(latents, timestep, text)[0][:, :, :2], output(model), rtol=0, atol=1e-6)
    changed = not torch.equal(output(model), output(tiny_transformer(neutral=True)))
    assert changed == ("attn1" in targets)
    stored = load_file(folder / adapter_files.LORA_FILE)
    assert all(".attn1." in name and ".lora_" in name for name in stored)  # as diffusers' pipelines require
    files = {adapter_files.LORA_FILE, adapter_files.CAMERA_FILE}
    assert {path.name for path in folder.iterdir()} == files | {adapter_files.CARD}
    card = (folder / adapter_files.CARD).read_text()
    assert "without camera control" in card and all(file in card for file in files)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("targets", [SELF_ATTENTION, WITH_PROJECTOR, r"blocks\.\d+\.projector"])
@torch.no_grad()
def test_a_loaded_adapter_computes_what_was_trained_bit_for_bit(targets, dtype, tmp_path):
    tiny_transformer().save_pretrained(str(tmp_path / "start"))
    model = load_transformer(ReCamTransformer3DModel, tmp_path / "start", dtype)
    adapters.apply_training_mode(model, dataclasses.replace(LORA, lora_targets=targets))
    move(model)
    folder = saved(model, tmp_path / "adapter")
    loaded = adapter_files.load_adapter(load_transformer(ReCamTransformer3DModel, tmp_path / "start", dtype), folder)
    with device_api.autocast(torch.device("cpu"), dtype):
        assert torch.equal(output(loaded), output(model))
        assert not torch.equal(output(loaded), output(tiny_transformer()))


def test_an_older_adapter_with_everything_in_one_file_loads(tmp_path):
    model = trained_model(lora_targets=WITH_PROJECTOR)
    move(model)
    model.save_lora_adapter(str(tmp_path), weight_name=adapter_files.LORA_FILE)  # names without a prefix
    assert torch.equal(output(adapter_files.load_adapter(tiny_transformer(), tmp_path)), output(model))


def test_an_adapter_of_another_model_or_with_a_missing_or_damaged_file_is_refused(tmp_path):
    folder = saved(trained_model(lora_full_modules=()), tmp_path / "other")
    other = tiny_transformer()
    del other.blocks[1]
    with pytest.raises(ValueError, match=r"adapter of another model: .* holds 16 tensors, .* places for 8"):
        adapter_files.load_adapter(other, folder)
    config = {name: value for name, value in tiny_transformer().config.items() if not name.startswith("_")}
    wider = ReCamTransformer3DModel(**{**config, "num_attention_heads": 3})
    with pytest.raises(ValueError, match=r"holds a transformer that differs from this one in the size of \d+ \(blocks"):
        adapter_files.load_adapter(tiny_transformer(), saved(wider, tmp_path / "wider"))
    with pytest.raises(ValueError, match="places for 0"):
        adapter_files.load_adapter(wider, folder)
    assert not adapters.has_lora(wider)
    folder = saved(trained_model(), tmp_path / "damaged")
    file = folder / adapter_files.CAMERA_FILE
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"camera_modules.safetensors is missing or damaged"):
        adapter_files.load_adapter(tiny_transformer(), folder)
    file.unlink()
    with pytest.raises(ValueError, match=r"lacks camera_modules.safetensors with '4' tensors; copy the whole folder"):
        adapter_files.load_adapter(tiny_transformer(), folder)


def test_an_adapter_that_lacks_a_block_or_holds_nan_is_refused_by_the_name_of_a_tensor(tmp_path):
    folder = saved(trained_model(), tmp_path / "adapter")
    file = lora_files.lora_file(folder)
    tensors, header = read_tensors(file)
    fewer = {name: tensor for name, tensor in tensors.items() if "blocks.1." not in name}
    save_file(fewer, file, header)
    with pytest.raises(ValueError, match=r"adapter lacks the tensors of 4 \(blocks\.1\.attn1\.to_q, .*its settings"):
        adapter_files.load_adapter(tiny_transformer(), folder)
    for value in (float("nan"), float("inf")):
        (name, tensor), *_ = tensors.items()
        save_file(tensors | {name: tensor.clone().index_fill_(0, torch.tensor([0]), value)}, file, header)
        with pytest.raises(ValueError, match=rf"safetensors holds NaN or infinity in 1 \({re.escape(name)}\)"):
            adapter_files.load_adapter(tiny_transformer(), folder)


def test_an_adapter_that_would_change_nothing_or_by_an_unknown_scale_is_refused(tmp_path):
    folder = saved(trained_model(), tmp_path / "adapter")
    file = folder / adapter_files.LORA_FILE
    tensors, header = read_tensors(file)
    save_file(tensors, file, {"format": "pt"} | {adapter_files.CAMERA_COUNT: header[adapter_files.CAMERA_COUNT]})
    with pytest.raises(ValueError, match=r"adapter .*adapter lacks lora_alpha, which scales it, in"):
        adapter_files.load_adapter(tiny_transformer(), folder)
    (folder / adapter_files.CAMERA_FILE).unlink()
    save_file({}, file, header | {adapter_files.CAMERA_COUNT: "0"})
    with pytest.raises(ValueError, match="holds no tensor, it would change nothing; save or copy it again"):
        adapter_files.load_adapter(tiny_transformer(), folder)


# Module of diffusers -> of Wan's own code.
OF_WAN = {"attn1": "self_attn", "attn2": "cross_attn", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
OF_WAN |= {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}
EVERY_LINEAR = r"blocks\.\d+\.(attn[12]\.(to_q|to_k|to_v|to_out\.0)|ffn\.net\.(0\.proj|2))"


def spelled(spelling: str, folder: Path) -> Path:
    """Return an adapter of scale 2 in the spelling of another project, as its files are."""
    tensors, found = read_tensors(folder / lora_files.LORA_FILE)[0], {}
    for name, tensor in tensors.items():
        module, _, matrix = name.removeprefix("transformer.").removesuffix(".weight").rpartition(".")
        wan = re.sub("|".join(map(re.escape, OF_WAN)), lambda one: OF_WAN[one[0]], module)
        down_up = {"lora_A": "lora_down", "lora_B": "lora_up"}[matrix]
        doubled = 2 * tensor if matrix == "lora_B" else tensor  # where no alpha is stored
        match spelling:
            case "diffusers":
                found[name] = doubled
            case "DiffSynth":
                found[f"{wan}.{matrix}.default.weight"] = doubled
            case "ComfyUI":
                found[f"diffusion_model.{wan}.{matrix}.weight"] = doubled
            case "Kijai":
                found |= {f"diffusion_model.{wan}.{down_up}.weight": tensor}
                found[f"diffusion_model.{wan}.alpha"] = torch.tensor(16.0)
            case "musubi":
                flat = f"lora_unet_{wan.replace('.', '_')}"
                found |= {f"{flat}.{down_up}.weight": tensor, f"{flat}.alpha": torch.tensor(16.0)}
    save_file(found, folder / f"{spelling}.safetensors", {"format": "pt"})
    return folder / f"{spelling}.safetensors"


@pytest.mark.parametrize("spelling", ["diffusers", "DiffSynth", "ComfyUI", "Kijai", "musubi"])
def test_lora_of_the_field_s_trainers_has_the_effect_it_was_trained_to_have(spelling, tmp_path, caplog):
    settings = dataclasses.replace(LORA, lora_targets=EVERY_LINEAR, lora_full_modules=(), lora_rank=8, lora_alpha=16)
    model = tiny_transformer()
    adapters.apply_training_mode(model, settings)
    move(model)
    file = spelled(spelling, saved(model, tmp_path))
    torch.testing.assert_close(output(adapter_files.load_adapter(tiny_transformer(), file)), output(model))
    assert ("names no alpha: its scale is taken to be 1" in caplog.text) == (spelling not in ("Kijai", "musubi"))
    going_on = tiny_transformer()
    adapters.apply_training_mode(going_on, dataclasses.replace(settings, lora_alpha=4))
    lora_files.start_from(going_on, file)
    torch.testing.assert_close(output(going_on), output(model))
    assert not torch.allclose(output(model), output(tiny_transformer()), atol=1e-2)
    adapters.apply_training_mode(other := tiny_transformer(), dataclasses.replace(settings, lora_rank=4))
    with pytest.raises(ValueError, match=r"40 tensors and rank 8, to be trained are 40 of rank 4; .*model.lora_rank"):
        lora_files.start_from(other, file)


def test_names_that_nobody_can_read_are_told(tmp_path):
    save_file({"diffusion_model.blocks.0.attn9.lora_A.weight": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"has names such as 'diffusion_model.blocks.0.attn9.*diffusers cannot read"):
        adapter_files.load_adapter(tiny_transformer(), tmp_path / "a.safetensors")


def test_a_pipeline_of_diffusers_loads_an_exported_adapter_of_plain_wan(tmp_path):
    model = base_wan(tiny_transformer(neutral=True))
    adapters.apply_training_mode(model, dataclasses.replace(LORA, lora_full_modules=(), lora_rank=8, lora_alpha=16))
    move(model)
    pipeline = WanPipeline(
        None, None, None, FlowMatchEulerDiscreteScheduler(), base_wan(tiny_transformer(neutral=True))
    )
    pipeline.load_lora_weights(str(saved(model, tmp_path)))
    latents, timestep, text, _ = inputs()
    assert torch.equal(pipeline.transformer(latents, timestep, text)[0], model(latents, timestep, text)[0])


def save_from_shards(world: World, mode: str, folder: Path, file_size: str) -> list[str]:
    adapter_files.FILE_SIZE = file_size
    model = trained_model(trained=mode)
    move(model)
    module = parallelize(model, "fsdp2", CPU, world)
    adapter_files.save_adapter(types.SimpleNamespace(module=module), folder, world)
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("mode", "file_size", "files"), [("lora", "2GB", 2), ("full", "2GB", 2), ("full", "20KB", 4)])
def test_shards_are_saved_as_the_whole_model_would_be(mode, file_size, files, tmp_path):
    names, _ = run_ranks(save_from_shards, 2, mode, tmp_path / "adapter", file_size)
    assert len(names) >= files and ("index" in "".join(names)) == (file_size == "20KB")
    model = trained_model(trained=mode)
    move(model)
    loaded = adapter_files.load_adapter(tiny_transformer(), tmp_path / "adapter")
    assert torch.equal(output(loaded), output(model))
    if mode == "full":
        assert json.loads((tmp_path / "adapter" / "config.json").read_text())["camera_dim"] == 12
        sizes = [file.stat().st_size for file in (tmp_path / "adapter").glob("*.safetensors")]
        assert (max(sizes) < 30_000) == (file_size == "20KB")


def fail_to_save(world: World, folder: Path) -> str:
    folder.write_text("in the way") if world.is_main else None
    with pytest.raises(RuntimeError) as caught:
        adapter_files.save_adapter(types.SimpleNamespace(module=trained_model()), folder, world)
    return str(caught.value)


def test_a_rank_that_cannot_write_stops_all(tmp_path):
    said = run_ranks(fail_to_save, 2, tmp_path / "adapter")
    assert said[0] == said[1] and "rank 0 failed in saving the adapter" in said[0]


def test_an_adapter_is_replaced_as_a_whole_and_one_that_cannot_be_written_leaves_the_old_one(tmp_path, monkeypatch):
    folder = saved(trained_model(), tmp_path / "adapter")
    (folder / "left over").touch()
    before = sorted(folder.iterdir())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(adapter_files, "save_file", full)
        with pytest.raises(RuntimeError, match="No space left"):
            saved(trained_model(), folder)
    assert sorted(folder.iterdir()) == before
    names = {path.name for path in saved(trained_model(), folder).iterdir()}
    assert names == {adapter_files.LORA_FILE, adapter_files.CAMERA_FILE, adapter_files.CARD}
    assert list(tmp_path.iterdir()) == [folder]
