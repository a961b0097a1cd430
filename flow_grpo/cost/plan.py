"""Cost of a recipe on given devices: operations, calls, memory, communication, seconds, and whether it fits.

Nothing is allocated: the transformer and the codec run on fake tensors, the rest is arithmetic. Allocator
fragmentation, kernel workspaces and other processes are not counted: leave a tenth of a device free, a fifth where
decoding has the highest peak.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from flow_grpo.cost.codec_cost import codec_cost, decoding_peak, rate_beside_transformer, settings_of
from flow_grpo.cost.footprint import Footprint, Latents, footprint, forward_flops
from flow_grpo.models.fake_policy import transformer_config
from flow_grpo.models.registry import is_video_model, video_model
from flow_grpo.runtime.device import DTYPES
from flow_grpo.runtime.ranks.sharding import gradient_bytes
from flow_grpo.settings.objectives import micro_batch, trained_rows, trains_groups, traits_of, window_length
from flow_grpo.settings.sampling import offloads_rollouts, sampling_of
from flow_grpo.settings.schema import Config, ModelConfig
from flow_grpo.settings.values import parse_bucket

# Wan 2.1: the UMT5-XXL encoder, the codec, and the codec's decoder.
TEXT_ENCODER_PARAMETERS, CODEC_PARAMETERS, DECODER_PARAMETERS = 5_680_910_336, 126_892_531, 73_295_603
IMAGE_ENCODER_PARAMETERS = 630_766_080  # CLIP ViT-H/14's vision tower, of models that have one
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Plan:
    """Costs of one rank and one epoch without resampling; GiB are of one device, seconds at the stated rate."""

    tokens: int  # of one sample, target and source together
    samples_per_epoch: int  # over all ranks
    rollout_calls: int  # of the transformer, at most one batch each
    update_calls: float  # of the transformer with a backward, one micro-batch each
    # Transformer work in forwards of one sample: 2 more for a backward, 1 more for recomputing all activations, twice
    # as many with guidance; evaluation is left out.
    forward_equivalents_per_sample: float
    forward_tflop: float  # 1e12 operations of a forward on one sample
    encode_tflop: float  # of encoding one source video
    decode_tflop: float  # of decoding one sample
    trained_parameters: int
    # Of source videos, each for the first time, at the codec's share of the rate; 0 where `model.encodings` has them.
    encode_s: float
    rollout_s: float
    decode_s: float  # at the codec's share of the rate, `rate_beside_transformer`
    update_s: float
    epoch_s: float  # the sum of these
    weights_gib: float  # all networks
    optimizer_gib: float  # gradients, moments, EMA, communication buffers, reference weights
    activations_gib: float  # saved for the backward of a micro-batch
    trajectories_gib: float  # stored latents and conditioning
    update_gib: float  # peak of the update
    rollout_gib: float  # peak of denoising in the rollout
    decode_gib: float  # peak of decoding a batch, without tiling
    sent_gradients_gib: float  # by a rank in an epoch, like the three that follow
    sent_weights_gib: float  # sharded ones
    sent_tokens_gib: float  # between ranks that share samples
    sent_prefixes_gib: float  # shared ones, the velocities behind them, and draws
    host_gib: float  # CPU memory: offloaded trajectories and frozen networks, and videos

    @property
    def most_gib(self) -> float:
        """Return the highest peak."""
        return max(self.update_gib, self.rollout_gib, self.decode_gib)


def largest_size(config: Config) -> tuple[int, int, int]:
    """Return (frames, rows, columns) of the recipe's largest videos."""
    data = config.data
    sizes = [parse_bucket(text) for text in data.buckets] or [(data.num_frames, data.height, data.width)]
    return max(sizes, key=lambda size: size[0] * size[1] * size[2])


def make_plan(config: Config, devices: int, rate: float) -> Plan:
    """Return the cost of a recipe; with several buckets every video has the largest size.

    `rate` is the number of operations a second that each of the devices sustains on this model.
    """
    sample, train, model = config.sample, config.train, config.model
    codec = codec_cost(model, largest_size(config))
    latents, codec_rate = codec.latents, rate * rate_beside_transformer(model)
    most = math.ceil(sample.train_batch_size / train.context_parallel)  # samples that a rank decodes at once
    decode_bytes = decoding_peak(model, latents, most)
    copies = 1 if sample.guidance_scale == 1.0 else 2
    micro = micro_batch(config)
    counted = {n: _counted(model, latents, n * copies) for n in {sample.train_batch_size, micro}}
    rollout, update = counted[sample.train_batch_size], counted[micro]
    calls = rollout_calls(config)
    replays, extra = _replays(config), traits_of(config).forwards(config)
    passes = 3 + recomputed_share(config) + extra  # a backward costs two forwards, recomputation at most one more
    forward_flops = rollout.forward_flops / sample.train_batch_size
    sharing = train.context_parallel
    decoded = math.ceil(sample.num_batches_per_epoch * sample.train_batch_size / sharing)  # samples are dealt
    samples = sample.expanded_batch_size * devices // sharing
    # A source is encoded once among the ranks with its copies, unless it was before the run.
    encoded = 0 if model.encodings or video_model(model.kind).videos == 1 else math.ceil(samples / sample.k / devices)
    seconds = {
        "encode_s": encoded * codec.encode_flops / codec_rate,
        "rollout_s": sample.expanded_batch_size * rollout_steps(config) * forward_flops / rate / sharing,
        "decode_s": decoded * codec.decode_flops / codec_rate,
        "update_s": replays * passes * update.forward_flops / rate / sharing,
    }
    memory = _memory(config, devices, update, rollout, latents, decode_bytes)
    return Plan(
        tokens=update.tokens,
        samples_per_epoch=samples,
        rollout_calls=calls,
        update_calls=replays,
        forward_equivalents_per_sample=copies
        * (rollout_steps(config) + replays * micro / sample.expanded_batch_size * passes),
        forward_tflop=forward_flops / 1e12,
        encode_tflop=codec.encode_flops / 1e12,
        decode_tflop=codec.decode_flops / 1e12,
        trained_parameters=update.trained,
        epoch_s=sum(seconds.values()),
        **seconds,
        **{name: value / GIB for name, value in (memory | _sent(config, devices, update, latents, calls)).items()},
    )


def recomputed_share(config: Config) -> float:
    """Return the operations that a backward pass computes once more, as a share of a forward's.

    Of a policy that is no `VideoModel` it is not known which part attention has: all counts as recomputed.
    """
    model = config.model
    if model.checkpointing != "keep_attention":
        return float(model.checkpointing != "none")
    if not is_video_model(model.kind):
        return 1.0
    latents = codec_cost(model, largest_size(config)).latents
    counted = _counted(model, latents, 1)
    return 1 - counted.attention_flops / counted.forward_flops


def flops_of_rows(config: Config) -> Callable[[tuple[int, ...]], float] | None:
    """Return the operations of a forward by the shape of a row of latents, source included; each is counted once.

    None for a policy of one's own.
    """
    model = config.model
    if not is_video_model(model.kind):
        return None
    own = video_model(model.kind)

    @functools.cache
    def flops(shape: tuple[int, ...]) -> float:
        channels, frames, height, width = shape
        latents = channels, frames // own.videos, height, width
        return forward_flops(own, _transformer(model), latents, model.max_prompt_tokens)

    return flops


# Counting runs the networks' code on fake tensors, which takes seconds: plans of one recipe differ in arithmetic only.
def _counted(model: ModelConfig, latents: Latents, rows: int) -> Footprint:
    lora = ("lora_rank", "lora_targets", "lora_full_modules")
    names = ("kind", "path", "dtype", "trained", *lora, "checkpointing", "max_prompt_tokens")
    return _footprint(settings_of(model, *names), latents, rows)


@functools.cache
def _footprint(model: ModelConfig, latents: Latents, rows: int) -> Footprint:
    return footprint(video_model(model.kind), _transformer(model), latents, model, rows=rows)


def _transformer(model: ModelConfig) -> dict[str, Any]:
    return transformer_config(video_model(model.kind), model.path)


def _replays(config: Config) -> float:
    """Return the calls with a backward of an epoch."""
    sample, train = config.sample, config.train
    trained = 1.0 if trains_groups(config) else (train.copies or sample.k) / sample.k
    return traits_of(config).passes(config) * trained * trained_rows(config) / micro_batch(config)


def rollout_steps(config: Config) -> float:
    """Return the denoising steps of a sample, shared ones divided by the copies, on average over the windows."""
    sample = config.sample
    if sample.sde == "ode":
        return float(sample.num_steps)
    blocks = sampling_of(config).blocks
    until = 1 + sum(block[0] for block in blocks) / len(blocks)  # the window's first step included
    tail = sample.tail_steps or sample.num_steps - 1 - sum(block[-1] for block in blocks) / len(blocks)
    if sample.share_prefix:
        until *= math.ceil(sample.expanded_batch_size / sample.k) / sample.expanded_batch_size
    return until + window_length(config) - 1 + tail + _asked_again(config)


def rollout_calls(config: Config) -> int:
    """Return the calls of a rank in an epoch whose batches hold groups with the first and with the last window."""
    sample, batches = config.sample, config.sample.num_batches_per_epoch
    if sample.sde == "ode":
        return batches * sample.num_steps
    blocks = sampling_of(config).blocks
    shared = math.ceil(sample.expanded_batch_size / sample.k / sample.train_batch_size)  # with full calls of groups
    until = (shared if sample.share_prefix else batches) * (blocks[-1][0] + 1)
    tail = sample.tail_steps or sample.num_steps - 1 - blocks[0][-1]
    return until + batches * (window_length(config) - 1 + tail + _asked_again(config))


def _asked_again(config: Config) -> int:
    """Return the steps of a sample that are answered under its command as well, after a path beside it."""
    explores = any(config.sample.command_spread)
    return window_length(config) if explores and traits_of(config).replays_steps else 0


def _sent(config: Config, devices: int, counted: Footprint, latents: Latents, calls: int) -> dict[str, float]:
    """Return the fields of `Plan` that count what is sent, in bytes; a ring is assumed where all ranks exchange."""
    sample, train, model = config.sample, config.train, config.model
    replays, extra = _replays(config), traits_of(config).forwards(config)
    copies = 1 if sample.guidance_scale == 1.0 else 2
    replayed = replays * micro_batch(config) * copies
    rows = sample.expanded_batch_size * copies * rollout_steps(config) + replayed * (2 + extra)
    again = replayed if model.checkpointing != "none" else 0.0
    # FSDP gathers the weights block by block: once a forward, once more for its backward, which shares them with
    # recomputation.
    weights = (counted.parameters - counted.trained) * DTYPES[model.dtype].itemsize + 4.0 * counted.trained
    gathers = calls + replays * (2 + extra) if train.sharding == "fsdp2" else 0.0
    # Of a group, the ranks that have another of its copies get its latents before the window and the velocity there,
    # and its rank the draws of those copies.
    ranks = min(sample.k, devices // train.context_parallel) if sample.layout != "contiguous" else 1
    draws = window_length(config) * trains_groups(config) * sample.k * (1 - 1 / ranks)
    shared = (2 * (ranks - 1) + draws) * sample.share_prefix
    return {
        "sent_gradients_gib": gradient_bytes(
            train.sharding, counted.trained, devices, passes=replays, steps=train.updates_per_epoch
        ),
        "sent_weights_gib": gathers * weights * (devices - 1) / devices,
        "sent_tokens_gib": tokens_sent(
            config, _transformer(model), counted.tokens, video_model(model.kind).videos, rows, again
        ),
        "sent_prefixes_gib": 4.0 * math.prod(latents) * shared * sample.expanded_batch_size / sample.k,
    }


def tokens_sent(
    config: Config, transformer: Mapping[str, Any], length: int, videos: int, rows: float, recomputed: float
) -> float:
    """Return the bytes of tokens that ranks which share samples exchange, see `runtime.ranks.context_parallel`.

    Args:
        config: the recipe.
        transformer: its configuration.
        length: tokens of a row.
        videos: target and source are 2; the last block then asks for the target's tokens only.
        rows: forwards of one row, and backwards, in which the gradients of what was sent travel back.
        recomputed: rows whose blocks are computed, and exchange, once more.
    """
    sharing, heads = config.train.context_parallel, transformer["num_attention_heads"]
    team = math.gcd(heads, sharing)
    own = length / sharing * DTYPES[config.model.dtype].itemsize
    width, layers = heads * transformer["attention_head_dim"], transformer["num_layers"]
    asked = layers - 1 + 1 / videos  # blocks of queries and of outputs
    per_team, to_mates = 2 * (layers + asked) * (team - 1) / team, 2 * layers * (sharing // team - 1)
    joined: float = math.prod(transformer["patch_size"]) * transformer["out_channels"] / videos * (sharing - 1)
    sent: float = own * ((rows + recomputed) * width * (per_team + to_mates) + rows * joined)
    return sent


def _memory(
    config: Config, devices: int, update: Footprint, rollout: Footprint, latents: Latents, decoding: float
) -> dict[str, float]:
    """Return the fields of `Plan` that count memory, in bytes."""
    sample, model, train = config.sample, config.model, config.train
    shards = devices if train.sharding == "fsdp2" else 1
    width, network = DTYPES[model.dtype].itemsize, _transformer(model)
    transformer = update.parameters * width + update.trained * (4 - width if model.trained != "lora" else 4)
    reference = 4 * update.trained if config.asks_reference and model.trained != "lora" else 0
    # Gradient, two moments, DDP's communication buffer; EMA and reference weights.
    states = 4 * update.trained * (3 + (train.sharding == "ddp" and devices > 1)) / shards
    states += (4 * update.trained * (train.ema_decay > 0) + (0 if model.offload else reference)) / shards
    # FSDP holds two gathered blocks: the current one and the next, which is prefetched.
    gathered = 0 if shards == 1 else 2 * transformer / network["num_layers"]
    encoders, decoder = _frozen(config)
    frozen = 0 if model.offload else encoders + decoder
    prompts = 1 if sample.guidance_scale == 1.0 else 2
    prompt = prompts * model.max_prompt_tokens * network["text_dim"]
    inputs = video_model(model.kind).input_shapes(1, latents, network).values()
    # The states, the final latents and the conditioning.
    kept = window_length(config) + 1 if traits_of(config).replays_steps else 0
    one = 4 * (math.prod(latents) * (kept + 1) + sum(map(math.prod, inputs)) + prompt)
    offloaded = offloads_rollouts(config)
    group = one + 4 * math.prod(latents) * (sample.k * window_length(config) - kept)
    trajectories = one * sample.expanded_batch_size + group * trained_rows(config) * trains_groups(config)
    waiting = max(micro_batch(config) * (group if trains_groups(config) else one), sample.train_batch_size * one)
    on_device = waiting if offloaded else trajectories
    fixed = transformer / shards + gathered + states + frozen + on_device
    sharing = train.context_parallel
    activations = (update.kept_bytes + update.block_bytes) / sharing
    frames, rows, columns = largest_size(config)
    count = video_model(model.kind).videos  # the generated one, and its source
    videos = 4 * 3 * frames * rows * columns * count * sample.expanded_batch_size
    return {
        "weights_gib": transformer / shards + gathered + frozen,
        "optimizer_gib": states,
        "activations_gib": activations,
        "trajectories_gib": on_device,
        "update_gib": fixed + activations,
        # Offloaded parts are on the device one at a time, between calls of the transformer.
        "rollout_gib": fixed + max(rollout.forward_bytes / sharing, max(encoders, decoder) if model.offload else 0),
        "decode_gib": fixed + decoding + (decoder if model.offload else 0),
        "host_gib": videos
        + (trajectories if offloaded else 0)
        + (encoders + decoder + reference / shards if model.offload else 0),
    }


def _frozen(config: Config) -> tuple[float, float]:
    """Return the bytes of the encoders (0 with precomputed encodings) and of the decoder."""
    codec = 4.0 * (_stored_elements(config, "vae") or CODEC_PARAMETERS)
    decoder = codec * DECODER_PARAMETERS / CODEC_PARAMETERS
    if config.model.encodings:
        return 0.0, decoder
    text = _stored_elements(config, "text_encoder") or TEXT_ENCODER_PARAMETERS
    if "image_encoder" in video_model(config.model.kind).components:
        text += _stored_elements(config, "image_encoder") or IMAGE_ENCODER_PARAMETERS
    return text * DTYPES[config.model.dtype].itemsize + codec - decoder, decoder


def _stored_elements(config: Config, part: str) -> int:
    """Return the elements in the weight files of a component; 0 without files."""
    count = 0
    for file in Path(config.model.path, part).glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            count += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    return count
