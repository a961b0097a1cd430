"""Published reward models for `tools/reward_server.py`, each in the environment that its authors pin.

Written from their documentation and not run with their weights. Packages are imported when a server starts and nothing
is downloaded: an error names what is missing and how to get it. Licences: docs/remote_rewards.md.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

from flow_grpo.maths.poses import relative
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.camera.pose import compare, rotation_value, translation_value
from flow_grpo.rewards.frames import frame_numbers
from flow_grpo.rewards.remote.protocol import one_line, to_pixels
from flow_grpo.rewards.results import all_valid
from flow_grpo.runtime.video_file import write_video
from tools.serving.names import PUBLISHED
from tools.serving.preprocessor import Preprocessor
from tools.serving.scoring_service import checksum


class Adapter:
    """A published model as a `Scorer`; subclasses implement `load` and `score`.

    Raises:
        ValueError: the weights, or the package, of which `code` may be a clone, are missing.
    """

    module = "transformers"  # to import
    install = "pip install transformers"  # how to get it
    weights: str  # what `--weights` must name
    files: tuple[str, ...] = ()  # that this folder must hold; none if it is a single file
    scores: tuple[str, ...]
    needs: tuple[str, ...] = ()
    pictures = False  # it scores `frames` pictures of a video, and so asks for no others

    def __init__(self, weights: Path | None, code: Path | None, device: torch.device, frames: int = 5) -> None:
        missing = [name for name in self.files if weights is not None and not (weights / name).is_file()]
        if weights is None or missing or not (weights.is_dir() if self.files else weights.is_file()):
            got = f"{weights}{' without ' + ', '.join(missing) if missing else ''}"
            raise ValueError(f"--weights is {got}, must be {self.weights}; nothing is downloaded here")
        if code is not None:
            sys.path.insert(0, str(code.resolve()))
        try:
            package = importlib.import_module(self.module)
        except ImportError as error:
            raise ValueError(f"package {self.module!r} cannot be imported ({error}): {self.install}") from None
        self.device, self._frames, self._weights = device, frames, weights.resolve()
        self.wants: dict[str, object] = {"frames": frames} if self.pictures else {}
        self.model = f"{self.scores[0].partition('_')[0]}:{self._weights.name}"
        self.version = checksum(self._weights)
        self.load(package)

    def frames(self, video: Tensor) -> list[Image.Image]:
        """Return the frames that are scored of a video (3, T, h, w): evenly spread, first and last included."""
        chosen = frame_numbers(video.shape[1], self._frames)
        return [Image.fromarray(picture.numpy()) for picture in to_pixels(video[:, chosen])]

    def load(self, package: ModuleType) -> None:
        raise NotImplementedError

    @torch.no_grad()
    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> dict[str, RewardResult]:
        """Return score name -> result of B rows for fp32 videos (B, 3, T, h, w) in [0, 1]."""
        rows = [self.score(video, condition) for video, condition in zip(videos, conditions, strict=True)]
        return {name: all_valid(conditions, torch.tensor([row[name] for row in rows]), {}) for name in self.scores}

    def score(self, video: Tensor, condition: Condition) -> Mapping[str, float]:
        """Return the scores of one video (3, T, h, w): more is better."""
        raise NotImplementedError


class VideoAlign(Adapter):
    """VideoAlign (arXiv 2501.13918): visual and motion quality, not text alignment, as the source sets the content."""

    module = "inference"
    install = (
        "git clone https://github.com/KwaiVGI/VideoAlign, make the environment of its environment.yaml, pass --code"
    )
    weights = (
        "the folder of KwaiVGI/VideoReward (model_config.json); Qwen/Qwen2-VL-2B-Instruct must be in the local cache"
    )
    files = ("model_config.json",)
    scores = ("videoalign_vq", "videoalign_mq")

    def load(self, package: ModuleType) -> None:
        weights, device = str(self._weights), str(self.device)
        self._model = package.VideoVLMRewardInference(weights, device=device, dtype=torch.bfloat16)

    def score(self, video: Tensor, condition: Condition) -> Mapping[str, float]:
        """Score the video as a file, the model's input format."""
        with tempfile.TemporaryDirectory(prefix="videoalign_") as folder:
            path = Path(folder) / "video.mp4"
            write_video(path, video, fps=condition.fps)
            found = self._model.reward([str(path)], [condition.prompt], use_norm=True)[0]
        return {"videoalign_vq": float(found["VQ"]), "videoalign_mq": float(found["MQ"])}


class Hpsv3(Adapter):
    """Human preference (2508.03789), the mean over some frames."""

    module = "hpsv3"
    install = "pip install hpsv3, in an environment of its own"
    weights = "the file HPSv3.safetensors of MizzenAI/HPSv3; Qwen/Qwen2-VL-7B-Instruct must be in the local cache"
    scores = ("hpsv3",)
    needs = ("prompt",)
    pictures = True

    def load(self, package: ModuleType) -> None:
        weights, device = str(self._weights), str(self.device)
        self._model = package.HPSv3RewardInferencer(checkpoint_path=weights, device=device)

    def score(self, video: Tensor, condition: Condition) -> Mapping[str, float]:
        """Score frames as files; the model returns a mean and a spread, of which the mean is used."""
        with tempfile.TemporaryDirectory(prefix="frames_") as folder:
            paths = []
            for number, picture in enumerate(self.frames(video)):
                paths.append(f"{folder}/{number}.png")
                picture.save(paths[-1])
            found = self._model.reward(prompts=[condition.prompt] * len(paths), image_paths=paths)
        return {"hpsv3": float(torch.as_tensor(found).float()[:, 0].mean())}


class ClipScore(Adapter):
    """Agreement with the prompt: cosine times the model's scale, the mean over some frames."""

    weights = "a folder of openai/clip-vit-large-patch14 with weights, tokenizer and preprocessor_config.json"
    files = ("config.json", "preprocessor_config.json")
    scores: tuple[str, ...] = ("clip",)
    needs = ("prompt",)
    pictures = True

    def load(self, package: ModuleType) -> None:
        processor = package.AutoProcessor.from_pretrained(str(self._weights), local_files_only=True)
        model = package.AutoModel.from_pretrained(str(self._weights), local_files_only=True)
        self._processor, self._model = processor, model.eval().to(self.device)

    def score(self, video: Tensor, condition: Condition) -> Mapping[str, float]:
        texts = {"text": [condition.prompt], "padding": True, "truncation": True}
        inputs = self._processor(images=self.frames(video), return_tensors="pt", **texts).to(self.device)
        return {self.scores[0]: float(self._model(**inputs).logits_per_image.float().mean())}


class PickScore(ClipScore):
    """The same score of a CLIP trained on human preferences."""

    weights = "a folder of yuvalkirstain/PickScore_v1 with weights, tokenizer and preprocessor_config.json"
    scores = ("pickscore",)


class MapAnythingPoses(Adapter):
    """Distance of the estimated camera from the commanded one (2509.13414), in degrees and metres.

    Both paths are relative to their own first frames, since the model sees the generated video alone. Scores as of
    `pose_rot` and `pose_trans`. The model gets the intrinsics if they are known, never the commanded poses.
    """

    module = "mapanything.models"
    install = "git clone https://github.com/facebookresearch/map-anything && pip install -e map-anything"
    weights = "a folder of facebook/map-anything-apache (config.json and model.safetensors)"
    files = ("config.json", "model.safetensors")
    scores = ("mapanything_rot", "mapanything_trans")
    needs = ("camera",)

    def load(self, package: ModuleType) -> None:
        model = package.MapAnything.from_pretrained(str(self._weights), local_files_only=True)
        self._model = model.to(self.device).eval()
        self._preprocess = importlib.import_module("mapanything.utils.image").preprocess_inputs

    def score(self, video: Tensor, condition: Condition) -> Mapping[str, float]:
        known: dict[str, Tensor] = {}
        if condition.intrinsics is not None:
            fx, fy, cx, cy = condition.intrinsics.tolist()
            known = {"intrinsics": torch.tensor([[fx, 0, cx], [0, fy, cy], [0, 0, 1]])}
        views: list[dict[str, Any]] = [{"img": frame, **known} for frame in to_pixels(video)]
        found = self._model.infer(self._preprocess(views))
        poses = torch.cat([view["camera_poses"].cpu() for view in found]).double()
        return pose_scores(condition.target_poses, poses)


def pose_scores(commanded: Tensor, estimated: Tensor) -> dict[str, float]:
    """Return both scores of `MapAnythingPoses` for paths (T, 4, 4)."""
    commanded, estimated = relative(commanded[0], commanded), relative(estimated[0], estimated)
    errors = compare(commanded, estimated, commanded, torch.ones(len(commanded), dtype=torch.bool))
    return {"mapanything_rot": rotation_value(errors), "mapanything_trans": translation_value(errors)}


class LocalModel(Adapter):
    """A model of `transformers` in a local folder, in fp32; `Preprocessor` makes its input."""

    files: tuple[str, ...] = ("config.json", "preprocessor_config.json")
    kinds: tuple[str, ...]  # `model_type` of its config.json
    pictures = True

    def load(self, package: ModuleType) -> None:
        kind = json.loads((self._weights / "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind not in self.kinds:
            raise ValueError(f"--weights holds a {kind!r} model, must be {self.weights}")
        self._preprocess = Preprocessor(self._weights / "preprocessor_config.json")
        model = package.AutoModel.from_pretrained(self._weights, local_files_only=True, dtype=torch.float32)
        self._model = model.eval().to(self.device)

    def pixels(self, video: Tensor) -> Tensor:
        """Return the frames that are scored of a video (3, T, h, w) as the model takes them, (n, 3, H, W)."""
        return torch.stack([self._preprocess(picture) for picture in self.frames(video)])


class DinoContent(LocalModel):
    """Content agreement: cosine of the class tokens of a frame and of the source's frame of that time, mean over some.

    As ReCamMaster's CLIP-V (2503.11647), by DINOv2 (2304.07193) or DINOv3 (2508.10104).
    """

    weights = "a folder of facebook/dinov2-base or dinov3-vitb16-pretrain-lvd1689m, or another size of these"
    kinds = ("dinov2", "dinov2_with_registers", "dinov3_vit")
    scores = ("dino_content",)
    needs = ("source",)

    def score(self, video: Tensor, condition: Condition) -> Mapping[str, float]:
        pixels = torch.cat([self.pixels(video), self.pixels(condition.need_source())])
        tokens = self._model(pixel_values=pixels.to(self.device)).last_hidden_state[:, 0]
        return {"dino_content": float(functional.cosine_similarity(*tokens.chunk(2)).mean())}


class SiglipText(LocalModel):
    """Agreement with the prompt: the logit of SigLIP (2303.15343), cosine times scale plus bias, mean over some frames.

    SigLIP 2 (2502.14786) in one resolution is of the same classes; NaFlex is not.
    """

    weights = "a folder of google/siglip-so400m-patch14-384 or siglip2-so400m-patch14-384 with weights and tokenizer"
    kinds = ("siglip",)
    scores = ("siglip_text",)
    needs = ("prompt",)

    def load(self, package: ModuleType) -> None:
        super().load(package)
        try:
            self._tokenizer = package.AutoTokenizer.from_pretrained(self._weights, local_files_only=True)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{self._weights} has no tokenizer that can be read: {one_line(error)}") from error

    def score(self, video: Tensor, condition: Condition) -> Mapping[str, float]:
        length = self._model.config.text_config.max_position_embeddings
        prompt = condition.prompt.lower()  # as in its training
        text = self._tokenizer([prompt], padding="max_length", max_length=length, truncation=True)
        pixels, ids = self.pixels(video), torch.tensor(text["input_ids"])
        logits = self._model(pixel_values=pixels.to(self.device), input_ids=ids.to(self.device)).logits_per_image
        return {"siglip_text": float(logits.mean())}


_KINDS = (VideoAlign, Hpsv3, ClipScore, PickScore, MapAnythingPoses, DinoContent, SiglipText)
ADAPTERS: Mapping[str, type[Adapter]] = dict(zip(PUBLISHED, _KINDS, strict=True))


def refuse_downloads() -> None:
    """Make libraries of this process raise instead of downloading; call it before importing them."""

    def refuse(url: object, *_: object, **__: object) -> None:
        raise ValueError(f"a model wants to download {getattr(url, 'full_url', url)}: fetch it once, by hand")

    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    for name in ("download_url_to_file", "urlopen"):  # torch.hub knows no such variable
        setattr(torch.hub, name, refuse)
