"""Adapters call the published packages as those document, and say what is missing; the packages here are stand-ins."""

import dataclasses
import importlib
import json
import math
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from flow_grpo.data.video_io import frame_rate
from flow_grpo.maths.poses import pose, rotation_matrix
from tests.room_films import INTRINSICS, conditions, film
from tools.serving import adapters
from tools.serving.adapters import ADAPTERS, checksum, pose_scores
from tools.serving.preprocessor import Preprocessor

FILM = film(["pan_left", "zoom_in"])
CONDITIONS = conditions(FILM)
CPU = torch.device("cpu")


@pytest.fixture
def weights(tmp_path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    for name in ("model_config.json", "config.json", "preprocessor_config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def stand_in(monkeypatch, name: str, **contents: object) -> None:
    package = types.ModuleType(name)
    package.__dict__.update(contents)
    monkeypatch.setitem(sys.modules, name, package)


@pytest.mark.parametrize("name", ADAPTERS)
def test_missing_weights_are_named_with_what_is_expected(name, tmp_path):
    for path in (None, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"^--weights is .*, must be (a|the) \w+ .*; nothing is downloaded here$"):
            ADAPTERS[name](path, None, CPU)
    said = r"without .*config\.json" if ADAPTERS[name].files else r"^--weights is .*, must be the file"
    with pytest.raises(ValueError, match=said):
        ADAPTERS[name](tmp_path, None, CPU)


@pytest.mark.parametrize("name", ["videoalign", "hpsv3", "mapanything"])
def test_a_missing_package_is_named_with_the_way_to_get_it(name, weights):
    place = weights if ADAPTERS[name].files else weights / "model.safetensors"
    with pytest.raises(ValueError, match=r"^package '\w+.*' cannot be imported .*: (git clone|pip install)[^\n]*$"):
        ADAPTERS[name](place, None, CPU)


def test_videoalign_gets_a_file_and_gives_two_scores(monkeypatch, weights):
    class Inference:
        def __init__(self, load_from_pretrained, load_from_pretrained_step=-1, device="x", dtype=None):
            assert (load_from_pretrained, device, dtype) == (str(weights), "cpu", torch.bfloat16)

        def reward(self, video_paths, prompts, fps=None, num_frames=None, max_pixels=None, use_norm=True):
            assert prompts == ["a room"] and use_norm and frame_rate(video_paths[0]) == 24
            return [{"VQ": 0.5, "MQ": -1.5, "TA": 9.0, "Overall": 8.0}]

    stand_in(monkeypatch, "inference", VideoVLMRewardInference=Inference)
    scorer = ADAPTERS["videoalign"](weights, None, CPU)
    said = scorer(FILM.videos, [dataclasses.replace(condition, fps=24.0) for condition in CONDITIONS])
    values = {name: result.values.tolist() for name, result in said.items()}
    assert values == {"videoalign_vq": [0.5, 0.5], "videoalign_mq": [-1.5, -1.5]}


def test_hpsv3_gets_files_of_frames_and_its_first_column_counts(monkeypatch, weights):
    sizes = []

    class Inferencer:
        def __init__(self, config_path=None, checkpoint_path=None, device="x", differentiable=False):
            assert checkpoint_path == str(weights / "model.safetensors") and device == "cpu"

        def reward(self, prompts, image_paths):
            for path in image_paths:
                with Image.open(path) as picture:
                    sizes.append(picture.size)
            return torch.tensor([[float(number), 100.0] for number in range(len(prompts))])

    stand_in(monkeypatch, "hpsv3", HPSv3RewardInferencer=Inferencer)
    scorer = ADAPTERS["hpsv3"](weights / "model.safetensors", None, CPU, frames=3)
    assert scorer(FILM.videos, CONDITIONS)["hpsv3"].values.tolist() == [1.0, 1.0]
    assert sizes == [(32, 24)] * 6
    assert scorer.model == "hpsv3:model.safetensors"


@pytest.mark.parametrize("name", ["clip", "pickscore"])
def test_a_clip_of_the_real_library_is_loaded_and_scores(name, tmp_path):
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    letters = list("abcdefghijklmnopqrstuvwxyz")
    words = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt"), model_max_length=16)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = small | {"vocab_size": len(words), "max_position_embeddings": 16}
    text |= {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
    vision = small | {"image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    folder = tmp_path / "model"
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(folder)
    image = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    CLIPProcessor(image, tokenizer).save_pretrained(folder)
    if not (folder / "preprocessor_config.json").exists():  # newer libraries write one file for both halves
        image.save_pretrained(folder)
    scorer = ADAPTERS[name](folder, None, CPU, frames=2)
    said = scorer(FILM.videos, CONDITIONS)[name]
    assert said.values.isfinite().all() and said.values[0] != said.values[1]
    assert torch.equal(scorer(FILM.videos[1:], CONDITIONS[1:])[name].values, said.values[1:])


# As the published folders say, by their model_type.
PREPROCESSORS = {
    "dinov2": {"size": {"shortest_edge": 256}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}}
    | {"resample": 3, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
    "dinov3_vit": {"size": {"height": 224, "width": 224}, "do_center_crop": None, "crop_size": None}
    | {"resample": 2, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
    "depth_anything": {"size": {"height": 518, "width": 518}, "keep_aspect_ratio": True, "ensure_multiple_of": 14}
    | {"resample": 3, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
    "siglip": {"size": {"height": 224, "width": 224}, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
}
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (240, 417, 3), dtype=np.uint8))


def preprocessor(folder: Path, said: dict) -> Preprocessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(said))
    return Preprocessor(folder / "preprocessor_config.json")


@pytest.mark.parametrize(("kind", "name"), [("dinov2", "Bit"), ("siglip", "Siglip"), ("depth_anything", "DPT")])
def test_pictures_are_prepared_as_the_processor_of_the_library_does(kind, name, tmp_path):
    module = importlib.import_module(f"transformers.models.{name.lower()}.image_processing_pil_{name.lower()}")
    said = PREPROCESSORS[kind]
    theirs = getattr(module, f"{name}ImageProcessorPil")(**said)(PICTURE, return_tensors="pt")["pixel_values"][0]
    ours = preprocessor(tmp_path, said)(PICTURE)
    assert ours.shape == theirs.shape == ((3, 294, 518) if name == "DPT" else (3, 224, 224)) and torch.allclose(
        ours, theirs, atol=1e-6
    )


def test_dinov3_pictures_are_within_a_level_of_8_bits_of_those_of_its_processor(tmp_path):
    pixels = torch.from_numpy(np.array(PICTURE)).permute(2, 0, 1)[None] / 255
    resized = functional.interpolate(pixels, (224, 224), mode="bilinear", antialias=True)[0]
    mean, std = (torch.tensor(PREPROCESSORS["dinov3_vit"][f"image_{part}"])[:, None, None] for part in ("mean", "std"))
    ours = preprocessor(tmp_path, PREPROCESSORS["dinov3_vit"])(PICTURE)
    assert (ours * std + mean - resized).abs().max() < 1.1 / 255


@pytest.mark.parametrize("lacking", ["size", "resample", "image_std"])
def test_a_preprocessor_that_says_too_little_is_refused(lacking, tmp_path):
    said = {name: value for name, value in PREPROCESSORS["siglip"].items() if name != lacking}
    with pytest.raises(ValueError, match=rf"cannot be followed .*{lacking}.*must say size, resample.*fetch that again"):
        preprocessor(tmp_path, said)


def random_model(kind: str, folder: Path) -> Path:
    """Write a model of a real architecture with random weights, and what lies beside it, as the published ones do."""
    import tokenizers
    import transformers

    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model(kind, **small)
    if kind == "siglip":
        text = small | {"vocab_size": 8, "max_position_embeddings": 6, "projection_size": 32}
        config = transformers.SiglipConfig(
            text_config=text, vision_config=small | {"image_size": 224, "patch_size": 16}
        )
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "a": 1, "room": 2, "river": 3}, "?"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?", unk_token="?").save_pretrained(
            folder
        )
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config)
    for parameter in model.parameters():  # else the class token hardly sees the picture
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    preprocessor(folder, PREPROCESSORS[kind.replace("_with_registers", "")])
    return folder


@pytest.mark.parametrize("kind", ["dinov2", "dinov2_with_registers", "dinov3_vit"])
def test_a_dino_compares_each_frame_with_the_source_at_its_time(kind, tmp_path):
    scorer = ADAPTERS["dino"](random_model(kind, tmp_path), None, CPU, frames=3)
    assert (scorer.needs, scorer.wants, scorer.scores) == (("source",), {"frames": 3}, ("dino_content",))
    moving = dataclasses.replace(CONDITIONS[0], source_video=FILM.videos[0])
    videos = torch.stack([FILM.videos[0], FILM.videos[0].flip(1), FILM.videos[1], torch.rand(FILM.videos[0].shape)])
    same, reversed_, other, noise = scorer(videos, [moving] * 4)["dino_content"].values.tolist()
    assert same == pytest.approx(1, abs=1e-5) and max(reversed_, other, noise) < 0.9999
    tokens = [scorer._model(pixel_values=scorer.pixels(video)).last_hidden_state[:, 0] for video in videos[[0, 1]]]
    assert reversed_ == pytest.approx(functional.cosine_similarity(*tokens).mean().item(), abs=1e-5)


def test_a_siglip_compares_frames_with_the_prompt_padded_as_in_its_training(tmp_path):
    scorer = ADAPTERS["siglip"](random_model("siglip", tmp_path), None, CPU, frames=2)
    assert scorer.needs == ("prompt",)
    asked = [dataclasses.replace(CONDITIONS[0], prompt=prompt) for prompt in ("A room", "river", "a room " * 9)]
    room, river, long = scorer(FILM.videos[[0, 0, 0]], asked)["siglip_text"].values.tolist()
    assert len({room, river, long}) == 3
    model, ids = scorer._model, torch.tensor([[1, 2, 0, 0, 0, 0]])
    pictures = model.vision_model(scorer.pixels(FILM.videos[0])).pooler_output
    cosines = functional.cosine_similarity(pictures, model.text_model(ids).pooler_output)
    assert room == pytest.approx((cosines * model.logit_scale.exp() + model.logit_bias).mean().item(), abs=1e-5)


@pytest.mark.parametrize(("name", "kind"), [("dino", "siglip"), ("siglip", "siglip2")])
def test_a_folder_of_another_model_is_refused_by_its_kind(name, kind, weights):
    (weights / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(ValueError, match=rf"--weights holds a '{kind}' model, must be a folder of (facebook|google)/"):
        ADAPTERS[name](weights, None, CPU)


def test_a_siglip_without_a_tokenizer_is_refused(tmp_path):
    folder = random_model("siglip", tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"^\S+ has no tokenizer that can be read: [^\n]+$"):
        ADAPTERS["siglip"](folder, None, CPU)


def test_map_anything_is_told_k_and_never_the_poses(monkeypatch, weights):
    seen = []
    path = FILM.commanded[0]

    class MapAnything:
        @classmethod
        def from_pretrained(cls, place, local_files_only):
            assert place == str(weights) and local_files_only
            return cls()

        def to(self, device):
            return self

        eval = to

        def infer(self, views):
            seen.extend(views)
            elsewhere = pose(rotation_matrix(torch.tensor([0.1, 0.2, 0.3])), torch.tensor([1.0, 2.0, 3.0])).double()
            return [{"camera_poses": (elsewhere @ one)[None].float()} for one in path]

    MapAnything.eval = lambda self: self
    stand_in(monkeypatch, "mapanything")
    stand_in(monkeypatch, "mapanything.models", MapAnything=MapAnything)
    stand_in(monkeypatch, "mapanything.utils")
    stand_in(monkeypatch, "mapanything.utils.image", preprocess_inputs=list)
    scorer = ADAPTERS["mapanything"](weights, None, CPU)
    said = scorer(FILM.videos[:1], CONDITIONS[:1])
    assert said["mapanything_rot"].values.item() == pytest.approx(0, abs=1e-4)
    assert said["mapanything_trans"].values.item() == pytest.approx(0, abs=1e-4)
    assert len(seen) == 5 and all(set(view) == {"img", "intrinsics"} for view in seen)
    fx, fy, cx, cy = INTRINSICS.tolist()
    assert seen[0]["intrinsics"].tolist() == [[fx, 0, cx], [0, fy, cy], [0, 0, 1]]
    assert seen[0]["img"].shape == (24, 32, 3) and seen[0]["img"].dtype == torch.uint8


def test_pose_scores_have_their_values():
    still = torch.eye(4, dtype=torch.float64).expand(3, 4, 4)
    turned = torch.stack([torch.eye(4, dtype=torch.float64)] * 3)
    turned[2, :3, :3] = rotation_matrix(torch.tensor([0.0, math.radians(9.0), 0.0], dtype=torch.float64))
    turned[1, 0, 3] = 0.3
    turned[2, 0, 3] = 5.0
    # Weights 1, 2, 3 of 6; the path's length counts as 0.3 m, so the cap is 0.6 m.
    assert pose_scores(still, still) == {"mapanything_rot": 0.0, "mapanything_trans": 0.0}
    said = pose_scores(still, turned)
    assert said["mapanything_rot"] == pytest.approx(-0.5 * 9 / 45)
    assert said["mapanything_trans"] == pytest.approx(-(2 / 6 * 0.5 + 3 / 6 * 1.0))


def test_a_checksum_follows_content_and_names(weights):
    before = checksum(weights)
    assert checksum(weights) == before and len(before) == 16
    (weights / "config.json").write_text("{ }")
    changed = checksum(weights)
    (weights / "config.json").rename(weights / "other.json")
    assert len({before, changed, checksum(weights), checksum(weights / "other.json")}) == 4


def test_nothing_is_downloaded_once_that_is_refused(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "0")
    hub = importlib.import_module("torch.hub")
    for name in ("download_url_to_file", "urlopen"):
        monkeypatch.setattr(hub, name, getattr(hub, name))
    adapters.refuse_downloads()
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["TRANSFORMERS_OFFLINE"] == "1"
    with pytest.raises(ValueError, match=r"wants to download http://127\.0\.0\.1/weights\.pth"):
        torch.hub.load_state_dict_from_url("http://127.0.0.1/weights.pth", model_dir="/nonexistent/here")
