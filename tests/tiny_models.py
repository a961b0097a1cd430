"""Tiny random networks for every component: transformer, text encoder, codec that compresses 4x in space and time."""

import json
import shutil
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPVisionConfig, CLIPVisionModel, PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from flow_grpo.models.encoders.codec import Codec
from flow_grpo.models.encoders.texts import TextEncoder
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.redirector_transformer import ReDirectorTransformer3DModel, is_phase_weight
from flow_grpo.models.recam import RECAM
from flow_grpo.models.wan_policy import Networks, WanPolicy
from flow_grpo.records import Guidance
from flow_grpo.runtime.tensor_store import TensorStore
from flow_grpo.settings.schema import ModelConfig

WORDS = ["<pad>", "</s>", "<unk>", "a", "room", "with", "the", "camera", "pan", "left", "right", "zoom", "slowly"]
CHANNELS = 4
CPU = torch.device("cpu")


def tiny_transformer(
    seed: int = 0, *, patch_size: tuple[int, int, int] = (1, 2, 2), neutral: bool = False
) -> ReCamTransformer3DModel:
    """Return 2 blocks of width 24; unless `neutral`, the camera modules are not zero and identity."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ReCamTransformer3DModel(
            patch_size=patch_size,
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            rope_max_seq_len=32,
        )
        if not neutral:
            for block in model.blocks:
                torch.nn.init.normal_(block.cam_encoder.weight, std=0.3)
                torch.nn.init.normal_(block.cam_encoder.bias, std=0.3)
                block.projector.weight.data += 0.1 * torch.randn_like(block.projector.weight)
    return model.eval()


def tiny_redirector(seed: int = 0, *, neutral: bool = False, spatial: int = 4) -> ReDirectorTransformer3DModel:
    """Return 2 blocks of width 24; unless `neutral`, control adapter and camera phases are not zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ReDirectorTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=2 * CHANNELS,
            out_channels=CHANNELS,
            text_dim=16,
            freq_dim=16,
            ffn_dim=32,
            num_layers=2,
            image_dim=20,
            rope_max_seq_len=32,
            spatial_compression=spatial,
        )
        if not neutral:
            for name, weight in model.named_parameters():
                if "control_adapter.conv" in name or is_phase_weight(name):
                    torch.nn.init.normal_(weight, std=0.1 if name == "control_adapter.conv.weight" else 0.3)
    return model.eval()


def tiny_vae(seed: int = 0) -> AutoencoderKLWan:
    """Return a codec with 4 channels that compresses 4x in space and time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKLWan(
            base_dim=8,
            z_dim=CHANNELS,
            dim_mult=[1, 2, 4],
            num_res_blocks=1,
            temperal_downsample=[True, True],
            latents_mean=[0.1, -0.2, 0.3, -0.4],
            latents_std=[0.9, 1.1, 0.8, 1.2],
            scale_factor_temporal=4,
            scale_factor_spatial=4,
        )
    return vae.eval()


def tiny_text_encoder(seed: int = 0) -> UMT5EncoderModel:
    """Return one layer of width 16."""
    config = UMT5Config(vocab_size=len(WORDS), d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, dropout_rate=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return UMT5EncoderModel(config).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words that ends every prompt with </s>."""
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=64
    )


def tiny_image_encoder(seed: int = 0) -> CLIPVisionModel:
    """Return three layers of width 20 on pictures of 2x2 patches: 5 image tokens."""
    config = CLIPVisionConfig(
        hidden_size=20,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
        hidden_act="gelu",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return CLIPVisionModel(config).eval()


def codec_of(vae: AutoencoderKLWan) -> Codec:
    """Return a codec whose halves are both this network."""
    return Codec(vae.config, lambda _: vae, "", tiny_settings(), CPU)


def tiny_networks(seed: int = 0, *, patch_size: tuple[int, int, int] = (1, 2, 2)) -> Networks:
    """Return the networks in memory."""
    return Networks(
        model=RECAM,
        transformer=tiny_transformer(seed, patch_size=patch_size),
        codec=codec_of(tiny_vae(seed)),
        texts=TextEncoder(lambda: tiny_text_encoder(seed), tiny_tokenizer, "", width=16, device=CPU),
    )


def tiny_settings(path: str | Path = "", **changes: object) -> ModelConfig:
    return ModelConfig(**{"path": str(path), "dtype": "fp32", "max_prompt_tokens": 6, "vae_slicing": False, **changes})


def tiny_policy(
    networks: Networks,
    *,
    guidance_scale: float = 1.0,
    negative_prompt: str = "",
    store: TensorStore | None = None,
    **changes: object,
) -> WanPolicy:
    return WanPolicy(networks, tiny_settings(**changes), Guidance(guidance_scale, negative_prompt), CPU, store)


def make_tiny_folder(path: str | Path, seed: int = 0) -> str:
    """Write a complete folder in diffusers layout and return its path."""
    folder = Path(path)
    tiny_transformer(seed).save_pretrained(str(folder / "transformer"))
    tiny_vae(seed).save_pretrained(str(folder / "vae"))
    tiny_text_encoder(seed).save_pretrained(str(folder / "text_encoder"))
    tiny_tokenizer().save_pretrained(str(folder / "tokenizer"))
    FlowMatchEulerDiscreteScheduler(shift=5.0).save_pretrained(str(folder / "scheduler"))
    index = {
        "_class_name": "WanPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": ["flow_grpo.models.networks.recam_transformer", "ReCamTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }
    (folder / "model_index.json").write_text(json.dumps(index, indent=2))
    return str(folder)


def make_tiny_redirector_folder(path: str | Path, seed: int = 0) -> str:
    """Write a complete ReDirector folder in diffusers layout and return its path."""
    folder = Path(make_tiny_folder(path, seed))
    shutil.rmtree(folder / "transformer")
    tiny_redirector(seed).save_pretrained(str(folder / "transformer"))
    add_tiny_image_encoder(folder, seed)
    return str(folder)


def add_tiny_image_encoder(folder: Path, seed: int = 0) -> None:
    """Write image_encoder/ and image_processor/."""
    tiny_image_encoder(seed).save_pretrained(str(folder / "image_encoder"))
    (folder / "image_processor").mkdir()
    settings = {"image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
    (folder / "image_processor" / "preprocessor_config.json").write_text(json.dumps(settings))
