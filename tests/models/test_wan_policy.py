"""The ReCam policy: encoding, timesteps, guidance, the reference policy, loading, compute settings."""

import dataclasses
import itertools
import shutil
import types
from unittest import mock
from unittest.mock import Mock

import pytest
import torch
from diffusers.models.attention_dispatch import _AttentionBackendRegistry
from diffusers.models.transformers import transformer_wan
from diffusers.pipelines.wan.pipeline_wan import WanPipeline

from flow_grpo.algorithm.rollout.denoise import initial_noise, rollout
from flow_grpo.maths.schedule import flow_sigmas
from flow_grpo.models.adapters import apply_training_mode
from flow_grpo.models.recam import RECAM
from flow_grpo.models.wan_policy import WanPolicy, apply_compute_settings, load_networks
from flow_grpo.records import Condition, Conditioning, Guidance
from flow_grpo.runtime.tensor_store import TensorStore
from flow_grpo.settings.sampling import ODE, Sampling
from tests import toy
from tests.models.test_adapters import LORA, move
from tests.tiny_models import (
    CPU,
    make_tiny_folder,
    tiny_networks,
    tiny_policy,
    tiny_settings,
    tiny_text_encoder,
    tiny_tokenizer,
    tiny_transformer,
    tiny_vae,
)


def condition(index: int = 0, *, slot: int = 0, prompt: str = "a room", size=(5, 16, 24)) -> Condition:
    draw = torch.Generator().manual_seed(index)
    poses = torch.eye(4, dtype=torch.float64).repeat(size[0], 1, 1)
    poses[:, 0, 3] = torch.linspace(0, index + 1, size[0], dtype=torch.float64)
    video = torch.rand((3, *size), generator=draw)
    made = toy.condition(index, index, slot)
    return dataclasses.replace(made, prompt=prompt, source_video=video, target_poses=poses, target_video=None)


def policy(*, mode: str | None = None, **settings) -> WanPolicy:
    parts = tiny_networks()
    if mode:
        apply_training_mode(parts.transformer, dataclasses.replace(LORA, trained=mode))
    return tiny_policy(parts, **settings)


def noisy(made: WanPolicy, conditions) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(7)
    rows = len(conditions)
    return torch.randn((rows, *made.latent_shape(conditions)), generator=draw), torch.linspace(0.2, 0.9, rows)


@pytest.mark.parametrize(("store", "times"), [(None, 1), (TensorStore(limit=0), 2)])
def test_a_call_encodes_each_video_and_prompt_once_and_a_later_one_again_what_was_not_kept(store, times):
    made = policy(guidance_scale=2.0, store=store)
    made.codec.encode, made.texts.embed = Mock(wraps=made.codec.encode), Mock(wraps=made.texts.embed)
    group = [condition(0), condition(1, prompt="pan left")]
    named = [dataclasses.replace(condition(index), source_id=f"video {index}") for index in (2, 3)]
    for _ in range(2):
        rows = made.encode([*group, *named, *group, *named]).inputs["source_latents"]
    assert made.codec.encode.call_count == 4 * times
    assert made.texts.embed.call_count == 3 * times  # the negative prompt, too
    assert torch.equal(rows[:4], rows[4:]) and len({float(row.sum()) for row in rows}) == 4


def test_rows_keep_the_order_of_the_conditions_and_cameras_are_the_poses_at_every_latent_frame():
    given = ((2, "pan right"), (0, "a room"), (2, "pan right"))
    conditions = [condition(index, prompt=prompt) for index, prompt in given]
    together = policy().encode(conditions)
    for row, one in enumerate(conditions):
        alone = policy().encode([one])
        assert torch.equal(together.inputs["source_latents"][row : row + 1], alone.inputs["source_latents"])
        assert torch.equal(together.prompt_embeds[row : row + 1], alone.prompt_embeds)
        assert torch.equal(together.inputs["target_cameras"][row : row + 1], alone.inputs["target_cameras"])
    cameras = together.inputs["target_cameras"]
    assert cameras.shape == (3, 2, 12) and cameras.dtype == torch.float32
    assert cameras[0, :, 3].tolist() == [0.0, 3.0]  # x of frames 0 and 4


def test_source_latents_are_the_codecs_mean_normalised_per_channel_and_decode_inverts_that():
    made = policy()
    encoded = made.encode([condition(0)])
    assert encoded.inputs["source_latents"].shape == (1, *made.latent_shape([condition(0)])) == (1, 4, 2, 4, 6)
    codec = tiny_vae()
    with torch.no_grad():
        raw = codec.encode(2 * condition(0).source_video[None] - 1).latent_dist.mode()
        decoded = codec.decode(raw).sample
    for channel, (mean, std) in enumerate(zip(codec.config.latents_mean, codec.config.latents_std, strict=True)):
        torch.testing.assert_close(encoded.inputs["source_latents"][:, channel], (raw[:, channel] - mean) / std)
    video = made.decode(encoded.inputs["source_latents"])
    assert video.shape == (1, 3, 5, 16, 24)
    assert video.min() >= 0 and video.max() <= 1
    torch.testing.assert_close(video, (decoded / 2 + 0.5).clamp(0, 1), rtol=1e-4, atol=1e-5)


def test_prompts_are_embedded_as_wans_pipeline_embeds_them():
    made = policy(guidance_scale=2.0, negative_prompt="slowly")
    pipeline = WanPipeline(tiny_tokenizer(), tiny_text_encoder(), tiny_vae(), scheduler=None)
    encoded = made.encode([condition(prompt="  a  room pan ")])
    with torch.no_grad():
        expected = pipeline._get_t5_prompt_embeds(["a room pan", "slowly"], max_sequence_length=6, device=CPU)
    torch.testing.assert_close(encoded.prompt_embeds, expected[:1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(encoded.negative_prompt_embeds, expected[1:], rtol=1e-5, atol=1e-6)
    assert encoded.prompt_embeds[0, 3].abs().max() > 0  # three words and the end token
    assert encoded.prompt_embeds[0, 4:].abs().max() == 0


def test_the_transformer_is_given_target_and_source_latents_and_1000_sigma_once_without_guidance():
    made = policy()
    conditions = [condition(0), condition(1)]
    encoded = made.encode(conditions)
    latents, sigma = noisy(made, conditions)
    network = made.module
    network.forward = Mock(wraps=network.forward)
    with torch.no_grad():
        velocity = made.velocity(latents, sigma, encoded)
    assert encoded.negative_prompt_embeds is None and network.forward.call_count == 1
    joined, timestep, prompts, cameras = network.forward.call_args.args
    assert torch.equal(joined[:, :, :2], latents) and torch.equal(joined[:, :, 2:], encoded.inputs["source_latents"])
    assert torch.equal(timestep, 1000 * sigma) and timestep.dtype == torch.float32
    assert prompts is encoded.prompt_embeds and cameras is encoded.inputs["target_cameras"]
    assert velocity.shape == latents.shape and velocity.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(velocity, network(joined, timestep, prompts, cameras)[0][:, :, :2])


@torch.no_grad()
def test_guidance_moves_away_from_the_negative_prompt():
    conditions = [condition(0), condition(1, prompt="zoom in")]
    made = policy(guidance_scale=3.0, negative_prompt="slowly")
    encoded = made.encode(conditions)
    latents, sigma = noisy(made, conditions)
    plain = dataclasses.replace(encoded, guidance_scale=1.0)
    towards = made.velocity(latents, sigma, plain)
    away = made.velocity(latents, sigma, dataclasses.replace(plain, prompt_embeds=encoded.negative_prompt_embeds))
    expected = away + 3.0 * (towards - away)
    torch.testing.assert_close(made.velocity(latents, sigma, encoded), expected, rtol=1e-4, atol=1e-5)
    assert (expected - towards).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize(("scale", "prompt"), [(3.0, "slowly"), (1.0, "")])
def test_rows_encoded_with_a_guidance_of_their_own_are_those_of_a_policy_with_that_guidance(scale, prompt):
    conditions = [condition(0), condition(1, prompt="zoom in")]
    training, evaluating = policy(guidance_scale=2.0), policy(guidance_scale=scale, negative_prompt=prompt)
    given, expected = training.encode(conditions, Guidance(scale, prompt)), evaluating.encode(conditions)
    arguments = noisy(training, conditions)
    assert torch.equal(training.velocity(*arguments, given), evaluating.velocity(*arguments, expected))
    own = training.velocity(*arguments, training.encode(conditions))
    assert not torch.equal(training.velocity(*arguments, given), own)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_velocity_is_bit_equal_with_and_without_gradient(guidance):
    made = policy(mode="lora", guidance_scale=guidance)
    conditions = [condition(0), condition(1)]
    encoded, arguments = made.encode(conditions), noisy(made, conditions)
    with torch.no_grad():
        rollout = made.velocity(*arguments, encoded)
    update = made.velocity(*arguments, encoded)
    assert update.requires_grad and not rollout.requires_grad
    assert torch.equal(rollout, update)


class Wrapped(torch.nn.parallel.DistributedDataParallel):
    """A DDP wrapper without a process group that counts its forwards."""

    def __init__(self, module) -> None:
        torch.nn.Module.__init__(self)
        self.module = module
        self.calls = 0

    def forward(self, *arguments):
        self.calls += 1
        return self.module(*arguments)


def test_the_wrapper_is_called_for_gradients_only():
    made = policy(mode="camera")
    made.module = Wrapped(made.module)
    encoded, arguments = made.encode([condition(0)]), noisy(made, [condition(0)])
    with torch.no_grad():
        made.velocity(*arguments, encoded)
    assert made.module.calls == 0
    made.velocity(*arguments, encoded)
    assert made.module.calls == 1


@pytest.mark.parametrize("mode", ["lora", "camera", "attention", "full"])
def test_the_reference_stays_the_policy_before_training(mode):
    made = policy(mode=mode)
    if mode != "lora":  # whose adapters are switched off
        with pytest.raises(ValueError, match="keep_reference"), made.reference():
            pass
        made.keep_reference()
    encoded, arguments = made.encode([condition(0)]), noisy(made, [condition(0)])
    with torch.no_grad():
        start = made.velocity(*arguments, encoded)
    optimizer = torch.optim.SGD(made.trained_parameters(), lr=0.1)
    for _ in range(2):
        with torch.no_grad(), made.reference():
            assert torch.equal(made.velocity(*arguments, encoded), start)
        made.velocity(*arguments, encoded).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            assert not torch.equal(made.velocity(*arguments, encoded), start)
    assert all(parameter.requires_grad for parameter in made.trained_parameters())


def handing_over(mode: str, **settings) -> WanPolicy:
    """Return a trained policy whose starting weights answer below level 0.55."""
    made = policy(mode=mode, **settings)
    made.keep_reference()
    move(made.module)
    made.boundary_ratio = 0.55
    return made


def answers(made: WanPolicy, *arguments) -> list[torch.Tensor]:
    """Return the velocities of the trained and of the starting weights, whatever the level."""
    boundary, made.boundary_ratio = made.boundary_ratio, 0.0
    with torch.no_grad():
        trained = made.velocity(*arguments)
        with made.reference():
            start = made.velocity(*arguments)
    made.boundary_ratio = boundary
    return [trained, start]


@pytest.mark.parametrize(("mode", "guidance"), [("lora", 1.0), ("lora", 3.0), ("attention", 1.0), ("full", 1.0)])
def test_below_the_boundary_the_starting_weights_answer_without_gradient_whatever_the_other_rows(mode, guidance):
    made = handing_over(mode, guidance_scale=guidance)
    conditions = [condition(index) for index in range(4)]
    encoded, (latents, _) = made.encode(conditions), noisy(made, conditions)
    sigma = torch.tensor([0.9, 0.3, 0.55, 0.54])
    trained, start = answers(made, latents, sigma, encoded)
    low = torch.tensor([False, True, False, True])
    mixed = made.velocity(latents, sigma, encoded)
    expected = torch.where(low[:, None, None, None, None], start, trained)
    torch.testing.assert_close(mixed, expected, rtol=1e-4, atol=1e-5)
    assert all((trained - start).abs().flatten(1).amax(1) > 1e-3)
    with made.reference():
        assert torch.equal(made.velocity(latents, sigma, encoded), start)
    forward = made.module.forward = Mock(wraps=made.module.forward)
    for level, whose in ((0.56, 0), (0.54, 1)):  # one call where all rows are on one side
        alike = latents, torch.full((4,), level), encoded
        expected, calls = answers(made, *alike)[whose], forward.call_count
        assert torch.equal(made.velocity(*alike), expected) and forward.call_count == calls + 1
    gradients = []
    for rows in (slice(None), ~low):  # of all rows, and of those alone that the trained weights answer for
        for parameter in made.trained_parameters():
            parameter.grad = None
        made.velocity(latents[rows], sigma[rows], encoded.rows(torch.arange(4)[rows])).square().sum().backward()
        gradients.append([parameter.grad for parameter in made.trained_parameters()])
    torch.testing.assert_close(*gradients)


@torch.no_grad()
def test_a_rollout_hands_over_where_one_by_hand_does():
    made, conditions, sigmas = handing_over("attention"), [condition(0)], flow_sigmas(6, 2.0)
    encoded, sampling = made.encode(conditions), Sampling(sigmas, ODE, seed=3)
    found = rollout(made, conditions, encoded, [()], sampling).final_latents
    latents, whose = initial_noise(conditions[0], made.latent_shape(conditions), sampling)[None], []
    for before, after in itertools.pairwise(sigmas):
        whose.append(int(before < 0.55))
        latents = latents + answers(made, latents, before[None], encoded)[whose[-1]] * (after - before)
    torch.testing.assert_close(found, latents, rtol=1e-5, atol=1e-6)
    assert whose == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("mode", "modules"),
    [("lora", {"cam_encoder"}), ("camera", {"cam_encoder"}), ("attention", {"cam_encoder", "projector"})],
)
def test_the_weights_that_read_the_camera_are_those_of_its_modules(mode, modules):
    made = policy(mode=mode)
    names = {id(weight): name for name, weight in made.module.named_parameters()}
    camera = [names[id(weight)] for weight in made.camera_parameters()]
    assert {part for name in camera for part in name.split(".")} & {"cam_encoder", "projector", "attn1"} == modules
    trained = [names[id(weight)] for weight in made.trained_parameters()]
    assert camera == [name for name in trained if modules & set(name.split("."))]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([(6, 16, 24)], r"videos have 6 frames, must be 4n\+1"),
        ([(5, 20, 24)], "videos are 20x24, must be multiples of 8x8"),
        ([(5, 16, 28)], "set data.height and data.width"),
        ([(5, 16, 24), (9, 16, 24)], "one video shape"),
    ],
)
def test_videos_that_do_not_fit_the_codec_and_the_patches_are_refused(sizes, message):
    conditions = [condition(index, size=size) for index, size in enumerate(sizes)]
    made = policy()
    with pytest.raises(ValueError, match=message):
        made.latent_shape(conditions)
    with pytest.raises(ValueError, match=message):
        made.encode(conditions)
    without_patches = tiny_policy(tiny_networks(patch_size=(1, 1, 1)))
    assert without_patches.latent_shape([condition(size=(9, 20, 28))]) == (4, 3, 5, 7)


@pytest.mark.parametrize(
    ("fits", "beyond"), [((61, 8, 8), (65, 8, 8)), ((1, 256, 8), (1, 264, 8)), ((1, 8, 256), (1, 8, 264))]
)
def test_a_video_beyond_the_models_rotary_positions_is_refused_and_the_largest_is_not(fits, beyond):
    made = policy()  # 32 positions, of two videos in time; 4x compression, patches of 2x2
    largest = made.latent_shape([condition(size=fits)])
    latents = torch.zeros((1, *largest))
    given = {"source_latents": latents, "target_cameras": torch.zeros(1, largest[1], 12)}
    conditioning = Conditioning(torch.zeros(1, 6, 16), given)
    with torch.no_grad():
        assert made.velocity(latents, torch.ones(1), conditioning).shape == latents.shape
    with pytest.raises(ValueError, match=r"must be at most 61x256x256, where the model's rotary positions end; lower"):
        made.latent_shape([condition(size=beyond)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_tiny_folder(tmp_path_factory.mktemp("tiny"))


def load(folder: str, **changes) -> WanPolicy:
    model = dataclasses.replace(LORA, **{"path": folder, "max_prompt_tokens": 6, **changes})
    return WanPolicy.from_config(RECAM, model, toy.sample_config(), CPU)


def test_a_model_folder_gives_the_policy_it_was_saved_from(folder):
    loaded = load(folder, checkpointing="blocks")
    expected = policy()
    encoded = loaded.encode([condition(0)])
    for name, tensor in expected.encode([condition(0)]).tensors().items():
        assert torch.equal(tensor, encoded.tensors()[name]), name
    arguments = noisy(loaded, [condition(0)])
    with torch.no_grad():
        assert torch.equal(loaded.velocity(*arguments, encoded), expected.velocity(*arguments, encoded))
    assert loaded.module.gradient_checkpointing and loaded.trained_parameters()


def test_rounded_timesteps_and_the_codec_s_tiles_are_those_of_the_configuration(folder):
    plain = load(folder)
    original = load(folder, round_timestep=True, vae_tiling=True, vae_tiles="recammaster")
    assert original.codec.identity == f"{plain.codec.identity} tiled 30x52"
    conditions = [condition(0), condition(1)]
    latents, encoded = noisy(plain, conditions)[0], plain.encode(conditions)
    for made, timesteps in ((plain, [833.27, 92.6]), (original, [832.0, 92.5])):  # those of bf16
        made.module.forward = Mock(wraps=made.module.forward)
        made.velocity(latents, torch.tensor([0.83327, 0.0926]), encoded)
        given = made.module.forward.call_args.args[1]
        assert given.dtype == torch.float32 and given.tolist() == pytest.approx(timesteps)


@pytest.mark.parametrize("mode", ["lora", "attention"])
def test_bf16_computes_close_to_fp32_and_trains_with_fp32_velocities(folder, mode):
    made = load(folder, dtype="bf16", trained=mode)
    encoded, arguments = made.encode([condition(0)]), noisy(made, [condition(0)])
    velocity = made.velocity(*arguments, encoded)
    velocity.square().mean().backward()
    assert velocity.dtype == torch.float32
    assert any(parameter.grad.abs().max() > 0 for parameter in made.trained_parameters())
    with torch.no_grad():
        exact = policy().velocity(*arguments, policy().encode([condition(0)]))
    assert (velocity - exact).norm() / exact.norm() < 0.03
    assert encoded.inputs["source_latents"].dtype == encoded.prompt_embeds.dtype == torch.float32


def test_a_missing_folder_or_component_is_named_with_the_way_to_get_it(folder, tmp_path):
    with pytest.raises(ValueError, match=r"does not exist, .* download .*--config.model.path"):
        load_networks(RECAM, tiny_settings(tmp_path / "nothing"), CPU)
    shutil.copytree(folder, tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "vae")
    shutil.rmtree(tmp_path / "part" / "tokenizer")
    with pytest.raises(ValueError, match="has no vae, tokenizer folder"):
        load_networks(RECAM, tiny_settings(tmp_path / "part"), CPU)


def backends(made: WanPolicy) -> set[str]:
    found = [part.processor._attention_backend for part in made.module.modules() if hasattr(part, "processor")]
    return {str(getattr(backend, "value", None)) for backend in found}


def test_the_attention_backend_is_the_configured_one_and_changes_rounding_only(folder):
    plain, other = (load(folder, attention_backend=name) for name in ("native", "_native_math"))
    assert (backends(plain), backends(other)) == ({"None"}, {"_native_math"})
    assert _AttentionBackendRegistry.get_active_backend()[0] == "native"  # other networks keep theirs
    encoded, arguments = plain.encode([condition(0)]), noisy(plain, [condition(0)])
    with torch.no_grad():
        one, two = (made.velocity(*arguments, encoded) for made in (plain, other))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_attention_gets_no_float_mask_which_a_backend_may_invert(guidance):
    """The NPU's own backend inverts additive float masks; it may be chosen because ReCam passes none."""
    made = policy(guidance_scale=guidance)
    conditions = [condition(0, prompt="a"), condition(1, prompt="a room with two windows")]
    masks, dispatch = [], transformer_wan.dispatch_attention_fn

    def noted(*given, attn_mask=None, **named):
        assert len(given) == 3  # query, key, value: a mask is named
        masks.append(attn_mask)
        return dispatch(*given, attn_mask=attn_mask, **named)

    with mock.patch.object(transformer_wan, "dispatch_attention_fn", noted):
        made.velocity(*noisy(made, conditions), made.encode(conditions))
    assert masks and all(mask is None or mask.dtype is torch.bool for mask in masks)


def test_a_backend_or_compiler_that_the_device_lacks_is_refused_in_one_line(monkeypatch, folder):
    def missing(name):
        raise RuntimeError("Flash Attention backend 'flash' is not usable because of missing package")

    transformer = tiny_transformer()
    monkeypatch.setattr(transformer, "set_attention_backend", missing)
    with pytest.raises(ValueError, match="attention_backend='_native_math' cannot be used: Flash"):
        apply_compute_settings(transformer, dataclasses.replace(LORA, attention_backend="_native_math"), CPU)
    with pytest.raises(ValueError, match="'flash', must be one of native, _native_math on cpu"):
        load(folder, attention_backend="flash")
    with pytest.raises(ValueError, match="is true, must be false on npu"):
        apply_compute_settings(transformer, dataclasses.replace(LORA, compile=True), types.SimpleNamespace(type="npu"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # inside torch
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # likewise
def test_compiled_blocks_compute_the_same_forward_and_backward():
    plain, compiled = policy(mode="lora"), policy(mode="lora")
    apply_compute_settings(compiled.module, dataclasses.replace(LORA, compile=True), CPU)
    encoded, arguments = plain.encode([condition(0)]), noisy(plain, [condition(0)])
    for made in (plain, compiled):
        made.velocity(*arguments, encoded).square().mean().backward()
    for one, two in zip(plain.trained_parameters(), compiled.trained_parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)
