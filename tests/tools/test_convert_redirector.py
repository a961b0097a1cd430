"""Conversion of ReDirector's checkpoints to model folders and back."""

import json
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

from flow_grpo.models.files import model_files
from flow_grpo.models.networks.redirector_transformer import ReDirectorTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer
from tests.models.test_convert import redirector_files, same
from tests.models.test_redirector_transformer import inputs
from tests.refusals import refused
from tests.tiny_models import make_tiny_redirector_folder, tiny_redirector
from tools import convert_redirector as tool


@pytest.fixture
def given(tmp_path) -> dict[str, Path]:
    """Base, step and Wan as they are published, small."""
    base, step = redirector_files()
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"num_heads": 2, "model_type": "i2v"}))
    safetensors.torch.save_file(base, tmp_path / "base" / model_files.WEIGHTS_FILE)
    safetensors.torch.save_file(step, tmp_path / "step20000.safetensors")
    wan = Path(make_tiny_redirector_folder(tmp_path / "wan"))
    shutil.rmtree(wan / "transformer")  # whoever converts need not download its 14B
    return {"base": tmp_path / "base", "step": tmp_path / "step20000.safetensors", "wan": wan}


def run(given: dict[str, Path], out: Path, *more: str) -> int:
    words = [word for name, path in given.items() for word in (f"--{name}", str(path))]
    return tool.main([*words, "--out", str(out), *more])


@torch.no_grad()
@pytest.mark.parametrize("link", [False, True])
def test_the_converted_folder_is_base_and_step_together_and_converts_back(tmp_path, given, link, capsys):
    out = tmp_path / "out"
    assert run(given, out, *(["--link"] if link else [])) == 0
    expected = tiny_redirector(spatial=8)
    state = {name: value if ".attn1." in name else -value for name, value in expected.state_dict().items()}
    expected.load_state_dict(state)
    loaded = load_transformer(ReDirectorTransformer3DModel, out / "transformer")
    assert torch.equal(loaded(*inputs())[0], expected(*inputs())[0])
    assert all((out / part).is_symlink() == link and (out / part).is_dir() for part in tool.COMPONENTS)
    index = json.loads((out / "model_index.json").read_text())
    assert index["transformer"] == ["flow_grpo.models.networks.redirector_transformer", "ReDirectorTransformer3DModel"]
    said = capsys.readouterr().out
    for part in ("97 tensors", "4 phase tensors, 768 parameters", "93 tensors of the base, 24 of the step, 20 of"):
        assert part in said

    assert tool.main(["--back", str(out), "--out", str(tmp_path / "back.safetensors")]) == 0
    base, step = redirector_files()
    assert same(safetensors.torch.load_file(tmp_path / "back.safetensors"), base | step)
    assert "97 tensors" in (said := capsys.readouterr().out) and "4 phase tensors" in said


def test_what_does_not_fit_is_refused_in_one_line_and_nothing_is_written(tmp_path, given, capsys):
    out = tmp_path / "out"
    assert tool.main(["--step", str(given["step"]), "--out", str(out)]) == 2
    assert refused(capsys, "got --step: give --step, --base, --wan, or --back alone")
    assert run(given, out, "--back", str(tmp_path)) == 2 and refused(capsys, "or --back alone")
    assert run(given | {"base": given["wan"]}, out) == 2 and refused(capsys, "config.json")
    assert run(given | {"step": given["base"] / model_files.WEIGHTS_FILE}, out) == 2
    assert refused(capsys, "is not ReDirector's stepN.safetensors", "give the tensors of self-attention")
    assert tool.main(["--back", str(given["wan"] / "vae"), "--out", str(tmp_path / "b.safetensors")]) == 2
    assert refused(capsys, "holds AutoencoderKLWan, expected ReDirectorTransformer3DModel")
    shutil.rmtree(given["wan"] / "image_encoder")
    assert run(given, out) == 2 and refused(capsys, "no image_encoder folder")
    assert not out.exists()


def test_names_of_a_trained_folder_with_more_settings_are_refused(tmp_path, given, capsys):
    assert run(given, tmp_path / "out", "--link") == 0
    file = tmp_path / "out" / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"camera_dim": 12}))
    assert tool.main(["--back", str(tmp_path / "out"), "--out", str(tmp_path / "b.safetensors")]) == 2
    assert refused(capsys, "configuration has unknown 1 (camera_dim)")
