"""Conversion of ReCamMaster checkpoints, against names written by hand and against diffusers' own converter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from flow_grpo.models import convert, weight_files
from flow_grpo.models.recam_policy import load_networks
from flow_grpo.models.recam_transformer import ReCamTransformer3DModel, load_recam_transformer
from tests.models.test_recam_transformer import inputs
from tests.tiny_models import make_tiny_folder, tiny_transformer
from tools import convert_recammaster as tool
from tools.benching.exchange import peak_mib, resident_mib

# original name, diffusers name, shape: D width, A feed-forward, T text, E timestep, C channels, P values of a patch.
OUTER = """
patch_embedding.weight   patch_embedding.weight                               D,C,1,2,2
patch_embedding.bias     patch_embedding.bias                                 D
text_embedding.0.weight  condition_embedder.text_embedder.linear_1.weight     D,T
text_embedding.0.bias    condition_embedder.text_embedder.linear_1.bias       D
text_embedding.2.weight  condition_embedder.text_embedder.linear_2.weight     D,D
text_embedding.2.bias    condition_embedder.text_embedder.linear_2.bias       D
time_embedding.0.weight  condition_embedder.time_embedder.linear_1.weight     D,E
time_embedding.0.bias    condition_embedder.time_embedder.linear_1.bias       D
time_embedding.2.weight  condition_embedder.time_embedder.linear_2.weight     D,D
time_embedding.2.bias    condition_embedder.time_embedder.linear_2.bias       D
time_projection.1.weight condition_embedder.time_proj.weight                  6*D,D
time_projection.1.bias   condition_embedder.time_proj.bias                    6*D
head.head.weight         proj_out.weight                                      P,D
head.head.bias           proj_out.bias                                        P
head.modulation          scale_shift_table                                    1,2,D
"""
BLOCK = """
self_attn.q.weight       attn1.to_q.weight       D,D
self_attn.q.bias         attn1.to_q.bias         D
self_attn.k.weight       attn1.to_k.weight       D,D
self_attn.k.bias         attn1.to_k.bias         D
self_attn.v.weight       attn1.to_v.weight       D,D
self_attn.v.bias         attn1.to_v.bias         D
self_attn.o.weight       attn1.to_out.0.weight   D,D
self_attn.o.bias         attn1.to_out.0.bias     D
self_attn.norm_q.weight  attn1.norm_q.weight     D
self_attn.norm_k.weight  attn1.norm_k.weight     D
cross_attn.q.weight      attn2.to_q.weight       D,D
cross_attn.q.bias        attn2.to_q.bias         D
cross_attn.k.weight      attn2.to_k.weight       D,D
cross_attn.k.bias        attn2.to_k.bias         D
cross_attn.v.weight      attn2.to_v.weight       D,D
cross_attn.v.bias        attn2.to_v.bias         D
cross_attn.o.weight      attn2.to_out.0.weight   D,D
cross_attn.o.bias        attn2.to_out.0.bias     D
cross_attn.norm_q.weight attn2.norm_q.weight     D
cross_attn.norm_k.weight attn2.norm_k.weight     D
norm3.weight             norm2.weight            D
norm3.bias               norm2.bias              D
ffn.0.weight             ffn.net.0.proj.weight   A,D
ffn.0.bias               ffn.net.0.proj.bias     A
ffn.2.weight             ffn.net.2.weight        D,A
ffn.2.bias               ffn.net.2.bias          D
modulation               scale_shift_table       1,6,D
"""
CAMERA = """
cam_encoder.weight       cam_encoder.weight      D,12
cam_encoder.bias         cam_encoder.bias        D
projector.weight         projector.weight        D,D
projector.bias           projector.bias          D
"""
TINY = {"D": 24, "A": 32, "T": 16, "E": 16, "C": 4, "P": 16}
FULL = {"D": 1536, "A": 8960, "T": 4096, "E": 256, "C": 16, "P": 64}


def rows(depth: int, *, camera: bool = True) -> list[list[str]]:
    found = [line.split() for line in OUTER.strip().splitlines()]
    for block in range(depth):
        for line in (BLOCK + (CAMERA if camera else "")).split("\n"):
            if line:
                old, new, shape = line.split()
                found.append([f"blocks.{block}.{old}", f"blocks.{block}.{new}", shape])
    return found


def checkpoint(depth: int = 2, *, sizes=TINY, camera: bool = True, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Return random weights under the original names."""
    draw, state = torch.Generator().manual_seed(depth), {}
    for old, _, shape in rows(depth, camera=camera):
        axes = [eval(axis, {}, sizes) for axis in shape.split(",")]
        state[old] = torch.empty(axes, dtype=dtype).normal_(0, 0.1, generator=draw)
    return state


def of_model(model) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {old: state[new].clone() for old, new, _ in rows(2)}


def same(one, other) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


@pytest.fixture
def wan(tmp_path) -> Path:
    """Return base Wan in diffusers layout, small."""
    folder = Path(make_tiny_folder(tmp_path / "wan"))
    config = {k: v for k, v in tiny_transformer().config.items() if not k.startswith("_") and k != "camera_dim"}
    shutil.rmtree(folder / "transformer")
    WanTransformer3DModel(**config).save_pretrained(str(folder / "transformer"))
    edit(folder / "model_index.json", transformer=["diffusers", "WanTransformer3DModel"])
    return folder


def edit(file: Path, **change) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def run(tmp_path: Path, state, wan: Path, *more: str) -> int:
    file = tmp_path / "step.ckpt"
    torch.save(state, file)
    return tool.main(["--recammaster", str(file), "--wan", str(wan), "--out", str(tmp_path / "out"), *more])


def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(tmp_path / "out" / "transformer" / weight_files.WEIGHTS_FILE)


# --- names


@pytest.mark.parametrize("depth", [1, 2, 12, 30])
@pytest.mark.parametrize("camera", [False, True])
def test_the_names_are_those_of_the_note(depth, camera):
    assert convert.tensor_names(depth, camera=camera) == {old: new for old, new, _ in rows(depth, camera=camera)}


def test_the_published_model_has_825_and_120_tensors():
    assert len(convert.tensor_names(30, camera=False)) == 825
    assert len(convert.tensor_names(30, camera=True)) == 825 + 120
    with torch.device("meta"):
        model = ReCamTransformer3DModel().state_dict()
    assert set(convert.tensor_names(30, camera=True).values()) == model.keys()


@pytest.mark.parametrize("camera", [False, True])
def test_both_directions_return_to_the_same_bits(camera):
    state = checkpoint(camera=camera)
    there = convert.to_diffusers(state)
    assert same(convert.to_original(there), state)
    assert all(there[new] is state[old] for old, new, _ in rows(2, camera=camera))
    assert convert.renaming(state).camera == convert.renaming(there, back=True).camera == camera


@pytest.mark.parametrize("camera", [False, True])
def test_names_and_tensors_agree_with_the_converter_of_diffusers(camera):
    state = checkpoint(camera=camera)
    assert same(convert.to_diffusers(state), convert_wan_transformer_to_diffusers(dict(state)))


@pytest.mark.parametrize("prefix", ["module.", "model.diffusion_model.", "dit.", "pipe.dit.", "module.model.", ""])
def test_a_common_prefix_is_dropped_and_told(prefix):
    state = checkpoint()
    prefixed = {prefix + name: value for name, value in state.items()}
    assert convert.renaming(prefixed).prefix == prefix
    assert same(convert.to_diffusers(prefixed), convert.to_diffusers(state))
    there = {prefix + name: value for name, value in convert.to_diffusers(state).items()}
    assert convert.renaming(there, back=True).prefix == prefix
    assert same(convert.to_original(there), state)


@pytest.mark.parametrize("prefix", ["net.", "blocks.", "modul."])
def test_a_prefix_that_is_not_known_is_not_guessed(prefix):
    with pytest.raises(ValueError, match=rf"unexpected \d+ \({prefix}"):
        convert.to_diffusers({prefix + name: value for name, value in checkpoint().items()})


def test_a_prefix_on_some_names_only_is_refused():
    state = checkpoint()
    state["module.head.head.bias"] = state.pop("head.head.bias")
    with pytest.raises(ValueError, match=r"lacks 1 \(head\.head\.bias\), and has unexpected 1 \(module\.head\.head\.b"):
        convert.to_diffusers(state)


@pytest.mark.parametrize("name", [old for old, _, _ in rows(2)])
def test_every_missing_name_is_named(name):
    state = checkpoint()
    del state[name]
    with pytest.raises(ValueError, match="not ReCamMaster") as caught:
        convert.to_diffusers(state)
    assert f"lacks 1 ({name}), and has unexpected none" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.cross_attn.k_img.weight",  # image to video
        "img_emb.proj.0.weight",
        "blocks.1.norm1.weight",
        "blocks.0.self_attn.q.weight.extra",
        "blocks.99999999999.self_attn.q.weight",
        "blocks.100.self_attn.q.weight",
        "blocks.x.self_attn.q.weight",
        "freqs",
    ],
)
def test_every_unexpected_name_is_named(name):
    with pytest.raises(ValueError, match="is not") as caught:
        convert.to_diffusers(checkpoint() | {name: torch.zeros(1)})
    assert f"lacks none, and has unexpected 1 ({name})" in str(caught.value)


def test_many_wrong_names_are_counted_and_the_first_are_shown():
    state = {name: value for name, value in checkpoint().items() if not name.startswith("blocks.0.")}
    with pytest.raises(
        ValueError, match=r"of 77 tensors for 2 blocks it lacks 31 \(blocks\.0\.\S+, \S+, \S+, \.\.\.\)"
    ):
        convert.to_diffusers(state)
    with pytest.raises(ValueError, match="of 42 tensors for 1 blocks it lacks 42"):
        convert.to_diffusers({})


def test_the_other_layout_is_refused_with_a_hint():
    state = checkpoint()
    with pytest.raises(ValueError, match="in the original rather than diffusers layout"):
        convert.to_diffusers(convert.to_diffusers(state))
    with pytest.raises(ValueError, match="in diffusers rather than the original layout"):
        convert.to_original(state)


# --- the tool, forward


def test_a_cut_off_checkpoint_is_refused(tmp_path, wan, capsys):
    file = tmp_path / "cut.ckpt"
    torch.save(checkpoint(), file)
    file.write_bytes(file.read_bytes()[:-1000])
    assert tool.main(["--recammaster", str(file), "--wan", str(wan), "--out", str(tmp_path / "out")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@torch.no_grad()
@pytest.mark.parametrize("link", [False, True])
def test_the_converted_folder_is_the_model_it_was_made_from(tmp_path, wan, link, capsys):
    model = tiny_transformer(seed=5)
    state = {f"dit.{name}": value for name, value in of_model(model).items()}
    assert run(tmp_path, state, wan, *(["--link"] if link else [])) == 0
    networks = load_networks(tmp_path / "out", torch.float32, torch.device("cpu"))
    assert torch.equal(networks.transformer(*inputs())[0], model(*inputs())[0])
    assert networks.transformer.config["camera_dim"] == 12
    assert all((tmp_path / "out" / part).is_symlink() == link for part in tool.PARTS)
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert index["transformer"] == ["flow_grpo.models.recam_transformer", "ReCamTransformer3DModel"]
    said = capsys.readouterr().out
    size = sum(value.numel() for value in state.values())
    for part in ("77 tensors", f"{size:,} parameters: 77 float32", "8 camera tensors, 1,824 p", "prefix 'dit.'", " GB"):
        assert part in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "step.ckpt", "wan"]


def test_the_weights_are_those_of_the_converter_of_diffusers(tmp_path, wan):
    state = checkpoint()
    assert run(tmp_path, state, wan) == 0
    assert same(weights(tmp_path), convert_wan_transformer_to_diffusers(dict(state)))


def test_every_tensor_begins_at_a_multiple_of_its_own_width(tmp_path):
    state = {f"{number}": torch.ones(3 - number % 2) for number in range(9)}
    dtypes = {name: torch.float32 if int(name) % 2 else torch.bfloat16 for name in state}
    for extra in range(8):  # headers of every length modulo 8
        file = tmp_path / f"{extra}.safetensors"
        long = "n" * (extra + 1)
        tool.write_safetensors(file, state | {long: torch.ones(1)}, dtypes | {long: torch.float32})
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
        assert all(part["data_offsets"][0] % (2 if part["dtype"] == "BF16" else 4) == 0 for part in header.values())
        written = safetensors.torch.load_file(file)
        assert all(torch.equal(written[name], value.to(dtypes[name])) for name, value in state.items())


KEPT = ("time_embedder", "scale_shift_table", "norm2")


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp32"])
def test_the_precision_is_the_one_asked_for(tmp_path, wan, source, dtype):
    state = checkpoint(dtype=source)
    assert run(tmp_path, state, wan, "--dtype", dtype) == 0
    written = weights(tmp_path)
    for old, new, _ in rows(2):
        fp32 = dtype == "fp32" or any(word in new.split(".") for word in KEPT)
        expected = source if dtype == "keep" else torch.float32 if fp32 else torch.bfloat16
        assert written[new].dtype == expected, new
        assert torch.equal(written[new], state[old].to(expected)), new
    loaded = load_recam_transformer(tmp_path / "out" / "transformer", torch.bfloat16).state_dict()
    assert same({k: v for k, v in written.items() if dtype == "bf16"}, loaded if dtype == "bf16" else {})


@torch.no_grad()
def test_base_wan_needs_permission_and_then_computes_what_base_wan_computes(tmp_path, wan, capsys):
    state = checkpoint(camera=False)
    assert run(tmp_path, state, wan) == 2
    assert "has no camera tensors: give --init-camera" in capsys.readouterr().err
    assert run(tmp_path, state, wan, "--init-camera") == 0
    assert "camera modules were made" in capsys.readouterr().out
    base = WanTransformer3DModel.from_pretrained(str(wan / "transformer")).eval()
    base.load_state_dict(convert_wan_transformer_to_diffusers(dict(state)))
    latents, timestep, text, camera = inputs()
    got = load_recam_transformer(tmp_path / "out" / "transformer")(latents, timestep, text, camera)[0]
    assert torch.equal(got, base(latents, timestep, text, return_dict=False)[0])


def test_made_camera_modules_are_zero_and_identity_in_the_checkpoints_precision(tmp_path, wan):
    assert run(tmp_path, checkpoint(camera=False, dtype=torch.bfloat16), wan, "--init-camera") == 0
    neutral = tiny_transformer(neutral=True).state_dict()
    camera = {name: value.bfloat16() for name, value in neutral.items() if "cam_enc" in name or "projector" in name}
    assert len(camera) == 8
    assert same({name: value for name, value in weights(tmp_path).items() if name in camera}, camera)


def test_a_checkpoint_with_camera_is_not_initialised_again(tmp_path, wan, capsys):
    assert run(tmp_path, checkpoint(), wan, "--init-camera") == 2
    assert "has its camera tensors: leave out --init-camera" in capsys.readouterr().err


ORIGINAL = {
    "_class_name": "WanModel",
    "model_type": "t2v",
    "dim": 24,
    "num_heads": 2,
    "in_dim": 4,
    "out_dim": 4,
    "freq_dim": 16,
    "ffn_dim": 32,
    "num_layers": 2,
    "eps": 1e-6,
    "text_len": 512,
}


@torch.no_grad()
def test_original_wan_files_give_the_transformer_only(tmp_path, capsys):
    (tmp_path / "wan").mkdir()
    (tmp_path / "wan" / "config.json").write_text(json.dumps(ORIGINAL))
    sizes = TINY | {"T": 4096}  # not written in that config
    assert run(tmp_path, checkpoint(sizes=sizes), tmp_path / "wan") == 0
    assert "only transformer/ was made" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["transformer"]
    model = load_recam_transformer(tmp_path / "out" / "transformer")
    assert same(model.state_dict(), convert_wan_transformer_to_diffusers(checkpoint(sizes=sizes)))
    expected = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "eps": 1e-6}
    assert expected.items() <= model.config.items()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "i2v"}, "model_type 'i2v', expected 't2v'"),
        ({"num_heads": 5}, "expected a multiple of num_heads 5"),
        ({"_class_name": "Flux"}, "holds a Flux alone"),
        ({"_class_name": "WanTransformer3DModel"}, "give the whole folder, its parent"),
    ],
)
def test_configurations_of_other_models_are_refused(tmp_path, change, message, capsys):
    (tmp_path / "wan").mkdir()
    (tmp_path / "wan" / "config.json").write_text(json.dumps(ORIGINAL | change))
    assert run(tmp_path, checkpoint(), tmp_path / "wan") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 3}, "checkpoint has 2 blocks, the configuration 3"),
        (
            {"num_attention_heads": 4},
            "has width (num_attention_heads * attention_head_dim) [24], the configuration [48]",
        ),
        ({"ffn_dim": 64}, "has ffn_dim [32], the configuration [64]"),
        ({"text_dim": 8}, "has text_dim [16], the configuration [8]"),
        ({"freq_dim": 8}, "has freq_dim [16], the configuration [8]"),
        ({"in_channels": 8}, "has in_channels [4], the configuration [8]"),
        ({"camera_dim": 16}, "has camera_dim [12], the configuration [16]"),
        ({"out_channels": 8}, "another shape: 2 (proj_out.weight (16, 24) instead of (32, 24), proj_out.bias"),
        ({"patch_size": [1, 1, 2]}, "patch_embedding.weight (24, 4, 1, 2, 2) instead of (24, 4, 1, 1, 2)"),
        ({"cross_attn_norm": False}, "disagree on 4 (blocks.0.norm2.bias"),
        ({"image_dim": 8}, "start from a T2V checkpoint"),
        ({"vace_layers": [1]}, "configuration has unknown 1 (vace_layers)"),
        ({"_class_name": "Flux"}, "configuration of Flux, expected WanTransformer3DModel"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path, wan, change, message, capsys):
    edit(wan / "transformer" / "config.json", **change)
    assert run(tmp_path, checkpoint(), wan) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [old for old, _, _ in rows(1)])
def test_every_misshapen_tensor_is_refused(tmp_path, wan, name):
    state = checkpoint()
    state[name] = state[name][..., :-1]
    model, table = tiny_transformer(), convert.tensor_names(2, camera=True)
    with pytest.raises(ValueError, match="checkpoint has") as caught:
        convert.check_shapes(convert.to_diffusers(state), model)
    assert table[name] in str(caught.value)


# --- nothing half-written


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), OSError(28, "No space left on device")])
@pytest.mark.parametrize("place", ["add_parts", "to_disk"])
def test_an_interrupted_write_leaves_nothing(tmp_path, wan, error, place, monkeypatch, capsys):
    seen = []

    def interrupted(*_, **__):
        seen.extend(path.name for path in tmp_path.iterdir())
        raise error

    monkeypatch.setattr(tool, place, interrupted)
    if isinstance(error, OSError):
        assert run(tmp_path, checkpoint(), wan) == 2
        assert "No space left" in capsys.readouterr().err
    else:
        with pytest.raises(type(error)):
            run(tmp_path, checkpoint(), wan)
    assert any("partial" in name for name in seen) and "out" not in seen
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.ckpt", "wan"]
    assert (wan / "vae" / "config.json").is_file()


def test_an_interrupted_write_leaves_what_it_linked(tmp_path, wan, monkeypatch):
    monkeypatch.setattr(tool.os, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, checkpoint(), wan, "--link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.ckpt", "wan"]
    assert (wan / "vae" / "config.json").is_file()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_written(tmp_path, wan, value, capsys):
    state = checkpoint()
    state["time_projection.1.bias"][3] = value
    assert run(tmp_path, state, wan) == 2
    assert "condition_embedder.time_proj.bias has values that are not finite" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.ckpt", "wan"]


def test_what_exists_is_not_overwritten(tmp_path, wan, capsys):
    (tmp_path / "out").mkdir()
    assert run(tmp_path, checkpoint(), wan) == 2
    assert "already exists" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--out o", "got neither or both of two ways"),
        ("--back a --wan b --out o", "got neither or both of two ways"),
        ("--wan a --out o", "expected both"),
        ("--back a --link --out o.safetensors", "no meaning with --back"),
        ("--back a --out o", "ending in .safetensors"),
        ("--back a --out o.safetensors", "config.json is missing"),
        ("--back a --out nowhere/o.safetensors", "lies in no folder"),
        ("--recammaster a --wan b --out o", "neither transformer/config.json nor config.json"),
    ],
)
def test_command_lines_that_cannot_work_are_refused_in_one_line(tmp_path, monkeypatch, words, message, capsys):
    monkeypatch.chdir(tmp_path)
    assert tool.main(words.split()) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("error: ") and said.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_wan_folder_with_parts_missing_is_refused(tmp_path, wan, capsys):
    shutil.rmtree(wan / "vae")
    assert run(tmp_path, checkpoint(), wan) == 2
    assert "has no vae folder" in capsys.readouterr().err


# --- the tool, back


@pytest.mark.parametrize("inner", ["", "transformer"])
def test_back_returns_the_checkpoint_bit_for_bit(tmp_path, wan, inner, capsys):
    state = checkpoint(dtype=torch.bfloat16)
    assert run(tmp_path, state, wan) == 0
    there = tmp_path / "back.safetensors"
    assert tool.main(["--back", str(tmp_path / "out" / inner), "--out", str(there)]) == 0
    assert same(safetensors.torch.load_file(there), state)
    assert "8 camera tensors" in capsys.readouterr().out


def test_back_reads_shards_and_writes_one_precision_throughout(tmp_path):
    model = tiny_transformer()
    model.save_pretrained(str(tmp_path / "model"), max_shard_size="20KB")
    assert (tmp_path / "model" / f"{weight_files.WEIGHTS_FILE}.index.json").is_file()
    there = tmp_path / "back.safetensors"
    assert tool.main(["--back", str(tmp_path / "model"), "--out", str(there), "--dtype", "bf16"]) == 0
    assert same(safetensors.torch.load_file(there), {k: v.bfloat16() for k, v in of_model(model).items()})


def test_back_refuses_another_model(tmp_path, wan, capsys):
    assert tool.main(["--back", str(wan), "--out", str(tmp_path / "x.safetensors")]) == 2
    assert "holds WanTransformer3DModel, expected ReCamTransformer3DModel" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["wan"]


# --- size


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["keep", "fp32"])
def test_the_full_size_is_converted_in_the_memory_of_one_copy(tmp_path, wan, dtype, capsys):
    with torch.device("meta"):
        ReCamTransformer3DModel().save_config(str(tmp_path / "config"))
    config = json.loads((tmp_path / "config" / "config.json").read_text())
    edit(wan / "transformer" / "config.json", **{k: v for k, v in config.items() if k[0] != "_" and k != "camera_dim"})
    torch.save(checkpoint(30, sizes=FULL, dtype=torch.bfloat16), tmp_path / "step.ckpt")
    words = ["--recammaster", str(tmp_path / "step.ckpt"), "--wan", str(wan), "--out", str(tmp_path / "out")]
    size = (tmp_path / "step.ckpt").stat().st_size / 2**20
    before = resident_mib()
    assert tool.main([*words, "--dtype", dtype]) == 0
    growth = peak_mib() - before
    said = capsys.readouterr().out
    print(said, f"memory grew by {growth:.0f} MiB, the checkpoint has {size:.0f} MiB")
    assert "945 tensors, 1,490,420,800 parameters" in said and "120 camera tensors, 71,424,000 parameters" in said
    assert growth < 1.1 * size
    model = load_recam_transformer(tmp_path / "out" / "transformer", torch.bfloat16)
    source = weight_files.read_checkpoint(tmp_path / "step.ckpt")
    for name in ("blocks.29.self_attn.q.weight", "blocks.0.projector.bias", "head.head.weight"):
        assert torch.equal(model.state_dict()[convert.tensor_names(30, camera=True)[name]], source[name])
