"""Conversion of ReCamMaster checkpoints to model folders and back."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

from flow_grpo.models.files import convert, model_files
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer
from flow_grpo.models.recam import RECAM
from flow_grpo.models.wan_policy import load_networks
from tests.memory import peak_mib, resident_mib
from tests.models.test_convert import checkpoint, same
from tests.models.test_recam_transformer import base_wan, inputs
from tests.refusals import refused
from tests.tiny_models import make_tiny_folder, tiny_settings, tiny_transformer
from tools import convert_recammaster as tool
from tools.conversion import model_folder


@pytest.fixture(scope="module")
def original_wan(tmp_path_factory) -> Path:
    folder = Path(make_tiny_folder(tmp_path_factory.mktemp("base") / "wan"))
    shutil.rmtree(folder / "transformer")
    base_wan(tiny_transformer()).save_pretrained(str(folder / "transformer"))
    edit(folder / "model_index.json", transformer=["diffusers", "WanTransformer3DModel"])
    return folder


@pytest.fixture
def wan(tmp_path, original_wan) -> Path:
    return Path(shutil.copytree(original_wan, tmp_path / "wan"))


def edit(file: Path, **change) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))


def run(tmp_path: Path, state, wan: Path, *more: str) -> int:
    file = tmp_path / "step.ckpt"
    torch.save(state, file)
    return tool.main(["--recammaster", str(file), "--wan", str(wan), "--out", str(tmp_path / "out"), *more])


def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(tmp_path / "out" / "transformer" / model_files.WEIGHTS_FILE)


def original(model: ReCamTransformer3DModel) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {old: state[new].clone() for old, new in convert.RECAM.names(2).items()}


@torch.no_grad()
@pytest.mark.parametrize("link", [False, True])
def test_the_converted_folder_is_the_model_it_was_made_from(tmp_path, wan, link, capsys):
    model = tiny_transformer(seed=5)
    state = {f"dit.{name}": value for name, value in original(model).items()}
    assert run(tmp_path, state, wan, *(["--link"] if link else [])) == 0
    networks = load_networks(RECAM, tiny_settings(tmp_path / "out"), torch.device("cpu"))
    assert torch.equal(networks.transformer(*inputs())[0], model(*inputs())[0])
    assert networks.transformer.config["camera_dim"] == 12
    assert all((tmp_path / "out" / component).is_symlink() == link for component in tool.COMPONENTS)
    index = json.loads((tmp_path / "out" / "model_index.json").read_text())
    assert index["transformer"] == ["flow_grpo.models.networks.recam_transformer", "ReCamTransformer3DModel"]
    said = capsys.readouterr().out
    size = sum(value.numel() for value in state.values())
    for part in ("77 tensors", f"{size:,} parameters: 77 float32", "8 camera tensors, 1,824 p", "prefix 'dit.'", " GB"):
        assert part in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "step.ckpt", "wan"]


def test_every_tensor_begins_at_a_multiple_of_its_element_size(tmp_path):
    state = {f"{number}": torch.ones(3 - number % 2) for number in range(9)}
    dtypes = {name: torch.float32 if int(name) % 2 else torch.bfloat16 for name in state}
    for extra in range(8):  # headers of every length modulo 8
        file, long = tmp_path / f"{extra}.safetensors", "n" * (extra + 1)
        model_folder.write_safetensors(file, state | {long: torch.ones(1)}, dtypes | {long: torch.float32})
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        assert length % 8 == 0 and header.pop("__metadata__") == {"format": "pt"}
        assert all(part["data_offsets"][0] % (2 if part["dtype"] == "BF16" else 4) == 0 for part in header.values())
        written = safetensors.torch.load_file(file)
        assert all(torch.equal(written[name], value.to(dtypes[name])) for name, value in state.items())


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", ["keep", "bf16", "fp32"])
def test_the_dtype_is_the_one_asked_for(tmp_path, wan, source, dtype):
    state = checkpoint(dtype=source)
    assert run(tmp_path, state, wan, "--dtype", dtype, "--link") == 0
    written = weights(tmp_path)
    for old, new in convert.RECAM.names(2).items():
        fp32 = dtype == "fp32" or {"time_embedder", "scale_shift_table", "norm2"} & set(new.split("."))
        expected = source if dtype == "keep" else torch.float32 if fp32 else torch.bfloat16
        assert written[new].dtype == expected and torch.equal(written[new], state[old].to(expected)), new
    if dtype == "bf16":
        assert same(
            written,
            load_transformer(ReCamTransformer3DModel, tmp_path / "out" / "transformer", torch.bfloat16).state_dict(),
        )


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_base_wan_needs_a_flag_and_then_computes_what_base_wan_computes(tmp_path, wan, dtype, capsys):
    state = checkpoint(camera=False, dtype=dtype)
    assert run(tmp_path, state, wan) == 2
    assert refused(capsys, "no camera tensors", "--init-camera")
    assert run(tmp_path, state, wan, "--init-camera") == 0
    assert {weights(tmp_path)[f"blocks.1.{name}.weight"].dtype for name in ("cam_encoder", "projector")} == {dtype}
    base = WanTransformer3DModel.from_pretrained(str(wan / "transformer")).eval()
    base.load_state_dict(convert_wan_transformer_to_diffusers(dict(state)))
    latents, timestep, text, camera = inputs()
    made = load_transformer(ReCamTransformer3DModel, tmp_path / "out" / "transformer")
    got = made(latents, timestep, text, camera)[0]
    assert torch.equal(got, base(latents, timestep, text, return_dict=False)[0][:, :, : got.shape[2]])


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


def test_original_wan_files_give_the_transformer_only(tmp_path, capsys):
    (tmp_path / "wan").mkdir()
    (tmp_path / "wan" / "config.json").write_text(json.dumps(ORIGINAL))
    config = {name: value for name, value in tiny_transformer().config.items() if not name.startswith("_")}
    state = checkpoint(ReCamTransformer3DModel(**config | {"text_dim": 4096}))  # which that config.json lacks
    assert run(tmp_path, state, tmp_path / "wan") == 0
    assert "only transformer/" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["transformer"]
    model = load_transformer(ReCamTransformer3DModel, tmp_path / "out" / "transformer")
    assert same(model.state_dict(), convert_wan_transformer_to_diffusers(state))
    expected = {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "eps": 1e-6}
    assert expected.items() <= model.config.items()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "i2v"}, ("model_type 'i2v'", "'t2v'")),
        ({"num_heads": 5}, ("num_heads 5", "24")),
        ({"_class_name": "Flux"}, ("Flux", "whole folder")),
        ({"_class_name": "WanTransformer3DModel"}, ("WanTransformer3DModel", "parent")),
    ],
)
def test_original_files_of_another_model_are_refused(tmp_path, change, words, capsys):
    (tmp_path / "wan").mkdir()
    (tmp_path / "wan" / "config.json").write_text(json.dumps(ORIGINAL | change))
    assert run(tmp_path, checkpoint(), tmp_path / "wan") == 2
    assert refused(capsys, *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 3}, ("2 blocks", "configuration 3")),
        ({"num_attention_heads": 4}, ("num_attention_heads", "[24]", "[48]")),
        ({"ffn_dim": 64}, ("ffn_dim", "[32]", "[64]")),
        ({"text_dim": 8}, ("text_dim", "[16]", "[8]")),
        ({"freq_dim": 8}, ("freq_dim", "[16]", "[8]")),
        ({"in_channels": 8}, ("in_channels", "[4]", "[8]")),
        ({"camera_dim": 16}, ("camera_dim", "[12]", "[16]")),
        ({"out_channels": 8}, ("proj_out.weight", "(16, 24)", "(32, 24)")),
        ({"patch_size": [1, 1, 2]}, ("patch_embedding.weight", "(24, 4, 1, 2, 2)", "(24, 4, 1, 1, 2)")),
        ({"cross_attn_norm": False}, ("disagree on 4", "blocks.0.norm2.bias")),
        ({"image_dim": 8}, ("image_dim", "T2V")),
        ({"vace_layers": [1]}, ("vace_layers",)),
        ({"_class_name": "Flux"}, ("Flux", "WanTransformer3DModel")),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path, wan, change, words, capsys):
    edit(wan / "transformer" / "config.json", **change)
    assert run(tmp_path, checkpoint(), wan) == 2
    assert refused(capsys, *words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), OSError(28, "No space left on device")])
@pytest.mark.parametrize("place", ["os.symlink", "tools.conversion.model_folder.fsync"])
def test_an_interrupted_write_leaves_nothing_and_keeps_what_it_linked(tmp_path, wan, error, place, monkeypatch, capsys):
    seen = []

    def interrupted(*_, **__):
        seen.extend(path.name for path in tmp_path.iterdir())
        raise error

    monkeypatch.setattr(place, interrupted)
    if isinstance(error, OSError):
        assert run(tmp_path, checkpoint(), wan, "--link") == 2
        assert refused(capsys, "No space left")
    else:
        with pytest.raises(type(error)):
            run(tmp_path, checkpoint(), wan, "--link")
    assert any(".tmp-" in name for name in seen) and "out" not in seen
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.ckpt", "wan"]
    assert (wan / "vae" / "config.json").is_file()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named_and_nothing_is_written(tmp_path, wan, value, capsys):
    state = checkpoint()
    state["time_projection.1.bias"][3] = value
    assert run(tmp_path, state, wan) == 2
    assert refused(capsys, "condition_embedder.time_proj.bias", "not finite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step.ckpt", "wan"]


def test_an_existing_folder_and_a_checkpoint_or_wan_folder_of_the_wrong_kind_are_refused(tmp_path, wan, capsys):
    (tmp_path / "out").mkdir()
    assert run(tmp_path, checkpoint(), wan) == 2
    assert refused(capsys, "--out", "already exists")
    (tmp_path / "out").rmdir()  # still empty
    assert run(tmp_path, checkpoint(), wan, "--init-camera") == 2
    assert refused(capsys, "has its camera tensors", "--init-camera")
    shutil.rmtree(wan / "vae")
    assert run(tmp_path, checkpoint(), wan) == 2
    assert refused(capsys, "vae", "download")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--out o", ("--recammaster", "--back")),
        ("--back a --wan b --out o", ("--wan", "--back")),
        ("--wan a --out o", ("got --wan:", "--recammaster")),
        ("--back a --link --out o.safetensors", ("--link", "--back")),
        ("--back a --out o", ("--out is o", ".safetensors")),
        ("--back a --out o.safetensors", ("config.json",)),
        ("--back a --out nowhere/o.safetensors", ("--out nowhere", "make")),
        ("--recammaster a --wan b --out o", ("--wan b", "config.json")),
    ],
)
def test_unusable_command_lines_are_refused_in_one_line(tmp_path, monkeypatch, words, said, capsys):
    monkeypatch.chdir(tmp_path)
    assert tool.main(words.split()) == 2
    assert refused(capsys, *said)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("inner", ["", "transformer"])
def test_back_returns_the_checkpoint_bit_for_bit(tmp_path, wan, inner, capsys):
    state = checkpoint(dtype=torch.bfloat16)
    assert run(tmp_path, state, wan) == 0
    there = tmp_path / "back.safetensors"
    assert tool.main(["--back", str(tmp_path / "out" / inner), "--out", str(there)]) == 0
    assert same(safetensors.torch.load_file(there), state)
    assert "8 camera tensors" in capsys.readouterr().out


def test_back_reads_shards_and_writes_one_dtype_throughout(tmp_path):
    model = tiny_transformer()
    model.save_pretrained(str(tmp_path / "model"), max_shard_size="20KB")
    assert (tmp_path / "model" / f"{model_files.WEIGHTS_FILE}.index.json").is_file()
    there = tmp_path / "back.safetensors"
    assert tool.main(["--back", str(tmp_path / "model"), "--out", str(there), "--dtype", "bf16"]) == 0
    assert same(safetensors.torch.load_file(there), {k: v.bfloat16() for k, v in original(model).items()})


def test_back_refuses_base_wan_whatever_its_configuration_says(tmp_path, wan, capsys):
    words = ["--back", str(wan), "--out", str(tmp_path / "x.safetensors")]
    assert tool.main(words) == 2
    assert refused(capsys, "WanTransformer3DModel", "expected ReCamTransformer3DModel")
    tiny_transformer().save_config(str(wan / "transformer"))
    assert tool.main(words) == 2
    assert refused(capsys, str(wan / "transformer"), "without camera tensors", "give a folder")
    assert [path.name for path in tmp_path.iterdir()] == ["wan"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["keep", "fp32"])
def test_the_full_size_is_converted_in_the_memory_of_one_copy(tmp_path, wan, dtype, capsys):
    with torch.device("meta"):
        full = ReCamTransformer3DModel()
    config = {k: v for k, v in full.config.items() if k[0] != "_" and k != "camera_dim"}
    edit(wan / "transformer" / "config.json", **config)
    torch.save(checkpoint(full, dtype=torch.bfloat16), tmp_path / "step.ckpt")
    words = ["--recammaster", str(tmp_path / "step.ckpt"), "--wan", str(wan), "--out", str(tmp_path / "out")]
    size = (tmp_path / "step.ckpt").stat().st_size / 2**20
    before = resident_mib()
    assert tool.main([*words, "--dtype", dtype]) == 0
    growth = peak_mib() - before
    said = capsys.readouterr().out
    print(said, f"memory grew by {growth:.0f} MiB, the checkpoint has {size:.0f} MiB")
    assert "945 tensors, 1,490,420,800 parameters" in said and "120 camera tensors, 71,424,000 parameters" in said
    assert growth < 1.1 * size
    model = load_transformer(ReCamTransformer3DModel, tmp_path / "out" / "transformer", torch.bfloat16)
    source = model_files.read_checkpoint(tmp_path / "step.ckpt")
    for name in ("blocks.29.self_attn.q.weight", "blocks.0.projector.bias", "head.head.weight"):
        assert torch.equal(model.state_dict()[convert.RECAM.names(30)[name]], source[name])
