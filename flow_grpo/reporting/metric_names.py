"""Every metric that a run can log: what it means, its unit, where it is healthy, what to do where it is not.

python -m flow_grpo.reporting.metric_names > docs/metrics.md
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

# Placeholder of a name -> what it stands for.
PLACEHOLDERS = {
    "<where>": r"(?:reward|eval)",
    "<reward>": r".+",  # rewards of the user's own are named FILE.py:NAME, with or without slashes
    "<camera>": r"[^/]+",
    "<percent>": r"\d+",
    "<end>": r"(?:low|high)",
    "<phase>": r"[a-z_]+",
    "<kind>": r"[a-z_]+",
    "<name>": r".+",
}
SECTIONS = {
    "reward": "rewards of the epoch's samples, over all ranks, as measured",
    "reward_by_camera": "by kind of camera: its preset where `presets.json` names it, else its name",
    "policy": "the update, over its samples and ranks",
    "train": "optimizer steps of the epoch",
    "dyn": "groups, the first three also without dynamic sampling, and [dynamic sampling](dynamic_sampling.md)",
    "eval": "held-out conditions, averaged; step 0 is before training",
    "tail": "agreement of a short tail with all steps, asked a few times in a run: [learning.md](learning.md)",
    "fixed": "training conditions that stay the same, sampled as training does with the same noise at every evaluation",
    "eval_change": "paired change since before training, see [healthy_run.md](healthy_run.md)",
    "eval_floor": "the same estimator on codec reconstructions of the true videos: no policy can be expected below it",
    "eval_by_camera": "held-out conditions by kind of camera",
    "server": "rewards that a server computes, see [remote_rewards.md](remote_rewards.md)",
    "time": "wall time: epochs and what lies outside of them (`start`, `evaluation`, `log`, "
    "`save`, `floor`, `finish`, `close`) are all of a run's",
    "system": "throughput, memory, traffic",
}
OUTSIDE_EPOCHS = ("start", "evaluation", "log", "save", "floor", "finish", "close")  # phases that are in no epoch
HEALTH = ("policy/credit_share", "policy/clip_fraction", "train/grad_norm")  # what to look at first
LEAST_SPREAD = 0.5  # of a reward inside groups, in its floors, with which a run begins: the demo learns at 0.7
MEASURED = (
    "what rewards measure beside their value: `reward/` over the epoch's samples, `eval/` over the held-out "
    "conditions; `eval_by_camera/`, `eval_change/` and `eval_floor/` have the same names"
)


@dataclasses.dataclass(frozen=True)
class Metric:
    """What one metric, or a family of them, means."""

    name: str  # `section/name`; placeholders in angle brackets stand for what differs in a family
    meaning: str  # in one sentence
    unit: str = ""  # "share" is a part of 1, "count" a number of things; "" has none, or that of the reward
    # bounds, both included, within which the metric of a healthy run lies; None where any value is
    healthy: tuple[float, float] | None = None
    advice: str = ""  # what to look at, or to do, outside of them

    def is_fine(self, value: float) -> bool:
        """Return whether a value is within the healthy bounds; any is where there are none."""
        return self.healthy is None or self.healthy[0] <= value <= self.healthy[1]

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """What the names of the family look like."""
        parts = re.split(r"(<\w+>)", self.name)
        return re.compile("".join(PLACEHOLDERS.get(part) or re.escape(part) for part in parts))


# The first whose pattern fits a name is its metric.
METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "weighted sum of the rewards; of several it adds unlike units: look at each reward's mean"),
    Metric("reward/std", "standard deviation of the weighted sum over all samples"),
    Metric("reward/group_std", "standard deviation of the weighted sum within a group, mean over groups"),
    Metric("reward/group_range_p<percent>", "percentile over groups of the weighted sum's range within a group"),
    Metric(
        "reward/valid", "samples with a value of every weighted reward", "share", (0.9, 1.0), "the console says why"
    ),
    Metric("reward/advantage_abs", "mean absolute advantage of the samples trained on"),
    Metric(
        "reward/advantage_p<percent>",
        "percentile of the advantages, before `train.copies` leaves copies out; a median far from 0 means that few "
        "copies stand out from their group",
    ),
    Metric(
        "reward/<reward>_group_range_p<percent>",
        "percentile over groups of the range within a group: a group is flat up to the reward's floor or "
        "`reward.flat_eps`; look here before you enable dynamic sampling",
    ),
    Metric(
        "reward/<reward>_group_std",
        "standard deviation within a group, mean over groups",
        advice="near 0 copies score alike and teach nothing: raise `sample.noise_level` or `sample.k`",
    ),
    Metric("reward/<reward>_std", "standard deviation over all samples"),
    Metric(
        "reward/<reward>_mean",
        "mean over the samples that have a value; rises slowly, noisily",
        advice="no trend: look at `reward/<reward>_group_std`; copies with equal scores teach nothing",
    ),
    Metric(
        "reward/<reward>_valid",
        "samples that have a value",
        "share",
        (0.9, 1.0),
        "the console says why samples could not be measured; `tools/check_sources.py` finds unusable sources. Failures "
        "of measuring above `reward.most_faults` stop the run",
    ),
    Metric("reward/<reward>_weight", "weight of this epoch"),
    Metric(
        "reward/<reward>_gated",
        "copies that fail the reward's gate",
        "share",
        (0.0, 0.9),
        "the threshold is out of reach and the reward teaches nothing: look at the mean of the deciding reward",
    ),
    Metric(
        "eval/rot_err_deg",
        "camera's rotation error by the estimator that no reward uses (`eval.gold`); falls",
        "degrees",
        advice="rising: the rewards mistake rotation for translation; add one that measures the camera "
        "([rewards.md](rewards.md))",
    ),
    Metric(
        "eval/trans_err_m",
        "distance from the commanded camera by the estimator that no reward uses (`eval.gold`); falls",
        "m",
        advice="rising while the reward rises: reward hacking, see [reward_hacking.md](reward_hacking.md)",
    ),
    Metric(
        "eval/target_view_psnr_db",
        "peak signal-to-noise ratio to the true view; rises or holds",
        "dB",
        advice="falls: the policy drifts; raise `train.kl_coef`, lower `train.learning_rate`",
    ),
    Metric(
        "eval/residual",
        "rms colour error that the gold estimator's poses leave, colours in 0..1; grows with `eval/camera_travel`",
    ),
    Metric(
        "eval/found_path_psnr_db",
        "peak signal-to-noise ratio to the room as filmed on the path that the gold estimator found; falls as "
        "`eval/camera_travel` grows",
        "dB",
    ),
    Metric("eval/camera_travel", "mean distance of the cameras found from the first view", "m"),
    Metric(
        "eval/equal_travel_residual",
        "`eval/residual`, less what the change of `eval/camera_travel` explains; holds or falls",
        advice="rising: training spoils the picture, which a better camera hides in `eval/target_view_psnr_db`",
    ),
    Metric(
        "eval/equal_travel_found_path_psnr_db",
        "`eval/found_path_psnr_db`, likewise; holds or rises",
        "dB",
        advice="as for `eval/equal_travel_residual`",
    ),
    Metric("eval/located", "frames that the gold estimator can locate", "share"),
    Metric(
        "eval/rendered_rot_err_deg",
        "camera's rotation error by a second estimator, which compares renderings",
        "degrees",
    ),
    Metric("eval/rendered_trans_err_m", "distance from the commanded camera by that estimator", "m"),
    Metric(
        "eval/hacked",
        "1 where a trained reward got better and the gold estimator's value worse; with `eval.split=tune` only",
        "",
        (0.0, 0.0),
        "[reward_hacking.md](reward_hacking.md); `train.stop_if` ends the run",
    ),
    Metric("eval/<name>_valid", "conditions that have a value, recorded where some have none", "share", (0.9, 1.0)),
    # What the rewards of flow_grpo/rewards measure beside their value.
    Metric("<where>/<reward>_rot_deg", "camera's rotation error, mean over frames, a lost one at the cap", "degrees"),
    Metric("<where>/<reward>_dir_deg", "angle between found and commanded path, whatever their lengths", "degrees"),
    Metric("<where>/<reward>_trans_m", "distance from the commanded camera, mean over frames, capped", "m"),
    Metric("<where>/<reward>_rot_err_deg", "camera's rotation error, mean over all frames", "degrees"),
    Metric("<where>/<reward>_trans_err_m", "distance from the commanded camera, mean over all frames", "m"),
    Metric(
        "<where>/<reward>_valid_frames",
        "frames whose camera could be found",
        "share",
        (0.9, 1.0),
        "frames no longer show the source's scene: a larger weight of `source_match`, or a lower `train.learning_rate`",
    ),
    Metric(
        "<where>/<reward>_unregistered",
        "videos most of whose frames could not be located",
        "share",
        (0.0, 0.1),
        "as for `<where>/<reward>_valid_frames`",
    ),
    Metric("<where>/<reward>_located", "frames that a view of the room explains", "share"),
    Metric("<where>/<reward>_residual", "rms colour error that the best camera poses leave, colours in 0..1"),
    Metric("<where>/<reward>_disp_px", "distance from the true view, in a picture 832 wide, capped", "pixels"),
    Metric("<where>/<reward>_matched_frames", "frames with features of the true view", "share"),
    Metric("<where>/<reward>_shake_deg", "unsteadiness of the camera's rotation beyond the command", "degrees a step"),
    Metric("<where>/<reward>_shake_m", "unsteadiness of the camera's path beyond the command", "m a step"),
    Metric("<where>/<reward>_found_path_psnr_db", "PSNR to the room from the cameras found", "dB"),
    Metric("<where>/<reward>_camera_travel", "mean distance of the cameras found from the first view", "m"),
    Metric("<where>/<reward>_psnr_db", "peak signal-to-noise ratio to the true view", "dB"),
    Metric("<where>/<reward>_ssim", "structural similarity to the true view, 1 at most"),
    Metric("<where>/<reward>_displacement", "shift from the true view, in picture widths"),
    Metric("<where>/<reward>_mismatch", "colour variance of the true view that no shift explains", "share"),
    Metric("<where>/<reward>_motion", "colour change between neighbouring frames, colours in 0..1"),
    Metric("<where>/<reward>_edges", "colour difference of neighbouring pixels, colours in 0..1"),
    Metric("<where>/<reward>_new", "colour distance of the video's patches to the source's: content that is new"),
    Metric("<where>/<reward>_lost", "colour distance of the source's patches to the video's: content that is lost"),
    Metric("<where>/<reward>_clipped", "clipped colours beyond those of the source and the true view", "share"),
    Metric("<where>/<reward>_luma", "mean brightness outside the range of the source and the true view"),
    Metric("<where>/<reward>_saturation", "mean saturation outside the range of the source and the true view"),
    Metric("<where>/<reward>_grid", "amplitude of a grid of 8 or 16 pixels beyond that of the references"),
    Metric("<where>/<reward>_flicker", "flicker of the brightness beyond that of the references"),
    Metric("reward_by_camera/<camera>/<reward>_valid", "samples of that kind with a value", "share"),
    Metric("reward_by_camera/<camera>/<reward>", "mean over samples of that kind, the epoch's first round"),
    Metric(
        "policy/ratio_first_max_abs_log",
        "largest distance between the rollout's log-probability and the update's own, before the first update",
        "nats per latent element",
        (0.0, 1e-4),
        "above a tenth of `train.clip_range` rollout and update disagree: stop, run `tools/doctor.py`",
    ),
    Metric(
        "policy/ratio_after_max_abs_log",
        "largest log-ratio of the first micro-batch after the last update, before evaluations or with `debug`; exactly "
        "0 means that nothing was learned",
        "nats per latent element",
    ),
    Metric("policy/ratio_mean", "probability ratio of the updated policy to that which sampled, mean of the epoch"),
    Metric("policy/ratio_min", "smallest probability ratio of the epoch"),
    Metric("policy/ratio_max", "largest probability ratio of the epoch"),
    Metric("policy/ratio_p<percent>", "percentile of the probability ratio over the epoch's updates and samples"),
    Metric(
        "policy/clip_fraction",
        "samples whose ratio was clipped; 0 with one update per epoch",
        "share",
        (0.0, 0.5),
        "updates are too large: halve `train.learning_rate`, else fewer `train.updates_per_epoch`, else a larger "
        "`train.clip_range`; above 0 with one update per epoch: rollout and update disagree",
    ),
    Metric(
        "policy/approx_kl",
        "KL of the policy that sampled to the updated one, mean of log p_old - log p_new; 0 with one update per epoch",
        "nats per latent element",
    ),
    Metric("policy/kl", "KL to the starting policy; 0 while `train.kl_coef` is 0", "nats per latent element"),
    Metric(
        "policy/credit_share",
        "of a reward's variance within a group, the part that recorded noise caused and the update can credit; the "
        "least of any reward with a weight",
        "share",
        (0.2, 1.0),
        "the rest is luck of the initial noise: `sample.same_initial_noise`, see [learning.md](learning.md)",
    ),
    Metric(
        "policy/spread_over_floor",
        "spread of a reward within a group over its noise floor; the least of any reward with a weight",
        "",
        (LEAST_SPREAD, math.inf),
        "below 1 that reward's copies differ by less than its own error: more `sample.noise_level`, see "
        "[learning.md](learning.md)",
    ),
    Metric(
        "train/loss",
        "clipped policy term + `train.kl_coef` x KL per latent element, mean over optimizer steps, without the factor "
        "sqrt(elements) that its gradient has",
    ),
    Metric("train/grad_norm", "norm of the gradient, mean over optimizer steps; steady in a healthy run"),
    Metric("train/grad_norm_max", "largest norm of an epoch", advice="spikes: lower `train.learning_rate`"),
    Metric(
        "train/grad_clipped",
        "optimizer steps whose gradient was clipped, by `train.max_grad_ratio` or `train.max_grad_norm`",
        "share",
        (0.0, 0.5),
        "norms spread widely: take more samples per step or lower `train.learning_rate`",
    ),
    Metric("train/updates", "optimizer steps taken", "count"),
    Metric(
        "train/skipped_updates",
        "optimizer steps skipped because no sample had weight",
        "count",
        (0.0, 0.0),
        "all groups were flat: [dynamic_sampling.md](dynamic_sampling.md), last paragraph",
    ),
    Metric(
        "train/bad_steps",
        "optimizer steps skipped for a NaN or infinity",
        "count",
        (0.0, 0.0),
        "more than `train.max_bad_steps` in a row stop the run: lower `train.learning_rate` or `sample.noise_level`, "
        "or compute in fp32",
    ),
    Metric("train/learning_rate", "of the latest optimizer step"),
    Metric("train/camera_learning_rate", "of the camera's layers, with `train.camera_learning_rate`"),
    Metric(
        "train/zero_std_ratio",
        "flat groups in what was trained on",
        "share",
        (0.0, 0.5),
        "most groups teach nothing: [dynamic_sampling.md](dynamic_sampling.md), last paragraph",
    ),
    Metric("dyn/flat_groups", "flat groups of the first round: their copies score alike", "count"),
    Metric(
        "dyn/incomplete_groups",
        "groups of the first round with a copy without any reward, or a reward with fewer than two values",
        "count",
        (0.0, 0.0),
        "look at `reward/<reward>_valid`",
    ),
    Metric(
        "dyn/valid_groups_ratio_initial",
        "groups of the first round that are neither flat nor incomplete",
        "share",
        (0.5, 1.0),
        "[dynamic_sampling.md](dynamic_sampling.md), last paragraph",
    ),
    Metric("dyn/resample_rounds", "extra rounds of the epoch; each samples as much as the first", "count"),
    Metric("dyn/pool_samples", "samples in valid groups at the end", "count"),
    Metric("dyn/shortage", "samples that are still missing", "count"),
    Metric("dyn/fallback", "1 when `dynamic_sampling.policy` had to decide"),
    Metric(
        "dyn/fallback_rate",
        "epochs of the last 20 in which `dynamic_sampling.policy` had to decide",
        "share",
        (0.0, 0.2),
        "raise `sample.k` or `sample.noise_level`, or drop conditions that are all easy or all hopeless",
    ),
    Metric("dyn/discarded_valid", "valid samples not trained on", "count"),
    Metric("dyn/padded_samples", "samples trained on that are repetitions or carry no signal", "count"),
    Metric("dyn/moved_samples", "samples sent to another rank, alone or in whole groups: only the surplus", "count"),
    Metric("dyn/moved_bytes", "size of the samples sent to another rank", "bytes"),
    Metric("dyn/reward_mean_before", "mean weighted sum of rewards of the first round"),
    Metric(
        "dyn/reward_mean_after", "mean weighted sum of rewards of what was trained on; compare runs by `reward/mean`"
    ),
    Metric("dyn/time", "what the extra rounds and the choice took", "s"),
    Metric(
        "tail/attention_kept",
        "attention that sparse calls keep, `sample.ode_calls`; ranks agree by about as much",
        "share",
        (0.8, 1.0),
        "look at `tail/<reward>`: copies may be ranked otherwise than by exact calls",
    ),
    Metric("tail/<reward>_low", "the 5 % bound of `tail/<reward>`"),
    Metric(
        "tail/<reward>",
        "correlation of a reward inside a group, mean over the last groups asked",
        "",
        (0.9, 1.0),
        "raise `sample.tail_steps`; where it is below beyond doubt, the run goes on with all steps, but for `fixed/`",
    ),
    Metric("fixed/<reward>_start", "the same mean when it was first measured so: before training"),
    Metric("fixed/<reward>", "mean of a reward; beside `_start` it is what was learned, without the luck of an epoch"),
    Metric(
        "eval_change/<name>_<end>", "end of the change's 95 % bootstrap over scenes; if that holds 0 it shows nothing"
    ),
    Metric("eval_change/<name>", "mean change since before training, paired by condition, in the unit of `eval/`"),
    Metric("eval_floor/<name>", "what the gold estimator finds on perfect videos, in the unit of `eval/`"),
    Metric("eval_by_camera/<camera>/<name>", "mean over the held-out conditions of that kind, in the unit of `eval/`"),
    Metric("server/<reward>_calls", "requests of the epoch, over all ranks, evaluations excluded", "count"),
    Metric(
        "server/<reward>_failures",
        "requests that failed",
        "count",
        (0.0, 0.0),
        "the console says why: [remote_rewards.md](remote_rewards.md)",
    ),
    Metric("server/<reward>_p<percent>_s", "percentile of the time of a request, as the slowest rank saw it", "s"),
    Metric("time/epoch_s", "an epoch in all", "s"),
    Metric("time/start_s", "imports, set-up, building and the fast doctor: all before the first evaluation", "s"),
    Metric("time/evaluation_s", "an evaluation", "s"),
    Metric("time/log_s", "writing metrics, and all else between epochs, in the record that comes after", "s"),
    Metric("time/save_s", "waiting for checkpoints, in the record that comes after", "s"),
    Metric("time/floor_s", "measuring the floor, once", "s"),
    Metric("time/finish_s", "after the last epoch's record: its logging and saving, the adapter, the summary", "s"),
    Metric("time/close_s", "waiting for videos, trackers, the last checkpoint and other ranks; only in the files", "s"),
    Metric(
        "time/<phase>_hidden_s",
        "work that ran concurrently with other phases: scoring, with decoding on a CPU, which should exceed the "
        "`time/score_s` that the run waited for",
        "s",
        advice="smaller although scoring is slow: more batches per epoch, more CPU cores",
    ),
    Metric(
        "time/<phase>_s",
        "a phase of the epoch: `fetch`, `encode`, `rollout`, `score`, `gather`, `tail_check`, `update`, and `other` "
        "for what is in none; they add up to the epoch's",
        "s",
    ),
    Metric("system/samples_per_s", "samples made in an epoch, extra rounds included, over its seconds", "1/s"),
    Metric("system/forward_equivalents", "transformer work so far, a forward of one sample is 1", "forwards"),
    Metric("system/forward_equivalents_per_sample", "transformer work of the epoch by sample", "forwards"),
    Metric("system/fixed_forward_equivalents", "of sampling the fixed conditions once, not in those above", "forwards"),
    Metric("system/tail_forward_equivalents", "of asking about the short tail, not in those above", "forwards"),
    Metric("system/tflops_per_device", "transformer operations a second, without recomputation", "TFLOP/s"),
    Metric("system/mfu", "transformer operations over the device's rate (`device_tflops`, else measured)", "share"),
    Metric("system/memory_<kind>_gib", "memory of rank 0: `allocated`, `peak`, `reserved`, `total`", "GiB"),
    Metric(
        "system/sent_<kind>_gib",
        "what a rank sends in an epoch, on average: `gradients` and sharded `weights` by their sizes (rings assumed), "
        "`tokens` of ranks that share samples, `rows` (samples, shared steps and encodings), "
        "`control` (ids, rewards, errors)",
        "GiB",
    ),
    # Last: what a reward or a server of the user's own measures, and the value of a reward in evaluations.
    Metric("reward/<reward>_<name>", "what a reward measures beside its value, mean over samples"),
    Metric("eval/<name>", "a reward, or what it measures beside its value, mean over the conditions that have one"),
)
INTRODUCTION = """\
# All metrics

What a run logs to `metrics.jsonl`, `metrics.csv` and the trackers, by section. How to read a run, and what to
look at first: [healthy_run.md](healthy_run.md). In angle brackets stands what differs; a share is a part of 1; a metric
without bounds is healthy anywhere. Made from `flow_grpo/reporting/metric_names.py`: `make docs`.
"""


@functools.cache
def metric_of(name: str) -> Metric | None:
    """Return what a logged metric means: the first whose pattern fits its name, or None."""
    return next((metric for metric in METRICS if metric.pattern.fullmatch(name)), None)


def phase_of(name: str) -> str:
    """Return the phase whose seconds `time/<phase>_s` are; "" for other metrics, and for seconds that others hold."""
    section, _, phase = name.partition("/")
    phase = phase.removesuffix("_s")
    return "" if section != "time" or phase == "epoch" or phase.endswith("_hidden") else phase


def page() -> str:
    """Return docs/metrics.md."""
    lines = [INTRODUCTION]
    for section, meaning in [*SECTIONS.items(), ("<where>", MEASURED)]:
        title = "Measurements of rewards" if section == "<where>" else f"`{section}/`"
        lines += [f"## {title}", "", f"{meaning[0].upper()}{meaning[1:]}.", ""]
        lines += ["| metric | meaning | unit | healthy | if not |", "|---|---|---|---|---|"]
        for metric in METRICS:
            if metric.name.partition("/")[0] == section:
                cells = (f"`{metric.name}`", metric.meaning, metric.unit, healthy_text(metric), metric.advice)
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def healthy_text(metric: Metric) -> str:
    """Return the bounds of a metric in words: "0", "at least 1", "0 to 0.5", or "" without any."""
    if metric.healthy is None:
        return ""
    low, high = metric.healthy
    if low == high:
        return f"{low:g}"
    return f"at least {low:g}" if math.isinf(high) else f"{low:g} to {high:g}"


if __name__ == "__main__":
    print(page(), end="")
