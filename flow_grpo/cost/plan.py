"""Cost of a recipe on given devices: operations, calls, memory, communication, seconds, and whether it fits.

Nothing is allocated: the transformer and the codec run on fake tensors, the rest is arithmetic. Allocator
fragmentation, kernel workspaces and other processes are not counted: leave a tenth of a device free, a fifth where
decoding has the highest peak.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from flow_grpo.cost import CORES
from flow_grpo.cost.codec_cost import codec_cost, decoding_peak, rate_beside_transformer, settings_of
from flow_grpo.cost.footprint import Footprint, Latents, SparseFootprint, footprint, sparse_footprint
from flow_grpo.cost.reward_seconds import reward_seconds
from flow_grpo.cost.round_steps import Walk, round_steps, sample_steps, steps_after
from flow_grpo.models.fake_policy import transformer_config
from flow_grpo.models.registry import video_model
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
_LORA = ("lora_rank", "lora_targets", "lora_full_modules")
_COUNTED = ("kind", "path", "dtype", "trained", *_LORA, "checkpointing", "max_prompt_tokens")
LINK = 25e9  # bytes a second that a rank sends: a port of 200 Gbit/s


@dataclasses.dataclass(frozen=True)
class Plan:
    """Costs of one rank, one epoch without resampling and the whole run; GiB of one device, seconds at its rate."""

    tokens: int  # of one sample, target and source together
    samples_per_epoch: int  # over all ranks
    rollout_calls: int  # of the transformer, at most one batch each
    update_calls: float  # of the transformer with a backward, one micro-batch each
    # Transformer work in forwards of one sample, twice as many with guidance; evaluation is left out.
    forward_equivalents_per_sample: float
    update_forwards: float  # of these an update of one row takes: forward, backward and what is recomputed
    forward_tflop: float  # 1e12 operations of a forward on one sample
    encode_tflop: float  # of encoding one source video
    decode_tflop: float  # of decoding one sample that is scored
    trained_parameters: int
    # Of source videos, each for the first time, at the codec's share of the rate; 0 where `model.encodings` has them.
    encode_s: float
    rollout_s: float  # of the slowest rank
    decode_s: float  # at the codec's share of the rate, `rate_beside_transformer`
    reward_s: float  # on the host's cores, what sampling does not hide
    update_s: float
    sent_s: float  # of what is sent, as if nothing hid it
    epoch_s: float  # the sum of these
    evaluation_s: float  # of one evaluation, before, on the way and at the end
    run_hours: float
    device_hours: float
    evaluation_share: float  # of these hours
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


def make_plan(config: Config, devices: int, rate: float, cores: int = CORES) -> Plan:
    """Return the cost of a recipe; with several buckets every video has the largest size.

    `rate` is the number of operations a second that each of the devices sustains on this model, `cores` those of the
    host that each has for its rewards.
    """
    sample, train, model = config.sample, config.train, config.model
    codec = codec_cost(model, largest_size(config))
    latents, sharing, codec_rate = codec.latents, train.context_parallel, rate * rate_beside_transformer(model)
    most = math.ceil(sample.train_batch_size / sharing)  # samples that a rank decodes at once
    copies = 1 if sample.guidance_scale == 1.0 else 2
    micro = micro_batch(config)
    rollout, update = (counted(model, latents, rows * copies) for rows in (sample.train_batch_size, micro))
    forward_flops = rollout.forward_flops / sample.train_batch_size
    calls, replays = rollout_calls(config), _replays(config)
    walk: Walk = float
    kept_bytes = 0
    if sample.ode_calls == "sparse":
        sparse = counted_sparse(model, latents, sample.train_batch_size * copies)
        walk, kept_bytes = (lambda calls: sparse.walk(calls) / rollout.forward_flops), sparse.kept_bytes
    steps, waited_for = round_steps(config, devices // sharing, walk)
    update_flops = update.train_flops + update.recomputed_flops
    update_flops += traits_of(config).forwards(config) * update.forward_flops
    held = sample.expanded_batch_size
    samples = held * devices // sharing
    # A source is encoded once among the ranks with its copies, unless it was before the run.
    encode_s = codec.encode_flops / codec_rate * (video_model(model.kind).videos > 1 and not model.encodings)
    decode_s = codec.decode_flops / codec_rate
    seconds = {
        "encode_s": math.ceil(samples / sample.k / devices) * encode_s,
        "rollout_s": waited_for * forward_flops / rate / sharing,
        "decode_s": math.ceil(held / sharing) * codec.reward_flops / codec_rate,  # samples are dealt
        "update_s": replays * update_flops / rate / sharing,
    }
    seconds["reward_s"] = _rewards_waited_for(config, most, cores, seconds["rollout_s"])
    memory = _memory(config, devices, update, rollout, latents, decoding_peak(model, latents, most))
    memory["rollout_gib"] += kept_bytes
    sent = _sent(config, devices, update, latents, calls, steps)
    seconds["sent_s"] = sum(sent.values()) / LINK
    epoch_s = sum(seconds.values())
    evaluation_s = _evaluation(config, devices // sharing, cores, forward_flops / copies / rate, encode_s, decode_s)
    run_s = config.num_epochs * epoch_s + evaluations(config) * evaluation_s
    return Plan(
        tokens=update.tokens,
        samples_per_epoch=samples,
        rollout_calls=calls,
        update_calls=replays,
        forward_equivalents_per_sample=copies * (steps + replays * update_flops / forward_flops) / held,
        update_forwards=update_flops / forward_flops / micro,
        forward_tflop=forward_flops / 1e12,
        encode_tflop=codec.encode_flops / 1e12,
        decode_tflop=codec.reward_flops / 1e12,
        trained_parameters=update.trained,
        **seconds,
        epoch_s=epoch_s,
        evaluation_s=evaluation_s,
        run_hours=run_s / 3600,
        device_hours=devices * run_s / 3600,
        evaluation_share=evaluations(config) * evaluation_s / run_s,
        **{name: value / GIB for name, value in (memory | sent).items()},
    )


def _rewards_waited_for(config: Config, videos: int, cores: int, rollout_s: float) -> float:
    """Return the seconds of scoring an epoch's batches of so many videos that sampling the next ones does not hide."""
    sample = config.sample
    sources = math.ceil(videos / sample.k) if sample.layout == "contiguous" else videos
    others = math.ceil(sample.expanded_batch_size / config.train.context_parallel / videos) - 1
    names, size = config.reward.weights, largest_size(config)
    one = reward_seconds(names, size, videos, 0, cores)
    before = reward_seconds(names, size, 0, sources * (others + 1), cores)  # while the first batch is sampled
    hidden = config.reward.overlap * rollout_s / (others + 1)
    return one + others * max(0.0, one - hidden) + max(0.0, before - hidden)


def evaluations(config: Config) -> int:
    """Return how often a run evaluates: before its first epoch, on the way and at its end."""
    every = config.eval.every or max(1, config.num_epochs)
    return 1 + math.ceil(config.num_epochs / every)


def _evaluation(config: Config, ranks: int, cores: int, forward_s: float, encode_s: float, decode_s: float) -> float:
    """Return the seconds of an evaluation: of held-out conditions, fixed ones, and groups for the rewards' signal.

    `ranks` are those that samples are dealt to; a forward of one row, a source and a video take the other seconds.
    """
    sample, own, size = config.sample, config.eval, largest_size(config)
    held_out, fixed = math.ceil(own.num_conditions / ranks), math.ceil(own.fixed_conditions / ranks)
    groups = own.signal_groups * traits_of(config).replays_steps * (1 if sample.same_initial_noise else 2)
    trained = fixed + groups * sample.k  # sampled as in training
    forwards: float = held_out * own.num_steps * (1 if (own.guidance_scale or sample.guidance_scale) == 1 else 2)
    forwards += trained * sample_steps(config) * (1 if sample.guidance_scale == 1 else 2)
    names, rows = {*config.reward.weights, own.gold}, min(own.batch_size, held_out)
    names |= {"target_view"} if video_model(config.model.kind).videos > 1 else set()
    seconds = math.ceil(held_out / rows) * reward_seconds(names, size, rows, rows, cores)
    seconds += reward_seconds(config.reward.weights, size, trained, fixed + groups, cores)
    seconds += forwards * forward_s + (held_out + trained) * decode_s + (held_out + fixed + groups) * encode_s
    return seconds / config.train.context_parallel


# Counting runs the networks' code on fake tensors, which takes seconds: plans of one recipe differ in arithmetic only.
def counted(model: ModelConfig, latents: Latents, rows: int) -> Footprint:
    """Return the costs of a call of the transformer, each of which is counted once."""
    return _footprint(settings_of(model, *_COUNTED), latents, rows)


def counted_sparse(model: ModelConfig, latents: Latents, rows: int) -> SparseFootprint:
    """Return those of approximate calls likewise."""
    return _sparse_footprint(settings_of(model, *_COUNTED), latents, rows)


@functools.cache
def _sparse_footprint(model: ModelConfig, latents: Latents, rows: int) -> SparseFootprint:
    return sparse_footprint(video_model(model.kind), _transformer(model), latents, model, rows=rows)


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


def rollout_calls(config: Config) -> int:
    """Return the calls of a rank in an epoch whose batches hold groups with the first and with the last window."""
    sample, batches = config.sample, config.sample.num_batches_per_epoch
    if sample.sde == "ode":
        return batches * sample.num_steps
    blocks = sampling_of(config).blocks
    shared = math.ceil(sample.expanded_batch_size / sample.k / sample.train_batch_size)  # with full calls of groups
    until = (shared if sample.share_prefix else batches) * (blocks[-1][0] + 1)
    return until + batches * int(steps_after(config, blocks[0]))


def _sent(
    config: Config, devices: int, counted: Footprint, latents: Latents, calls: int, steps: float
) -> dict[str, float]:
    """Return the fields of `Plan` that count what is sent, in bytes; a ring is assumed where all ranks exchange."""
    sample, train, model = config.sample, config.train, config.model
    replays, extra = _replays(config), traits_of(config).forwards(config)
    copies = 1 if sample.guidance_scale == 1.0 else 2
    replayed = replays * micro_batch(config) * copies
    rows = copies * steps + replayed * (2 + extra)
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

    `length` is that of a row, of target and source where there are 2 `videos`: the last block then asks for the
    target's only. `rows` are forwards of one, and backwards, in which the gradients of what was sent travel back; the
    blocks of those `recomputed` exchange once more.
    """
    sharing, heads = config.train.context_parallel, transformer["num_attention_heads"]
    team = math.gcd(heads, sharing)
    own = length / sharing * DTYPES[config.model.dtype].itemsize
    width, layers = heads * transformer["attention_head_dim"], transformer["num_layers"]
    asked = layers - 1 + 1 / videos  # blocks of queries and of outputs
    per_team, to_mates = 2 * (layers + asked) * (team - 1) / team, 2 * layers * (sharing // team - 1)
    joined = math.prod(transformer["patch_size"]) * transformer["out_channels"] / videos * (sharing - 1)
    return float(own * ((rows + recomputed) * width * (per_team + to_mates) + rows * joined))


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
