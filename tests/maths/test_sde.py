"""One denoising step: golden rows, std and gain per step, refusals, and the distribution that sampling ends in."""

import math
import re

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from flow_grpo.maths.schedule import flow_sigmas
from flow_grpo.maths.sde import Transition, coefficients, gaussian_kl, log_prob, sample, transition

S1, S2 = 27 / 28, 12 / 13  # sigmas 1 and 2 of 10 steps at shift 3

# kind, noise_level, max_step_std, sigma, sigma_next, latents, velocity, next_latents, mean, std, gain, log_prob
GOLDEN = [
    ("flow", 0.7, None, 0.9, 0.8, 0.5, -0.3, 0.55, 0.41485000, 0.66407831, 0.187478, -0.53029254),
    ("flow", 0.7, None, 0.5, 0.4, -1.2, 0.8, -1.0, -1.24080000, 0.22135944, 0.562434, -0.00265104),
    ("flow", 0.7, None, 1.0, S1, 0.5, -0.3, 0.1, 0.38821429, 0.70000000, 0.051020, -0.64702632),
    ("flow", 0.7, None, S1, S2, 0.5, -0.3, -0.2, 0.37404533, 0.73837139, 0.069484, -0.91784285),
    ("flow", 1.0, 0.45, 0.9, 0.8, 0.5, -0.3, 0.55, 0.47712500, 0.45000000, 0.247222, -0.13354384),
    ("flow", 1.0, 0.45, S1, S2, 0.5, -0.3, 0.9, 0.46098764, 0.45000000, 0.099908, -0.59631196),
    ("flow", 1.0, 0.45, 0.5, 0.4, -1.2, 0.8, -1.0, -1.20000000, 0.31622777, 0.474342, 0.03235401),
    ("constant", 0.3, None, 0.9, 0.8, 0.5, -0.3, 0.55, 0.52765000, 0.09486833, 1.059363, 1.40857557),
    ("constant", 0.3, None, 0.5, 0.4, -1.2, 0.8, -1.0, -1.27280000, 0.09486833, 1.101527, -2.69810874),
    ("constant", 0.3, None, 1.0, S1, 0.5, -0.3, 0.45, 0.50991071, 0.05669467, 0.629941, 1.39280195),
    ("linear", 1.0, None, 0.9, 0.8, 0.5, -0.3, 0.55, 0.50885000, 0.28460499, 0.367176, 0.32726192),
    ("linear", S1, None, 0.5, 0.4, -1.2, 0.8, -1.0, -1.26140306, 0.15246696, 0.732113, -0.50786898),
    ("linear", S1, None, 1.0, S1, 0.5, -0.3, 0.6, 0.50241208, 0.18223287, 0.195982, 0.64014473),
    ("cps", 0.8, None, 0.9, 0.8, 0.5, -0.3, 0.55, 0.27019039, 0.76084521, 0.204087, -0.71323747),
    ("cps", 0.8, None, 0.5, 0.4, -1.2, 0.8, -1.0, -1.05888544, 0.38042261, 0.626137, 0.03555409),
    ("cps", 0.8, None, 1.0, S1, 0.5, -0.3, -0.4, 0.17756177, 0.91709021, 0.038943, -1.03069825),
    ("cps", 0.5, None, 0.9, 0.8, 0.5, -0.3, 0.55, 0.41987215, 0.56568542, 0.218198, -0.37567961),
]
VARIANTS = [("flow", 0.7, None), ("flow", 1.0, 0.45), ("linear", S1, None), ("constant", 0.3, None), ("cps", 0.8, None)]

# Step std and gain per step: "index std/gain ..." in the order of VARIANTS; linear uses noise_level sigmas[1].
TABLE_10_3 = """
0 .700/.051 .450/.079 .182/.196 .057/.630 .917/.039
1 .738/.069 .450/.100 .189/.222 .061/.678 .878/.073
2 .532/.113 .450/.126 .195/.254 .066/.734 .832/.114
3 .441/.160 .450/.158 .201/.297 .072/.800 .778/.164
4 .388/.219 .450/.202 .206/.354 .078/.879 .713/.228
5 .350/.296 .450/.260 .209/.434 .087/.977 .634/.313
6 .320/.406 .450/.344 .207/.554 .097/1.10 .535/.437
7 .290/.574 .415/.484 .199/.752 .110/1.26 .408/.646
8 .256/.868 .366/.732 .175/1.14 .127/1.49 .238/1.17
"""
TABLE_16_5 = """
0 .700/.019 .450/.029 .113/.116 .034/.382 .939/.014
1 .733/.025 .450/.035 .118/.125 .036/.403 .925/.025
3 .442/.052 .450/.051 .128/.147 .041/.453 .892/.053
6 .335/.102 .450/.088 .146/.197 .050/.555 .823/.111
10 .286/.242 .408/.204 .174/.348 .071/.797 .660/.266
13 .259/.571 .371/.482 .182/.732 .104/1.20 .396/.638
14 .242/.859 .345/.725 .168/1.11 .122/1.45 .238/1.12
"""


def row(number: int, dtype: torch.dtype = torch.float64) -> tuple[Transition, Tensor, float]:
    """Return transition, next latents and gain of golden row `number` (from 1), one sample of one element."""
    kind, level, limit, sigma, sigma_next, latents, velocity, following = GOLDEN[number - 1][:8]
    x, v, x_next = (torch.tensor([[value]], dtype=dtype) for value in (latents, velocity, following))
    settings = {"kind": kind, "noise_level": level, "sigma_cap": S1, "max_step_std": limit}
    gain = coefficients(sigma, sigma_next, **settings).gain.item()
    return transition(v, x, sigma, sigma_next, **settings), x_next, gain


@pytest.mark.parametrize("number", range(1, 18))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 6e-9), (torch.float32, 1e-5)])
def test_golden_row(number: int, dtype: torch.dtype, tolerance: float) -> None:
    step, x_next, gain = row(number, dtype)
    assert step.mean.dtype == step.std.dtype == dtype
    assert [step.mean.item(), step.std.item()] == pytest.approx(GOLDEN[number - 1][8:10], abs=tolerance)
    assert gain == pytest.approx(GOLDEN[number - 1][10], abs=6e-7)
    found = log_prob(x_next, step).item()
    assert found == pytest.approx(GOLDEN[number - 1][11], abs=tolerance)
    assert found == pytest.approx(Normal(step.mean, step.std).log_prob(x_next).item(), abs=tolerance)


def test_log_prob_is_the_mean_over_a_samples_elements() -> None:
    x, v, x_next = (torch.tensor([pair], dtype=torch.float64) for pair in ((0.5, -1.2), (-0.3, 0.8), (0.55, -1.0)))
    step = transition(v, x, 0.9, 0.8, kind="flow", noise_level=0.7, sigma_cap=S1)
    assert step.mean[0].tolist() == pytest.approx([0.41485, -1.0056], abs=6e-9)
    assert log_prob(x_next, step).tolist() == pytest.approx([-0.51995571], abs=6e-9)


@pytest.mark.parametrize(("number", "divergence"), [(1, 4.39349490e-05), (14, 5.20643952e-05)])
def test_kl_is_the_golden_value_and_half_gain_squared_times_the_velocity_difference(number, divergence):
    step, _, gain = row(number)
    kind, level, limit, sigma, sigma_next, latents = GOLDEN[number - 1][:6]
    v_ref, x = torch.tensor([[-0.25]], dtype=torch.float64), torch.tensor([[latents]], dtype=torch.float64)
    other = transition(v_ref, x, sigma, sigma_next, kind=kind, noise_level=level, sigma_cap=S1, max_step_std=limit)
    kl = gaussian_kl(step.mean, other.mean, step.std)
    assert kl.item() == pytest.approx(divergence, rel=1e-8)
    assert kl.item() == pytest.approx(0.5 * gain**2 * 0.05**2, rel=1e-8)


@pytest.mark.parametrize(("steps", "shift", "table"), [(10, 3.0, TABLE_10_3), (16, 5.0, TABLE_16_5)])
def test_std_and_gain_of_every_step_and_variant(steps: int, shift: float, table: str) -> None:
    sigmas = flow_sigmas(steps, shift)
    for line in table.strip().splitlines():
        number, *cells = line.split()
        i = int(number)
        for (kind, level, limit), cell in zip(VARIANTS, cells, strict=True):
            noise = float(sigmas[1]) if kind == "linear" else level
            bounds = {"sigma_cap": sigmas[1], "max_step_std": limit}
            step = coefficients(sigmas[i], sigmas[i + 1], kind=kind, noise_level=noise, **bounds)
            for value, printed in zip((step.std, step.gain), cell.split("/"), strict=True):
                unit = 10.0 ** -len(printed.split(".")[1])
                assert value.item() == pytest.approx(float(printed), abs=0.51 * unit), (i, kind, level, printed)


def test_cps_preserves_the_noise_level_and_capped_flow_starts_with_std_noise_level() -> None:
    for steps in (2, 10, 50):
        sigmas = flow_sigmas(steps, 3.0).double()
        step = coefficients(sigmas[:-2], sigmas[1:-1], kind="cps", noise_level=0.8)
        assert torch.allclose(step.c.square() + step.std.square(), sigmas[1:-1].square(), rtol=1e-12, atol=0)
        first = coefficients(sigmas[0], sigmas[1], kind="flow", noise_level=0.7, sigma_cap=sigmas[1])
        assert first.std.item() == pytest.approx(0.7, abs=1e-6)


def test_unclipped_flow_gain_has_its_closed_form() -> None:
    sigmas = flow_sigmas(10, 3.0)[1:-1].double()
    sigma, delta = sigmas[:-1], sigmas[:-1] - sigmas[1:]
    step = coefficients(sigma, sigmas[1:], kind="flow", noise_level=0.7)
    expected = (0.7 / 2 + 1 / 0.7) * (delta * (1 - sigma) / sigma).sqrt()
    assert torch.allclose(step.gain, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("kind", "level", "limit"), VARIANTS)
def test_the_mean_is_the_textbook_form_of_each_variant(kind: str, level: float, limit: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    x, v = (torch.randn(3, 2, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    sigma, sigma_next = 0.8, 0.7
    step = transition(v, x, sigma, sigma_next, kind=kind, noise_level=level, max_step_std=limit)
    noise_estimate, std = x + (1 - sigma) * v, step.std.item()
    if kind == "cps":
        rest = math.sqrt(sigma_next**2 - std**2)
        expected = (1 - sigma_next) * (x - sigma * v) + rest * noise_estimate
    else:  # drift of the reverse SDE: velocity minus half g^2 times the score, forward over dt < 0
        g_squared, dt = std**2 / (sigma - sigma_next), sigma_next - sigma
        expected = x + (v + 0.5 * g_squared * noise_estimate / sigma) * dt
    assert torch.allclose(step.mean, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["flow", "constant", "linear", "cps"])
def test_a_step_without_noise_is_the_ode_step(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, v, z = (torch.randn(2, 3, 4, generator=generator) for _ in range(3))
    for sigma, sigma_next in ((1.0, 0.9), (0.5, 0.25), (0.25, 0.0)):
        ode = transition(v, x, sigma, sigma_next, kind="ode", noise_level=0.0)
        silent = transition(v, x, sigma, sigma_next, kind=kind, noise_level=0.0)
        assert torch.equal(silent.mean, ode.mean)
        assert torch.equal(sample(silent, z), ode.mean)
        assert torch.allclose(ode.mean, x + v * (sigma_next - sigma), rtol=0, atol=1e-6)
    almost = transition(v, x, 0.5, 0.25, kind=kind, noise_level=1e-6)
    assert torch.allclose(almost.mean, x - 0.25 * v, rtol=0, atol=1e-5)


def test_levels_per_sample_floats_and_tensors_give_the_same_bits() -> None:
    generator = torch.Generator().manual_seed(2)
    x, v, z = (torch.randn(3, 2, 4, generator=generator) for _ in range(3))
    before, after = torch.tensor([0.9, 0.7, 0.5]), torch.tensor([0.8, 0.5, 0.4])
    together = transition(v, x, before, after, kind="flow", noise_level=0.7)
    drawn = sample(together, z)
    assert torch.equal(drawn, together.mean + together.std[:, None, None] * z)
    for i in range(3):
        rows = slice(i, i + 1)
        for levels in ((before[i], after[i]), (float(before[i]), float(after[i]))):
            alone = transition(v[rows], x[rows], *levels, kind="flow", noise_level=0.7)
            assert torch.equal(alone.mean, together.mean[rows])
            assert torch.equal(sample(alone, z[rows]), drawn[rows])
            assert torch.equal(log_prob(drawn[rows], alone), log_prob(drawn, together)[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_converted_before_anything_is_computed(dtype: torch.dtype) -> None:
    x, v = (torch.randn(2, 8, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (4, 5))
    step = transition(v, x, 0.9, 0.8, kind="constant", noise_level=0.3)
    expected = transition(v.float(), x.float(), 0.9, 0.8, kind="constant", noise_level=0.3)
    assert step.mean.dtype == torch.float32
    assert torch.equal(step.mean, expected.mean)
    assert log_prob(x, step).dtype == torch.float32


def test_gradient_reaches_the_velocity_but_not_the_next_latents_or_the_reference() -> None:
    velocity = torch.randn(2, 6, generator=torch.Generator().manual_seed(6), requires_grad=True)
    latents, following = torch.zeros(2, 6), torch.ones(2, 6, requires_grad=True)
    step = transition(velocity, latents, 0.9, 0.8, kind="flow", noise_level=0.7)
    log_prob(following, step).sum().backward()
    # d log_prob / d velocity = -z * gain / D
    z, gain = (following - step.mean) / step.std, coefficients(0.9, 0.8, kind="flow", noise_level=0.7).gain
    assert torch.allclose(velocity.grad, -z * gain / 6, rtol=1e-5, atol=1e-7)
    assert following.grad is None
    reference = torch.zeros(2, 6, requires_grad=True)
    velocity.grad = None
    step = transition(velocity, latents, 0.9, 0.8, kind="flow", noise_level=0.7)
    gaussian_kl(step.mean, reference, step.std).sum().backward()
    assert velocity.grad is not None and velocity.grad.abs().max() > 0
    assert reference.grad is None


@pytest.mark.parametrize(("kind", "level", "limit"), VARIANTS)
def test_a_noisy_last_step_is_refused(kind: str, level: float, limit: float | None) -> None:
    with pytest.raises(ValueError, match=r"sigma_next is 0 .* must be > 0"):
        coefficients(0.25, 0.0, kind=kind, noise_level=level, max_step_std=limit)


@pytest.mark.parametrize(("sigma", "sigma_next"), [(0.5, 0.5), (0.5, 0.6), (1.2, 0.9), (0.5, -0.1), (math.nan, 0.5)])
@pytest.mark.parametrize("kind", ["ode", "flow", "cps"])
def test_levels_that_do_not_fall_within_zero_and_one_are_refused(sigma: float, sigma_next: float, kind: str) -> None:
    with pytest.raises(ValueError, match=r"must satisfy 0 <= sigma_next < sigma <= 1"):
        coefficients(sigma, sigma_next, kind=kind, noise_level=0.5)


def test_uncapped_flow_near_pure_noise_is_refused_with_its_numbers() -> None:
    with pytest.raises(ValueError, match=re.escape("c is -8739.")) as caught:
        coefficients(0.999999, 0.964324, kind="flow", noise_level=0.7)  # the grid of UniPC
    assert "std 132.2" in str(caught.value) and "must be >= 0" in str(caught.value)
    with pytest.raises(ValueError, match=r"c is -inf .* sigma_cap"):
        coefficients(1.0, 0.9, kind="flow", noise_level=0.7)
    for fix in ({"sigma_cap": 0.964324}, {"max_step_std": 0.45}):
        assert coefficients(0.999999, 0.964324, kind="flow", noise_level=0.7, **fix).c >= 0


def test_one_bad_sample_in_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("from sigma 0.3")):
        coefficients(torch.tensor([0.9, 0.3]), torch.tensor([0.8, 0.01]), kind="constant", noise_level=0.5)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"kind": "sde", "noise_level": 0.5}, "sde kind is 'sde'"),
        ({"kind": "flow", "noise_level": -0.1}, "noise_level is -0.1"),
        ({"kind": "flow", "noise_level": math.nan}, "noise_level is nan"),
        ({"kind": "cps", "noise_level": 1.1}, "at most 1"),
        ({"kind": "constant", "noise_level": 0.3, "max_step_std": 0.0}, "max_step_std is 0.0"),
    ],
)
def test_settings_outside_their_bounds_are_refused(settings: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=re.escape(field)):
        coefficients(0.9, 0.8, **settings)


def test_shapes_that_would_broadcast_and_steps_without_density_are_refused() -> None:
    column, flat = torch.zeros(4, 1), torch.zeros(4)
    settings = {"kind": "constant", "noise_level": 0.3}
    with pytest.raises(ValueError, match=r"velocity has shape \(4,\), latents \(4, 1\)"):
        transition(flat, column, 0.9, 0.8, **settings)
    with pytest.raises(ValueError, match=r"^sigma has shape \(4, 1\)"):
        transition(column, column, torch.full((4, 1), 0.9), torch.full((4, 1), 0.8), **settings)
    with pytest.raises(ValueError, match=r"has shape \(3,\), must be \(\) or \(4,\)"):
        transition(column, column, torch.full((3,), 0.9), torch.full((3,), 0.8), **settings)
    with pytest.raises(ValueError, match=r"sigma_next \(\), must be the same"):
        transition(column, column, torch.full((4,), 0.9), 0.8, **settings)
    silent = transition(column, column, 0.9, 0.8, kind="ode", noise_level=0.0)
    with pytest.raises(ValueError, match="std of the step is 0"):
        log_prob(column, silent)
    step = transition(column, column, 0.9, 0.8, **settings)
    with pytest.raises(ValueError, match="next_latents has shape"):
        log_prob(flat, step)
    with pytest.raises(ValueError, match="noise has shape"):
        sample(step, flat)
    with pytest.raises(ValueError, match="reference_mean"):
        gaussian_kl(column, flat, step.std)
    with pytest.raises(ValueError, match=r"has shape \(4, 1\)"):
        gaussian_kl(column, column, torch.ones(4, 1))


def gaussian_end(kind: str, level: float, limit: float | None, *, steps: int, samples: int) -> Tensor:
    """Sample a Gaussian world (mean 1.5, std 0.5) with its exact velocity; the last tenth of the steps is ODE."""
    mean, variance = 1.5, 0.25
    generator = torch.Generator().manual_seed(7)
    sigmas = flow_sigmas(steps, 1.0)
    x = torch.randn(samples, 1, generator=generator)
    for i in range(steps):
        sigma = float(sigmas[i])
        spread = (1 - sigma) ** 2 * variance + sigma**2
        centred = x - (1 - sigma) * mean
        velocity = sigma / spread * centred - (mean + (1 - sigma) * variance / spread * centred)
        stochastic = kind != "ode" and i < 0.9 * steps
        settings = {"kind": kind if stochastic else "ode", "noise_level": level, "max_step_std": limit}
        step = transition(velocity, x, sigma, float(sigmas[i + 1]), sigma_cap=float(sigmas[1]), **settings)
        x = sample(step, torch.randn(samples, 1, generator=generator)) if stochastic else step.mean
    return x


@pytest.mark.parametrize(("kind", "level", "limit"), [("ode", 0.0, None), *VARIANTS[:4]])
def test_euler_maruyama_ends_in_the_distribution_of_the_ode(kind, level, limit):
    # CPS is left out: its noise per step does not shrink with the step, so it has no such limit.
    end = gaussian_end(kind, level, limit, steps=250, samples=20_000)
    assert end.mean().item() == pytest.approx(1.5, abs=0.02)
    assert end.std().item() == pytest.approx(0.5, rel=0.02)
