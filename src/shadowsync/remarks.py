"""Sentences on a job, its labels and rows that a user should know of; nothing in them ends a command."""

from shadowsync.choices import global_batch
from shadowsync.config import Config
from shadowsync.metrics.quality import TestMetrics
from shadowsync.report.words import percent

FEW_STEPS = 20
"""Below that a job learns next to nothing."""
_MANY = 0.1  # of the rows left out as bad


def one_label(samples: int, label: int, column: str | None) -> str:
    """On training rows which all have the same label; `column` is the configured one, if the source has such."""
    asked = "nothing can be learnt from them" if column is None else f"is data.label ({column}) the right column?"
    return f"all {samples:,} labels so far are {label}: {asked}"


def undefined(measured: TestMetrics, rows: str) -> str | None:
    """Why AUC and NE of `rows` are not defined, if they are not."""
    if measured.only_label is None:
        return None
    return (
        f"AUC and NE of {rows} are not defined, as all {measured.samples:,} labels are {measured.only_label}: give "
        "rows of both labels"
    )


def left_out(bad: int, all_rows: int, rows: str, example: str | None = None) -> str | None:
    """On `bad` of `all_rows` rows that were skipped, where those are many."""
    if bad <= _MANY * all_rows:
        return None
    shown = f", for instance {example}" if example else ""
    return f"{bad:,} of {all_rows:,} {rows} ({percent(bad / all_rows)}) were left out by data.on_bad_row=skip{shown}"


def too_short(config: Config, total_samples: int) -> list[str]:
    """What is odd about a job of so few samples: nearly no steps, or learning rates that rise to its end."""
    train, found = config.train, []
    if config.aggregation.method is None:
        size, steps = train.batch_size * train.trainers, "step(s) of each replica"
        made_of, lower = f"{train.batch_size:,} x {train.trainers:,} trainer(s)", "train.batch_size or train.trainers"
    else:
        size, steps = global_batch(config), "global step(s)"
        made_of, lower = f"{size:,} samples", "aggregation.global_batch, train.batch_size or train.trainers"
    if total_samples <= (FEW_STEPS - 1) * size:
        found.append(
            f"the job makes only {-(-total_samples // size)} {steps}, {total_samples:,} samples in all by {made_of}, "
            f"and learns next to nothing: lower {lower}, or raise data.epochs"
        )
    if train.warmup_samples is not None and train.warmup_samples >= total_samples:
        found.append(
            f"train.warmup_samples={train.warmup_samples} is not less than the {total_samples:,} samples of the job, "
            "so that the learning rates rise to its end and never reach what is set: lower it, or leave it out"
        )
    return found
