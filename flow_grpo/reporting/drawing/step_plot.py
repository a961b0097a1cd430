"""Plot the stochastic steps of a rollout: how much noise each adds, and how large a gradient it gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from flow_grpo.reporting.drawing.style import BLUE, GREEN, GREY, ORANGE, new_figure, round_ticks, save_png, styled


@styled()
def draw_steps(sigmas: Sequence[float], steps: Sequence[Mapping[str, float]], path: Path) -> None:
    """Write a PNG: the noise levels of the whole rollout with the noise of its stochastic steps, and their gains.

    `sigmas` are the (S + 1,) noise levels, from 1 down to 0; a step has the fields of
    `flow_grpo.preflight.doctor.schedule.Step`.
    """
    places, std, excess, gain, weight = (
        [step[name] for step in steps] for name in ("step", "std", "excess", "gain", "weight")
    )
    figure = new_figure(figsize=(9.0, 3.4), dpi=110, layout="constrained")
    noise, credit = figure.subplots(1, 2)
    total = len(sigmas) - 1
    noise.plot(range(total), sigmas[:total], color=GREY, marker="o", ms=3, lw=1.2, label="sigma before the step")
    bars = noise.bar(places, std, 0.6, color=BLUE, alpha=0.75, label="std of the noise that the step adds")
    noise.bar_label(bars, [f"{share:+.0%}" if share >= 0.005 else "" for share in excess], fontsize=7, color="#374151")
    noise.set_title("noise of the stochastic steps\nabove a bar: noise in excess of the next sigma, if any")
    noise.set_ylim(0, 1.25 * max(*sigmas, *std))
    credit.plot(places, gain, color=ORANGE, marker="o", ms=5, label="gain: |d mean / d velocity| / std")
    counted = [one * factor for one, factor in zip(gain, weight, strict=True)]
    if counted != gain:
        credit.plot(places, counted, color=GREEN, marker="s", ms=5, label="gain x weight in the loss")
    credit.set_title("size of the gradient\na level line: every step counts alike")
    credit.set_ylim(0, 1.3 * max(*gain, *counted))
    for axes in (noise, credit):
        axes.set_xlabel(f"denoising step, 0 to {total - 1}")
        axes.set_xlim(-0.6, total - 0.4)
        axes.xaxis.set_major_locator(round_ticks(integer=True))
        axes.legend(loc="upper right")
    save_png(figure, path)
