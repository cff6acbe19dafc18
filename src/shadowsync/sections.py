"""The sections of result.json, filled from a finished session."""

from shadowsync.cluster.session import Session, by_name
from shadowsync.config import TrainConfig
from shadowsync.metrics.quality import TestMetrics
from shadowsync.metrics.recorder import Speed, average_sync_gap, example_level_parallelism
from shadowsync.metrics.wire import kept_shares
from shadowsync.recovery_controller import RecoveryController
from shadowsync.report import result


def data(session: Session, test: TestMetrics | None) -> result.Data:
    """How many samples there were and how many were trained."""
    skipped = sum(epoch.skipped for epoch in session.reader.epochs())
    if session.test_source is not None:
        skipped += session.test_source.rows - (test.samples if test is not None else 0)
    return result.Data(
        train_samples=session.train_source.rows,
        trained_samples=session.reader.trained,
        test_samples=test.samples if test is not None else 0,
        skipped_rows=skipped or None,
    )


def test(session: Session, measured: TestMetrics | None) -> result.Test | None:
    """Quality on the test rows."""
    if measured is None or session.test_source is None:
        return None
    return result.Test(
        auc=measured.auc,
        ne=measured.ne,
        logloss=measured.logloss,
        calibration=measured.calibration,
        best_auc=session.test_source.best_auc,
        curve=measured.curve,
    )


def train(session: Session) -> result.Train:
    """Quality of the predictions made before each sample was trained on."""
    quality = session.recorder.quality
    return result.Train(
        ne_window=quality.ne_window, ne_lifetime=quality.lifetime.ne, auc=quality.auc, peak=quality.peak
    )


def computing(session: Session) -> result.Computing | None:
    """How workers computed; None where no trainer was ever there to say so."""
    ways = session.computing()
    if not ways:
        return None
    several = [f"{way.precision}, {way.kernels}" for way in ways[1:]]
    return result.Computing(
        precision=ways[0].precision, kernels=ways[0].kernels, why=ways[0].why or None, others=tuple(several)
    )


def throughput(config: TrainConfig, speed: Speed, startup_s: float) -> result.Throughput:
    """Examples per second from the first to the last batch."""
    return result.Throughput(
        seconds=speed.seconds,
        eps=speed.eps,
        elp=example_level_parallelism(config.batch_size, config.workers, config.trainers),
        eps_per_trainer=speed.eps_per_trainer,
        startup_seconds=startup_s,
        emulated_step_ms=config.emulate_step_ms,
    )


def sync(session: Session, speed: Speed) -> result.Sync | None:
    """How often replicas met; None where there are none."""
    if session.choices.aggregation is not None:
        return None
    return result.Sync(
        method=session.choices.method.name,
        schedule=session.choices.schedule.name,
        count=session.sync_count,
        average_gap=average_sync_gap(speed.iterations, session.sync_count),
    )


def aggregation(session: Session) -> result.Aggregation | None:
    """What a gradient method did."""
    done, chosen = session.aggregation, session.choices.aggregation
    if done is None or chosen is None:
        return None
    return result.Aggregation(
        global_steps=done.global_steps,
        dropped=done.dropped,
        mean_staleness=done.mean_staleness,
        max_staleness=done.max_staleness,
        method=chosen.method.name,
        mode=done.mode,
        received=done.received,
        staleness=done.staleness,
        switches=done.switches,
        step_seconds=by_name(session.mean_step_s()),
        most_held_bytes=session.most_held_bytes,
    )


def wire(session: Session) -> result.Wire:
    """Bytes between roles, how they crossed, and what thresholds let pass."""
    totals = session.wire_totals()
    return result.Wire(
        bytes=totals["bytes"],
        raw_bytes=totals["raw_bytes"],
        codecs=session.codecs(),
        kept_share=kept_shares(totals),
        refreshes=totals["refreshes"],
        early_refreshes=totals["early"],
    )


def recovery(session: Session, controller: RecoveryController, load_s: float) -> result.Recovery:
    """Checkpoints written and read, and roles that died.

    No sample is lost and nobody waits when a trainer dies: the others train its rows.
    """
    settings = controller.settings
    return result.Recovery(
        failures=session.failures,
        pls=controller.account.pls,
        saves=controller.saver.saves,
        seconds=result.RecoverySeconds(**controller.seconds(load_s)),
        interval_s=controller.interval_s,
        mode=controller.mode,
        target_pls=controller.target_pls,
        priority=settings.priority if controller.mode == "partial" else None,
        why=controller.why or None,
        emulated_job_s=settings.job_s,
        rounds=controller.rounds if settings.saves else None,
        server_failures=controller.server_failures if settings.saves else None,
    )
