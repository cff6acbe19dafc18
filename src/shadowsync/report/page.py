"""`report.html`: one page, complete in itself, that a person can read without knowing the code."""

from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2

from shadowsync.metrics.history import Frame, RoleEvent
from shadowsync.recovery.policy import spoken
from shadowsync.report import words
from shadowsync.report.cards import (
    aggregation_section,
    quality_cards,
    recovery_section,
    speed_cards,
    switch_sentences,
    timeline_section,
)
from shadowsync.report.files import write_atomically
from shadowsync.report.measures import KeyNumber, asked_for, key_numbers
from shadowsync.report.result import Result, TestSection, warnings

FILE_NAME = "report.html"


def write_page(path: Path, result: Result, frames: Sequence[Frame], events: Sequence[RoleEvent] = ()) -> None:
    """Writes the page of one run; `SaveError` if it cannot be written."""
    write_atomically(path, render_page(result, frames, events).encode())


def render_page(result: Result, frames: Sequence[Frame], events: Sequence[RoleEvent] = ()) -> str:
    """The page of one run as HTML; with a timeline if there are `events` of its roles."""
    aggregation = aggregation_section(result, frames)
    recovery = recovery_section(result, frames, events)
    real = {*switch_sentences(result), *(event.detail for event in events if event.about == "codec")}
    of_another_job = recovery is not None and result.recovery is not None and result.recovery.emulated_job_s is not None
    environment = [*result.versions.items(), *(result.machine or {}).items()]
    if (computing := result.computing) is not None:
        environment.append(("precision", f"{computing.precision}{f' ({computing.why})' if computing.why else ''}"))
        environment.append(("kernels", computing.kernels))
        environment += [("other trainers", other) for other in computing.others]
    emulated = "" if result.throughput.emulated_step_ms is None else " (emulated)"
    config = result.config
    return render(
        "page.html.j2",
        title=f"{_at(config, 'model', 'name', 'a model')} on {_at(config, 'data', 'name', 'data')}{emulated}",
        introduction=_introduction(config),
        notices=list(_notices(result)),
        headlines=headlines(result),
        quality_cards=quality_cards(result, frames),
        speed_cards=speed_cards(result, frames),
        aggregation=aggregation,
        recovery=recovery,
        recovery_why=result.recovery and result.recovery.why,
        recovery_emulated=of_another_job,
        timeline=timeline_section(events, frames, real, emulated=of_another_job),
        key_numbers=key_numbers(result),
        dead_units=result.units is not None,
        configuration=list(flat(config)),
        environment=environment,
    )


def render(template: str, **values: Any) -> str:
    """A template filled in; everything but the SVGs is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("shadowsync.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(version=version("shadowsync"), **values)


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The configuration as `section.key` and value, as overrides are written on the command line."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", words.setting(value)


def headlines(result: Result) -> list[KeyNumber]:
    """The few figures a reader looks for first."""
    speed, sync, aggregation = result.throughput, result.sync, result.aggregation
    found = [] if result.test is None else _test_headlines(result.test)
    trainers = words.plural(len(speed.eps_per_trainer), "trainer")
    done = f"{words.count(result.data.trained_samples)} samples in {words.duration(speed.seconds)}, by {trainers}."
    name = "Examples per second" if speed.emulated_step_ms is None else "Emulated examples per second"
    found.append(KeyNumber(name, words.count(speed.eps), done))
    if sync is not None and sync.average_gap is not None:
        gap = words.decimal(sync.average_gap, 1)
        found.append(KeyNumber("Sync gap", gap, "Steps of a trainer between two synchronisations, on average."))
    if aggregation is not None:
        stale = words.decimal(aggregation.mean_staleness, 2)
        found.append(KeyNumber("Staleness", stale, "Global steps by which an applied gradient was late, on average."))
    return found


def _test_headlines(test: TestSection) -> list[KeyNumber]:
    if test.loss != "logloss":
        gone = "Share of the loss of always predicting the mean label that is left."
        return [*asked_for(test), KeyNumber("Test NE", words.decimal(test.ne), gone)]
    ranks = predicts = "Not defined: the test set does not hold both labels."
    if test.auc is not None:
        ranks = f"A random positive is ranked above a random negative in {words.percent(test.auc, 1)} of cases."
        if test.best_auc is not None:
            ranks += f" The best reachable here is {test.best_auc:.4f}."
    if test.ne is not None:
        gone = f"{words.percent(1 - test.ne, 1)} of the uncertainty of always predicting the mean is gone."
        predicts = gone if test.ne < 1 else "Not better than always predicting the mean label."
    if test.calibration is None:
        balance = "Not defined: the test set holds no positive."
    elif abs(test.calibration - 1) < 0.0005:
        balance = "As many positives are predicted as there are."
    else:
        more = "more" if test.calibration > 1 else "fewer"
        balance = f"{words.percent(abs(test.calibration - 1), 1)} {more} positives are predicted than there are."
    return [
        KeyNumber("Test AUC", words.decimal(test.auc), ranks),
        KeyNumber("Test NE", words.decimal(test.ne), predicts),
        KeyNumber("Calibration", words.decimal(test.calibration, 3), balance),
    ]


def _notices(result: Result) -> Iterator[str]:
    """What must not be overlooked."""
    yield from (f"Warning: {warning}." for warning in warnings(result))
    if (step_ms := result.throughput.emulated_step_ms) is not None:
        yield (
            f"Emulated: every step was made to take {words.step_time(step_ms)} (train.emulate_step_ms). Speeds on this "
            "page are those of the emulated machines, not of the one it ran on."
        )
    if (job_s := None if result.recovery is None else result.recovery.emulated_job_s) is not None:
        yield (
            f"Emulated: this run stands for a job of {spoken(job_s)} (recovery.emulate_job_s). Times labelled as "
            "emulated are those of that job; speed, training time and the timeline are the run's own."
        )


def _introduction(config: Mapping[str, Any]) -> str:
    given = [_at(config, "train", key, "1") for key in ("trainers", "workers")]
    trainers, workers = (int(value) if value.isdigit() else 1 for value in given)  # an old result may not say
    method, schedule = _at(config, "sync", "method", "none"), _at(config, "sync", "schedule", "")
    by = f"{words.plural(trainers, 'trainer')} with {words.plural(workers, 'worker')}{' each' if trainers > 1 else ''}"
    if (gradients := _at(config, "aggregation", "method", "None")) != "None":
        return f"A click model, trained by {by}, the gradients aggregated by {gradients}."
    merged = f", the replicas synchronised by {method} ({schedule})" if trainers > 1 and method != "none" else ""
    return f"A click model, trained by {by}{merged}."


def _at(config: Mapping[str, Any], section: str, key: str, otherwise: str) -> str:
    values = config.get(section)
    return str(values[key]) if isinstance(values, Mapping) and key in values else otherwise
