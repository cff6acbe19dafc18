"""result.json, filled from a finished session; what is converted has fields of the same names."""

from typing import Any

import msgspec

from shadowsync.cluster.session import Session, by_name
from shadowsync.metrics.quality import TestMetrics
from shadowsync.metrics.recorder import average_sync_gap
from shadowsync.metrics.units import Units
from shadowsync.recovery_controller import RecoveryController
from shadowsync.report import result


def make_result(
    config: dict[str, Any],
    session: Session,
    keeping: RecoveryController,
    startup_s: float,
    load_s: float,
    test: TestMetrics | None,
    units: Units | None,
    validation: result.ValidationSection | None,
    ended: result.EndedSection,
) -> result.Result:
    """All sections; `config` holds every default, `test` and `units` are of the test rows."""
    train, quality, speed = session.config.train, session.recorder.quality, session.recorder.speed()
    return result.Result(
        config=config,
        seed=train.seed,
        versions=result.versions(),
        machine=result.machine(),
        data=_data(session, test, validation),
        ended=ended,
        validation=validation,
        test=_test(session, test),
        units=units,
        train=result.TrainSection(
            ne_window=quality.ne_window, ne_lifetime=quality.ne_lifetime, auc=quality.auc, peak=quality.peak
        ),
        computing=_computing(session),
        throughput=result.ThroughputSection(
            seconds=speed.seconds,
            eps=speed.eps,
            elp=train.batch_size * train.workers * train.trainers,
            eps_per_trainer=speed.eps_per_trainer,
            startup_seconds=startup_s,
            emulated_step_ms=train.emulate_step_ms,
        ),
        sync=_sync(session, speed.iterations),
        wire=_wire(session),
        aggregation=_aggregation(session),
        keys=result.KeysSection(**counted) if (counted := session.key_counts()) else None,
        stored=result.StoredSection(**counted) if (counted := session.stored_counts()) else None,
        recovery=_recovery(session, keeping, load_s),
    )


def _data(
    session: Session, test: TestMetrics | None, validation: result.ValidationSection | None
) -> result.DataSection:
    test_samples = test.samples if test is not None else 0
    skipped = session.reader.skipped
    if session.test_source is not None:
        skipped += session.test_source.rows - test_samples
    return result.DataSection(
        train_samples=session.train_source.rows,
        trained_samples=session.reader.trained,
        test_samples=test_samples,
        valid_samples=None if validation is None else validation.rows,
        skipped_rows=skipped or None,
    )


def _test(session: Session, measured: TestMetrics | None) -> result.TestSection | None:
    if measured is None or session.test_source is None:
        return None
    found = msgspec.convert(measured, result.TestSection, from_attributes=True)
    return msgspec.structs.replace(found, best_auc=session.test_source.best_auc)


def _computing(session: Session) -> result.ComputingSection | None:
    """None where no trainer was ever there to say so."""
    if not (ways := session.computing()):
        return None
    others = tuple(f"{way.precision}, {way.kernels}" for way in ways[1:])
    return result.ComputingSection(ways[0].precision, ways[0].kernels, ways[0].why or None, others)


def _sync(session: Session, iterations: int) -> result.SyncSection | None:
    if (chosen := session.choices).aggregation is not None:
        return None
    syncs = session.sync_count
    return result.SyncSection(chosen.method.name, chosen.schedule.name, syncs, average_sync_gap(iterations, syncs))


def _wire(session: Session) -> result.WireSection:
    totals = session.wire_totals()
    return result.WireSection(
        bytes=totals.bytes,
        raw_bytes=totals.raw_bytes,
        codecs=session.codecs(),
        kept_share=totals.kept_shares,
        refreshes=totals.refreshes,
        early_refreshes=totals.early,
    )


def _aggregation(session: Session) -> result.AggregationSection | None:
    done, chosen, coordinator = session.aggregation, session.choices.aggregation, session.coordinator
    if done is None or chosen is None or coordinator is None:
        return None
    return msgspec.structs.replace(
        msgspec.convert(done, result.AggregationSection, from_attributes=True),
        method=chosen.method.name,
        step_seconds=by_name(coordinator.mean_step_s()),
        most_held_bytes=session.most_held_bytes,
    )


def _recovery(session: Session, keeping: RecoveryController, load_s: float) -> result.RecoverySection:
    """No sample is lost and nobody waits when a trainer dies: the others train its rows."""
    settings = keeping.settings
    return result.RecoverySection(
        failures=session.failures,
        pls=keeping.account.pls,
        saves=keeping.saves,
        seconds=result.RecoverySeconds(**keeping.seconds(load_s)),
        interval_s=keeping.interval_s,
        mode=keeping.mode,
        target_pls=keeping.target_pls,
        priority=settings.priority if keeping.mode == "partial" else None,
        why=keeping.why or None,
        emulated_job_s=settings.job_s,
        rounds=keeping.rounds if settings.saves else None,
        server_failures=keeping.server_failures if settings.saves else None,
        lost_servers=keeping.lost_servers if settings.saves else None,
        moves=session.moves,
    )
