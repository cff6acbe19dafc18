"""The key numbers of a result: the same rows in the terminal, on the page and in comparisons."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shadowsync.metrics.quality import Peak
from shadowsync.metrics.units import Units
from shadowsync.report import words
from shadowsync.report.result import Aggregation, Result

DEAD_SHARE = 0.5
"""Of a layer's units; from there on it is worth a warning."""
COIN = math.log(2)
"""Log loss of whoever always predicts 0.5, in nats."""
WILD = 1.5 * COIN
"""Log loss above which training did not just begin but went astray.

A bound on NE would not do: where positives are rare every model begins with a high one, as it begins near 0.5.
"""


@dataclass(frozen=True)
class KeyNumber:
    """One row of the table: what it is, its value, and what the value means."""

    name: str
    value: str
    meaning: str


def key_numbers(result: Result) -> list[KeyNumber]:
    """The rows that apply to this result."""
    return [
        *_quality(result),
        *_trouble(result),
        *_speed(result),
        *_synchronisation(result),
        *_samples(result),
        *_recovery(result),
    ]


def _quality(result: Result) -> list[KeyNumber]:
    rows = []
    if (test := result.test) is not None:
        rows = [
            KeyNumber("test AUC", words.decimal(test.auc), "1 ranks perfectly, 0.5 guesses"),
            KeyNumber("test NE", words.decimal(test.ne), "under 1 beats predicting the mean label"),
            KeyNumber("test calibration", words.decimal(test.calibration, 3), "above 1 it predicts too many positives"),
            KeyNumber("test log loss", words.decimal(test.logloss), "nats per sample, lower is better"),
        ]
        if test.best_auc is not None:
            rows.insert(1, KeyNumber("best reachable AUC", words.decimal(test.best_auc), "of the true probabilities"))
    if result.train is not None:
        window = words.decimal(result.train.ne_window)
        rows.append(KeyNumber("training NE, last window", window, "predictions made before training on them"))
    return rows


def warnings(result: Result) -> Iterator[str]:
    """What a user must not overlook, a sentence each that says what to do."""
    train = result.config.get("train", {})
    do = f"lower train.lr (it is {train.get('lr')}) or raise train.warmup_samples ({train.get('warmup_samples')})"
    if (units := result.units) is not None and (layers := mostly_dead(units)):
        found = ", ".join(f"{dead_of(units, layer)} of {layer}" for layer in layers)
        blocked = [layer for layer in layers if units.dead[layer] == 1]
        through = f", and nothing of what lies in front of {' and '.join(blocked)} gets through" if blocked else ""
        yield f"dead units: {found} were 0 on all {words.count(units.rows)} test rows looked at{through}: {do}"
    if (peak := went_astray(result)) is not None:
        yield (
            f"training went astray: the log loss of samples {words.count(peak.end - peak.samples + 1)} to "
            f"{words.count(peak.end)} was {peak.logloss:.2f} (NE {words.decimal(peak.ne, 2)}), and always guessing 0.5 "
            f"gives {COIN:.2f}: {do}"
        )


def mostly_dead(units: Units) -> list[str]:
    """The layers of which more than half of the units are dead, as the model calls them."""
    return [layer for layer, share in units.dead.items() if share > DEAD_SHARE]


def dead_of(units: Units, layer: str) -> str:
    """`11 of 16`."""
    return f"{round(units.dead[layer] * units.sizes[layer]):,} of {units.sizes[layer]:,}"


def went_astray(result: Result) -> Peak | None:
    """The worst stretch of the training, if that was far worse than knowing nothing."""
    peak = None if result.train is None else result.train.peak
    return peak if peak is not None and peak.logloss > WILD else None


def _trouble(result: Result) -> Iterator[KeyNumber]:
    if (units := result.units) is not None:
        for layer in mostly_dead(units):
            meaning = f"units that are 0 on all {words.count(units.rows)} test rows looked at"
            yield KeyNumber(f"dead in {layer}", dead_of(units, layer), meaning)
    if (peak := went_astray(result)) is not None:
        meaning = f"log loss {peak.logloss:.2f} over {words.count(peak.samples)} samples, {COIN:.2f} is guessing"
        yield KeyNumber("training NE, worst", words.decimal(peak.ne), meaning)


def _speed(result: Result) -> list[KeyNumber]:
    speed = result.throughput
    eps = "emulated examples/s (EPS)" if speed.emulated_step_ms is not None else "examples/s (EPS)"
    rows = [
        KeyNumber(eps, words.count(speed.eps), "first to last batch, start-up left out"),
        KeyNumber("samples at once (ELP)", words.count(speed.elp), "batch size × workers × trainers"),
        KeyNumber("training time", words.duration(speed.seconds), "first to last batch"),
    ]
    if speed.emulated_step_ms is not None:
        step = words.step_time(speed.emulated_step_ms)
        rows.append(KeyNumber("emulated step", step, "speeds are those of emulated machines"))
    if (computing := result.computing) is not None:
        rows.append(KeyNumber("precision", computing.precision, computing.why or "of the forward and backward pass"))
    if speed.startup_seconds is not None:
        rows.append(KeyNumber("start-up", words.duration(speed.startup_seconds), "before the first batch"))
    return rows


def _synchronisation(result: Result) -> list[KeyNumber]:
    rows = []
    if (sync := result.sync) is not None:
        gap = words.decimal(sync.average_gap, 1)
        rows += [
            KeyNumber("average sync gap", gap, f"steps between syncs ({sync.method}, {sync.schedule})"),
            KeyNumber("synchronisations", words.count(sync.count), "all trainers"),
        ]
    if (aggregation := result.aggregation) is not None:
        staleness = f"{words.decimal(aggregation.mean_staleness, 2)} / {words.count(aggregation.max_staleness)}"
        rows += [
            KeyNumber("global steps", words.count(aggregation.global_steps), _by(aggregation)),
            KeyNumber("dropped gradients", words.count(aggregation.dropped), "too late or too old to be used"),
            KeyNumber("staleness, mean / largest", staleness, "global steps"),
        ]
    return rows


def switch_sentences(result: Result) -> frozenset[str]:
    """What the driver said of switches from one gradient method to another."""
    switches = () if result.aggregation is None else result.aggregation.switches
    return frozenset(switch.sentence for switch in switches)


def _by(aggregation: Aggregation) -> str:
    """Who made the global steps."""
    if aggregation.method is None:
        return "committed by the aggregator"
    switches = f", {words.plural(len(aggregation.switches), 'switch', 'switches')}" if aggregation.switches else ""
    return f"made by {aggregation.method}{switches}"


def _samples(result: Result) -> list[KeyNumber]:
    data = result.data
    rows = [
        KeyNumber(
            "trained samples", words.count(data.trained_samples), f"{words.count(data.train_samples)} in an epoch"
        ),
        KeyNumber("test samples", words.count(data.test_samples), "never trained on"),
    ]
    if data.skipped_rows:
        rows.append(KeyNumber("bad rows skipped", words.count(data.skipped_rows), "data.on_bad_row=skip"))
    return rows


def _recovery(result: Result) -> list[KeyNumber]:
    if (recovery := result.recovery) is None:
        return []
    rows = [KeyNumber("checkpoints", words.count(recovery.saves), f"recovery mode {recovery.mode}")]
    if recovery.failures:
        target = "" if recovery.target_pls is None else f", the target is {recovery.target_pls:g}"
        lost = f"{words.pls(recovery.pls)} (portion of lost samples){target}"
        rows.append(KeyNumber("failures", words.count(recovery.failures), lost))
    return rows
