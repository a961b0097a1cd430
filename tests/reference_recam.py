"""Reference implementation of Wan with ReCamMaster's camera: matrix products only, no torch.nn, no diffusers.

Pure functions of a state dict (names of diffusers) and a config. Everything, tables and sinusoids included, is computed
in the dtype of the state dict.
"""

import math

import torch
from torch import Tensor

State = dict[str, Tensor]


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return x @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def layer_norm(x: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def sinusoid(timestep: Tensor, width: int) -> Tensor:
    """[B] -> [B, width]: cosines, then sines, of t * 10000 ** (-i / half)."""
    half = width // 2
    wave = 10000.0 ** (-torch.arange(half, dtype=timestep.dtype) / half)
    angle = timestep[:, None] * wave
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def rotary_angles(head_width: int, grid: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
    """One angle per token (frame-major, then rows, then columns) and pair of channels of a head."""
    space = 2 * (head_width // 6)
    shares = (head_width - 2 * space, space, space)
    frames, rows, columns = grid
    angles = []
    for f in range(frames):
        for r in range(rows):
            for c in range(columns):
                waves = [
                    place / 10000.0 ** (torch.arange(0, share, 2, dtype=dtype) / share)
                    for place, share in zip((f, r, c), shares, strict=True)
                ]
                angles.append(torch.cat(waves))
    return torch.stack(angles)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate neighbouring pairs (2i, 2i + 1) of [..., tokens, head width] by their angles."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def attention(state: State, name: str, config: dict, queries_from: Tensor, keys_from: Tensor, angles) -> Tensor:
    """Attend with RMS norms over the whole width (all heads together) and, with angles, rotary q and k."""
    count, eps = config["num_attention_heads"], config["eps"]
    q = rms_norm(linear(state, f"{name}.to_q", queries_from), state[f"{name}.norm_q.weight"], eps)
    k = rms_norm(linear(state, f"{name}.to_k", keys_from), state[f"{name}.norm_k.weight"], eps)
    v = linear(state, f"{name}.to_v", keys_from)
    size, out = q.shape[-1] // count, []
    for head in range(count):
        part = slice(head * size, (head + 1) * size)
        a, b = q[..., part], k[..., part]
        if angles is not None:
            a, b = rotate(a, angles), rotate(b, angles)
        scores = a @ b.transpose(-1, -2) / math.sqrt(size)
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        out.append(weights / weights.sum(-1, keepdim=True) @ v[..., part])
    return linear(state, f"{name}.to_out.0", torch.cat(out, dim=-1))


def camera_per_token(state: State, name: str, camera: Tensor, tokens: int) -> Tensor:
    """[B, F, 12] -> [B, tokens, D]: the target's cameras, for the target's frames and again for the source's."""
    per_frame = linear(state, name, camera)
    frames = per_frame.shape[1]
    per = tokens // (2 * frames)
    return torch.stack([per_frame[:, token // per % frames] for token in range(tokens)], dim=1)


def block(
    state: State, name: str, config: dict, x: Tensor, text: Tensor, time: Tensor, angles: Tensor, camera: Tensor | None
) -> Tensor:
    """One DiT block; time is the projection [B, 6, D]; without a camera there is neither encoder nor projector."""
    eps, table = config["eps"], state[f"{name}.scale_shift_table"]
    shift, scale, gate, ff_shift, ff_scale, ff_gate = ((table[0, i] + time[:, i])[:, None] for i in range(6))

    y = layer_norm(x, eps) * (1 + scale) + shift
    if camera is not None:
        y = y + camera_per_token(state, f"{name}.cam_encoder", camera, x.shape[1])
    y = attention(state, f"{name}.attn1", config, y, y, angles)
    if camera is not None:
        y = linear(state, f"{name}.projector", y)
    x = x + gate * y

    y = layer_norm(x, eps) * state[f"{name}.norm2.weight"] + state[f"{name}.norm2.bias"]
    x = x + attention(state, f"{name}.attn2", config, y, text, None)

    y = layer_norm(x, eps) * (1 + ff_scale) + ff_shift
    y = linear(state, f"{name}.ffn.net.2", gelu_tanh(linear(state, f"{name}.ffn.net.0.proj", y)))
    return x + ff_gate * y


def patchify(latents: Tensor, patch: tuple[int, int, int]) -> tuple[Tensor, tuple[int, int, int]]:
    """[B, C, F, H, W] -> [B, tokens, C * pt * ph * pw] and the grid of tokens."""
    batch, channels, *size = latents.shape
    grid = tuple(n // p for n, p in zip(size, patch, strict=True))
    x = latents.reshape(batch, channels, grid[0], patch[0], grid[1], patch[1], grid[2], patch[2])
    return x.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, math.prod(grid), -1), grid


def unpatchify(x: Tensor, grid: tuple[int, int, int], patch: tuple[int, int, int]) -> Tensor:
    """[B, tokens, pt * ph * pw * C], the channel fastest -> [B, C, F, H, W]."""
    batch = x.shape[0]
    x = x.reshape(batch, *grid, *patch, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
    return x.reshape(batch, -1, *(n * p for n, p in zip(grid, patch, strict=True)))


def recam_forward(
    state: State, config: dict, latents: Tensor, timestep: Tensor, text: Tensor, camera: Tensor | None
) -> Tensor:
    """Predict the target's velocity [B, C, F, H, W] of [target | source] latents; camera None is base Wan."""
    patch, width = tuple(config["patch_size"]), config["num_attention_heads"] * config["attention_head_dim"]
    x, grid = patchify(latents, patch)
    x = x @ state["patch_embedding.weight"].reshape(width, -1).T + state["patch_embedding.bias"]
    angles = rotary_angles(config["attention_head_dim"], grid, x.dtype)

    embedder = "condition_embedder"
    time = linear(state, f"{embedder}.time_embedder.linear_1", sinusoid(timestep.to(x.dtype), config["freq_dim"]))
    time = linear(state, f"{embedder}.time_embedder.linear_2", silu(time))
    modulation = linear(state, f"{embedder}.time_proj", silu(time)).reshape(-1, 6, width)
    text = gelu_tanh(linear(state, f"{embedder}.text_embedder.linear_1", text))
    text = linear(state, f"{embedder}.text_embedder.linear_2", text)

    for number in range(config["num_layers"]):
        x = block(state, f"blocks.{number}", config, x, text, modulation, angles, camera)

    table = state["scale_shift_table"]
    shift, scale = ((table[0, i] + time)[:, None] for i in range(2))
    x = linear(state, "proj_out", layer_norm(x, config["eps"]) * (1 + scale) + shift)
    return unpatchify(x, grid, patch)[:, :, : latents.shape[2] // 2]  # nothing is learned about the source's
