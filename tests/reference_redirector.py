"""Reference implementation of ReDirector from its description: loops, complex numbers and matrix products only.

A pure function of a state dict (names of this project's model) and a config, computed in float64. It shares the parts
that every Wan has with tests/reference_recam.py.
"""

import math

import torch
from torch import Tensor

from tests import reference_recam as recam


def ray(camera: list[float], row: int, column: int) -> list[float]:
    """The Plücker ray of one pixel: moment o x d, then direction d."""
    r, fx, fy, cx, cy = camera[:12], *camera[12:]
    seen = [(column + 0.5 - cx) / fx, (row + 0.5 - cy) / fy, 1.0]
    length = math.sqrt(sum(x * x for x in seen))
    d = [sum(r[4 * i + j] * seen[j] / length for j in range(3)) for i in range(3)]
    o = [r[3], r[7], r[11]]
    return [o[1] * d[2] - o[2] * d[1], o[2] * d[0] - o[0] * d[2], o[0] * d[1] - o[1] * d[0], *d]


def plucker_video(path: Tensor, height: int, width: int, stride: int) -> Tensor:
    """Cameras [T, 16] -> [6 * stride, F, height, width]: the first frame `stride` times, then the others."""
    frames = [path[0].tolist()] * (stride - 1) + [camera.tolist() for camera in path]
    video = torch.zeros(6 * stride, len(frames) // stride, height, width, dtype=torch.float64)
    for number, camera in enumerate(frames):
        for row in range(height):
            for column in range(width):
                for channel, value in enumerate(ray(camera, row, column)):
                    video[channel * stride + number % stride, number // stride, row, column] = value
    return video


def conv3x3(state: recam.State, name: str, x: Tensor) -> Tensor:
    """[C, h, w] -> [D, h, w] with a border of zeros."""
    weight, (_, height, width) = state[f"{name}.weight"], x.shape
    padded = torch.zeros(x.shape[0], height + 2, width + 2, dtype=x.dtype)
    padded[:, 1:-1, 1:-1] = x
    out = sum(
        torch.einsum("dc,chw->dhw", weight[:, :, i, j], padded[:, i : i + height, j : j + width])
        for i in range(3)
        for j in range(3)
    )
    return out + state[f"{name}.bias"][:, None, None]


def adapter(state: recam.State, rays: Tensor, spatial: int, patch: tuple[int, int]) -> Tensor:
    """Rays [24, F, h, w] -> one embedding per token [tokens, D]."""
    tokens = []
    for frame in rays.unbind(1):
        channels, height, width = frame.shape
        rows, columns = height // spatial, width // spatial
        small = frame.reshape(channels, rows, spatial, columns, spatial).permute(0, 2, 4, 1, 3)
        small = small.reshape(-1, rows // patch[0], patch[0], columns // patch[1], patch[1])
        x = torch.einsum("dcij,cxiyj->dxy", state["control_adapter.conv.weight"], small)
        x = x + state["control_adapter.conv.bias"][:, None, None]
        x = x + conv3x3(state, "control_adapter.conv2", conv3x3(state, "control_adapter.conv1", x).clamp(min=0))
        tokens.append(x.reshape(len(x), -1).T)
    return torch.cat(tokens)


def softmax_attention(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """[B, S, D] queries, [B, K, D] keys and values, head by head."""
    size, out = q.shape[-1] // heads, []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = q[..., part] @ k[..., part].transpose(-1, -2) / math.sqrt(size)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        out.append(weights / weights.sum(-1, keepdim=True) @ v[..., part])
    return torch.cat(out, dim=-1)


def turn(x: Tensor, angles: Tensor) -> Tensor:
    """Multiply neighbouring channels of [B, S, D], as complex numbers, by exp(i angle); angles [B, S, heads, pairs]."""
    numbers = torch.view_as_complex(x.reshape(*angles.shape, 2).contiguous())
    return torch.view_as_real(numbers * torch.exp(1j * angles)).reshape(x.shape)


def phase(state: recam.State, name: str, camera: Tensor, heads: int, pairs: int) -> Tensor:
    """[B, S, D] -> [B, S, heads, pairs]: zeros for the pairs of time, then those of rows and columns."""
    raw = recam.silu(camera) @ state[f"{name}.weight"].T
    raw = raw.reshape(*raw.shape[:2], heads, -1)
    return torch.cat([torch.zeros(*raw.shape[:3], pairs - raw.shape[-1], dtype=raw.dtype), raw], dim=-1)


def self_attention(state: recam.State, name: str, config: dict, x: Tensor, angles: Tensor, camera: Tensor) -> Tensor:
    heads, pairs, eps = config["num_attention_heads"], config["attention_head_dim"] // 2, config["eps"]
    qk = phase(state, f"{name}.phase_qk", camera, heads, pairs) + angles[None, :, None]
    vo = phase(state, f"{name}.phase_vo", camera, heads, pairs)
    q, k = (
        turn(recam.rms_norm(recam.linear(state, f"{name}.to_{n}", x), state[f"{name}.norm_{n}.weight"], eps), qk)
        for n in "qk"
    )
    out = softmax_attention(q, k, turn(recam.linear(state, f"{name}.to_v", x), -vo), heads)
    return turn(recam.linear(state, f"{name}.to_out.0", out), vo)


def cross_attention(state: recam.State, name: str, config: dict, x: Tensor, text: Tensor, image: Tensor) -> Tensor:
    heads, eps = config["num_attention_heads"], config["eps"]
    q = recam.rms_norm(recam.linear(state, f"{name}.to_q", x), state[f"{name}.norm_q.weight"], eps)
    k = recam.rms_norm(recam.linear(state, f"{name}.to_k", text), state[f"{name}.norm_k.weight"], eps)
    out = softmax_attention(q, k, recam.linear(state, f"{name}.to_v", text), heads)
    k = recam.rms_norm(recam.linear(state, f"{name}.add_k_proj", image), state[f"{name}.norm_added_k.weight"], eps)
    out = out + softmax_attention(q, k, recam.linear(state, f"{name}.add_v_proj", image), heads)
    return recam.linear(state, f"{name}.to_out.0", out)


def affine(state: recam.State, name: str, x: Tensor, eps: float) -> Tensor:
    return recam.layer_norm(x, eps) * state[f"{name}.weight"] + state[f"{name}.bias"]


def image_tokens(state: recam.State, features: Tensor) -> Tensor:
    name = "condition_embedder.image_embedder"
    x = recam.linear(state, f"{name}.ff.net.0.proj", affine(state, f"{name}.norm1", features, 1e-5))
    x = 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    return affine(state, f"{name}.norm2", recam.linear(state, f"{name}.ff.net.2", x), 1e-5)


def redirector_forward(
    state: recam.State, config: dict, latents: Tensor, timestep: Tensor, text: Tensor, features: Tensor, cameras: Tensor
) -> Tensor:
    """Predict the velocity [B, C, F, H, W] of the target in [target | source] latents [B, C, 2F, H, W]."""
    patch, width, eps = tuple(config["patch_size"]), state["proj_out.weight"].shape[1], config["eps"]
    batch, channels, frames, height, columns = latents.shape
    zeros = torch.zeros(batch, config["in_channels"] - channels, frames, height, columns, dtype=latents.dtype)
    x, grid = recam.patchify(torch.cat([latents, zeros], dim=1), patch)
    x = x @ state["patch_embedding.weight"].reshape(width, -1).T + state["patch_embedding.bias"]
    half = (grid[0] // 2, *grid[1:])
    angles = torch.cat([recam.rotary_angles(config["attention_head_dim"], half, x.dtype)] * 2)

    spatial, temporal = config["spatial_compression"], config["temporal_compression"]
    camera = torch.stack(
        [
            torch.cat(
                [
                    adapter(
                        state, plucker_video(path, height * spatial, columns * spatial, temporal), spatial, patch[1:]
                    )
                    for path in pair
                ]
            )
            for pair in cameras
        ]
    )
    x = x + camera

    embedder = "condition_embedder"
    time = recam.linear(state, f"{embedder}.time_embedder.linear_1", recam.sinusoid(timestep, config["freq_dim"]))
    time = recam.linear(state, f"{embedder}.time_embedder.linear_2", recam.silu(time))
    modulation = recam.linear(state, f"{embedder}.time_proj", recam.silu(time)).reshape(-1, 6, width)
    text = recam.linear(
        state,
        f"{embedder}.text_embedder.linear_2",
        recam.gelu_tanh(recam.linear(state, f"{embedder}.text_embedder.linear_1", text)),
    )
    image = image_tokens(state, features)

    for number in range(config["num_layers"]):
        name = f"blocks.{number}"
        table = state[f"{name}.scale_shift_table"]
        shift, scale, gate, ff_shift, ff_scale, ff_gate = ((table[0, i] + modulation[:, i])[:, None] for i in range(6))
        y = recam.layer_norm(x, eps) * (1 + scale) + shift
        x = x + gate * self_attention(state, f"{name}.attn1", config, y, angles, camera)
        x = x + cross_attention(state, f"{name}.attn2", config, affine(state, f"{name}.norm2", x, eps), text, image)
        y = recam.layer_norm(x, eps) * (1 + ff_scale) + ff_shift
        y = recam.linear(state, f"{name}.ffn.net.2", recam.gelu_tanh(recam.linear(state, f"{name}.ffn.net.0.proj", y)))
        x = x + ff_gate * y

    x, table = x[:, : x.shape[1] // 2], state["scale_shift_table"]
    shift, scale = ((table[0, i] + time)[:, None] for i in range(2))
    x = recam.linear(state, "proj_out", recam.layer_norm(x, eps) * (1 + scale) + shift)
    return recam.unpatchify(x, half, patch)
