"""`report.html`: one page, complete in itself, that a person can read without knowing the code."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from shadowsync.metrics.frame import Frame
from shadowsync.metrics.roles import RoleEvent
from shadowsync.recovery.costs import spoken
from shadowsync.report import words
from shadowsync.report.aggregation_section import AGGREGATION_TERMS, make_aggregation
from shadowsync.report.charts import Card, quality_cards, speed_cards
from shadowsync.report.files import write_atomically
from shadowsync.report.recovery_section import PLS_TERM, make_recovery
from shadowsync.report.result import Result
from shadowsync.report.summary import key_numbers, switch_sentences, warnings
from shadowsync.report.timeline import make_timeline
from shadowsync.report.units_section import DEAD_TERM, units_cards

FILE_NAME = "report.html"


@dataclass(frozen=True)
class Headline:
    """A figure with its meaning in words."""

    name: str
    value: str
    meaning: str


TERMS = (
    ("AUC", "The chance that a random positive sample gets a higher prediction than a random negative one."),
    (
        "NE",
        "Normalized entropy: the mean log loss divided by that of always predicting the mean label. "
        "1 means nothing was learned beyond the mean, 0 would be certainty.",
    ),
    ("Calibration", "Mean prediction divided by mean label. 1 is right, 1.1 predicts ten per cent too many positives."),
    ("EPS", "Examples trained per second by the whole job, from the first to the last batch."),
    ("ELP", "Example-level parallelism: batch size × workers per trainer × trainers, the samples in work at once."),
    ("Window", "The last samples trained (report.window of them): what the model does now rather than on average."),
)


REPLICA_TERMS = (
    (
        "Trainer, worker",
        "A trainer holds one replica of the dense part; its workers are threads that update it together.",
    ),
    ("Sync gap", "Steps of a trainer between two synchronisations of its replica with the others."),
)


def write_page(path: Path, result: Result, frames: Sequence[Frame], events: Sequence[RoleEvent] = ()) -> None:
    """Writes the page of one run.

    Raises:
        SaveError: it cannot be written.
    """
    write_atomically(path, render_page(result, frames, events).encode())


def render_page(result: Result, frames: Sequence[Frame], events: Sequence[RoleEvent] = ()) -> str:
    """The page of one run as HTML; with a timeline if there are `events` of its roles."""
    aggregation = make_aggregation(result, frames)
    recovery = make_recovery(result, frames, events)
    emulated = recovery is not None and recovery.emulated
    real = {*switch_sentences(result), *(event.detail for event in events if event.about == "codec")}
    timeline = make_timeline(events, frames, real, emulated=emulated)
    return render(
        "page.html.j2",
        title=_title(result),
        introduction=_introduction(result.config),
        notices=list(_notices(result)),
        headlines=headlines(result),
        quality_cards=marked([*quality_cards(result, frames), *units_cards(result)]),
        speed_cards=marked(speed_cards(result, frames)),
        aggregation=aggregation,
        aggregation_cards=marked([] if aggregation is None else aggregation.cards),
        recovery=recovery,
        recovery_cards=marked([] if recovery is None else recovery.cards),
        timeline=timeline,
        timeline_cards=marked([] if timeline is None else [timeline.card]),
        key_numbers=key_numbers(result),
        terms=terms_of(gradients=aggregation is not None, losses=recovery is not None, units=result.units is not None),
        configuration=list(flat(result.config)),
        environment=[*result.versions.items(), *(result.machine or {}).items(), *_computing(result)],
    )


def _computing(result: Result) -> Iterator[tuple[str, str]]:
    if (computing := result.computing) is not None:
        yield "precision", f"{computing.precision}{f' ({computing.why})' if computing.why else ''}"
        yield "kernels", computing.kernels
        yield from (("other trainers", other) for other in computing.others)


def terms_of(*, gradients: bool, losses: bool, units: bool) -> tuple[tuple[str, str], ...]:
    """What a page explains: quality and speed, and what the methods at work bring with them."""
    by_section = AGGREGATION_TERMS if gradients else REPLICA_TERMS
    return (*TERMS, *by_section, *((PLS_TERM,) if losses else ()), *((DEAD_TERM,) if units else ()))


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


def marked(cards: Sequence[Card]) -> list[dict[str, Any]]:
    """The cards with their SVG marked as safe: matplotlib has escaped the texts in it."""
    return [{**vars(card), "svg": None if card.svg is None else Markup(card.svg)} for card in cards]  # noqa: S704


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """The configuration as `section.key` and value, as overrides are written on the command line."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", words.setting(value)


def headlines(result: Result) -> list[Headline]:
    """The few figures a reader looks for first."""
    return [*_quality_headlines(result), *_job_headlines(result)]


def _quality_headlines(result: Result) -> list[Headline]:
    test = result.test
    if test is None:
        return []
    return [
        Headline("Test AUC", words.decimal(test.auc), _auc_words(test.auc, test.best_auc)),
        Headline("Test NE", words.decimal(test.ne), _entropy_words(test.ne)),
        Headline("Calibration", words.decimal(test.calibration, 3), _calibration_words(test.calibration)),
    ]


def _auc_words(auc: float | None, best: float | None) -> str:
    if auc is None:
        return "Not defined: the test set does not hold both labels."
    reachable = f" The best reachable here is {best:.4f}." if best is not None else ""
    return f"A random positive is ranked above a random negative in {words.percent(auc, 1)} of cases.{reachable}"


def _entropy_words(ne: float | None) -> str:
    if ne is None:
        return "Not defined: the test set does not hold both labels."
    if ne >= 1:
        return "Not better than always predicting the mean label."
    return f"{words.percent(1 - ne, 1)} of the uncertainty of always predicting the mean is gone."


def _calibration_words(calibration: float | None) -> str:
    if calibration is None:
        return "Not defined: the test set holds no positive."
    if abs(calibration - 1) < 0.0005:
        return "As many positives are predicted as there are."
    more = "more" if calibration > 1 else "fewer"
    return f"{words.percent(abs(calibration - 1), 1)} {more} positives are predicted than there are."


def _job_headlines(result: Result) -> list[Headline]:
    speed, sync = result.throughput, result.sync
    trainers = words.plural(len(speed.eps_per_trainer), "trainer")
    samples = words.count(result.data.trained_samples)
    done = f"{samples} samples in {words.duration(speed.seconds)}, by {trainers}."
    name = "Examples per second" if speed.emulated_step_ms is None else "Emulated examples per second"
    found = [Headline(name, words.count(speed.eps), done)]
    if sync is not None and sync.average_gap is not None:
        gap = words.decimal(sync.average_gap, 1)
        found.append(Headline("Sync gap", gap, "Steps of a trainer between two synchronisations, on average."))
    if (aggregation := result.aggregation) is not None:
        stale = words.decimal(aggregation.mean_staleness, 2)
        found.append(Headline("Staleness", stale, "Global steps by which an applied gradient was late, on average."))
    return found


def _title(result: Result) -> str:
    config = result.config
    emulated = "" if result.throughput.emulated_step_ms is None else " (emulated)"
    return f"{_at(config, 'model', 'name', 'a model')} on {_at(config, 'data', 'name', 'data')}{emulated}"


def _notices(result: Result) -> Iterator[str]:
    """What must not be overlooked."""
    yield from (f"Warning: {warning}." for warning in warnings(result))
    step_ms = result.throughput.emulated_step_ms
    if step_ms is not None:
        yield (
            f"Emulated: every step was made to take {words.step_time(step_ms)} (train.emulate_step_ms). Speeds on this "
            "page are those of the emulated machines, not of the one it ran on."
        )
    job_s = None if result.recovery is None else result.recovery.emulated_job_s
    if job_s is not None:
        yield (
            f"Emulated: this run stands for a job of {spoken(job_s)} (recovery.emulate_job_s). Times labelled as "
            "emulated are those of that job; speed, training time and the timeline are the run's own."
        )


def _introduction(config: Mapping[str, Any]) -> str:
    trainers, workers = _number(config, "trainers"), _number(config, "workers")
    method, schedule = _at(config, "sync", "method", "none"), _at(config, "sync", "schedule", "")
    by = f"{words.plural(trainers, 'trainer')} with {words.plural(workers, 'worker')}{' each' if trainers > 1 else ''}"
    if (gradients := _at(config, "aggregation", "method", "None")) != "None":
        return f"A click model, trained by {by}, the gradients aggregated by {gradients}."
    merged = f", the replicas synchronised by {method} ({schedule})" if trainers > 1 and method != "none" else ""
    return f"A click model, trained by {by}{merged}."


def _number(config: Mapping[str, Any], key: str) -> int:
    """A count of the section `train`; 1 where an old or foreign result does not say."""
    value = _at(config, "train", key, "1")
    return int(value) if value.isdigit() else 1


def _at(config: Mapping[str, Any], section: str, key: str, otherwise: str) -> str:
    values = config.get(section)
    return str(values[key]) if isinstance(values, Mapping) and key in values else otherwise
