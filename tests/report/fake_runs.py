"""Runs that never happened but look like it, for the tests of the report."""

import math
import random
from functools import cache
from typing import Any

import msgspec
import torch

from shadowsync.aggregation.aggregator import Switch
from shadowsync.config import Config
from shadowsync.metrics.history import Frame, RoleEvent
from shadowsync.metrics.quality import evaluate_scores
from shadowsync.report.page import render_page
from shadowsync.report.result import (
    AggregationSection,
    DataSection,
    RecoverySeconds,
    RecoverySection,
    Result,
    SyncSection,
    TestSection,
    ThroughputSection,
    TrainSection,
    WireSection,
    machine,
    versions,
)

TOTAL = 1_270_000


def make_frames(count: int = 32, trainers: int = 2, seed: int = 0) -> list[Frame]:
    """A run of `count` seconds: curves that settle, rates that jitter, a dip in the middle."""
    dice = random.Random(seed)
    return [_frame(i, count, trainers, dice) for i in range(1, count + 1)]


def _frame(i: int, count: int, trainers: int, dice: random.Random) -> Frame:
    share = i / count
    each = tuple(
        TOTAL / count / trainers * dice.uniform(0.93, 1.07) * (0.7 if i == count // 2 else 1) for _ in range(trainers)
    )
    ne = 0.58 + 0.5 * math.exp(-9 * share) + dice.gauss(0, 0.004)
    return Frame(
        seconds=i * 1.0,
        samples=round(TOTAL * share),
        total_samples=TOTAL,
        eps=sum(each),
        eps_per_trainer=each,
        auc=0.915 - 0.2 * math.exp(-6 * share) / (0.4 + share),
        ne_window=ne,
        ne_lifetime=0.62 + 0.4 * math.exp(-3 * share),
        loss=0.5 * ne,
        sync_count=i * 140,
        sync_gap=dice.uniform(9, 12) * trainers / 2 if trainers > 1 else None,
        replica_distance=0.02 + 0.03 * math.exp(-5 * share) + dice.gauss(0, 0.0005) if trainers > 1 else None,
        wire_bytes={"pull": i * 40_000_000, "push": i * 40_000_000, "dense": i * 22_000_000},
        saves=0,
    )


def make_failing_frames(count: int = 32, trainers: int = 3) -> list[Frame]:
    """Such a run under partial recovery, with three failures and four checkpoints in even steps."""
    found = []
    for i, frame in enumerate(make_frames(count, trainers), start=1):
        failures, saves = int(3 * i / count + 1e-9), int(4 * i / count)
        spent = {"save": 2.5 * saves, "load": 0.75 * failures, "lost": 0.0, "wait": 6.0 * failures}
        told = {"pls": 0.021 * failures, "target_pls": 0.1, "recovery_seconds": spent}
        found.append(msgspec.structs.replace(frame, saves=saves, failures=failures, **told))
    return found


def make_recovery_result(**figures: Any) -> RecoverySection:
    """What `make_failing_frames` ends with."""
    known: dict[str, Any] = {
        "failures": 3,
        "pls": 0.063,
        "saves": 4,
        "seconds": RecoverySeconds(save=10.0, load=2.25, lost=0.0, wait=18.0),
        "interval_s": 161_280.0,
        "mode": "partial",
        "target_pls": 0.1,
        "priority": "all",
        "why": "partial recovery: 0.60 % of the time with a save every 44.8 h, and full recovery 8.35 % of the time "
        "with a save every 2.3 h; a PLS of 0.1 is expected, the target is 0.1",
    }
    return RecoverySection(**{**known, **figures})


def make_gradient_frames(count: int = 32, workers: int = 8) -> list[Frame]:
    """A run under `auto` that is busy in its middle third: gba is at work there, and every eighth worker is slow."""
    return [_aggregated(frame, (i + 1) / count, workers) for i, frame in enumerate(make_frames(count, 1))]


def _aggregated(frame: Frame, share: float, workers: int) -> Frame:
    busy = 1 / 3 < share <= 2 / 3
    return msgspec.structs.replace(
        frame,
        global_steps=round(900 * share),
        dropped=round(300 * min(1 / 3, max(0.0, share - 1 / 3))),
        aggregation_mode="gba" if busy else "sync",
        staleness=1.4 + 0.2 * share if busy else 0.0,
        step_seconds={f"0.{i}": 0.2 if busy and i % 8 == 0 else 0.04 + 0.001 * i for i in range(workers)},
        held_bytes=2_000_000,
    )


def make_aggregation(workers: int = 8, **figures: Any) -> AggregationSection:
    """What `make_gradient_frames` ends with."""
    known: dict[str, Any] = {
        "global_steps": 900,
        "dropped": 100,
        "mean_staleness": 0.5,
        "max_staleness": 4,
        "method": "auto",
        "mode": "sync",
        "received": 14_400,
        "staleness": ((0, 9000), (1, 3800), (2, 1200), (4, 300)),
        "switches": (
            Switch(300, "gba", "stragglers cost synchronous rounds 61 %, above share=20 % for 5 commits"),
            Switch(600, "sync", "stragglers cost synchronous rounds 2 %, below <even>=10 % for 5 commits"),
        ),
        "step_seconds": {f"0.{i}": 0.09 if i % 8 == 0 else 0.04 + 0.001 * i for i in range(workers)},
        "most_held_bytes": 6_300_000,
    }
    return AggregationSection(**{**known, **figures})


def make_gradient_result(workers: int = 8, **sections: Any) -> Result:
    """The result of such a run."""
    train = {"trainers": 1, "workers": workers}
    config = Config.model_validate({"train": train, "aggregation": {"method": "auto"}}).model_dump(mode="json")
    return make_result(1, **{"config": config, "sync": None, "aggregation": make_aggregation(workers), **sections})


def make_switch_events() -> list[RoleEvent]:
    """As the driver told of those switches."""
    starts = [RoleEvent(0.0, role, "alive") for role in ("driver", "trainer-0")]
    told = [
        RoleEvent(10.0 * (i + 1), "driver", "decided", s.sentence) for i, s in enumerate(make_aggregation().switches)
    ]
    return starts + told


def make_decisions() -> list[RoleEvent]:
    """The driver chooses at the start and once more."""
    first = "partial recovery: 0.60 % of the time with a save every 44.8 h"
    anew = "recovery is chosen anew (time between failures is 11 s, was 28 h): full recovery with a save <every> 4 s"
    return [RoleEvent(0.0, "driver", "decided", first), RoleEvent(20.0, "driver", "decided", anew)]


def make_result(trainers: int = 2, **sections: Any) -> Result:
    """The result of such a run; keyword arguments replace sections."""
    elp = 512 * trainers
    known: dict[str, Any] = {
        "config": Config.model_validate({"train": {"trainers": trainers}}).model_dump(mode="json"),
        "seed": 0,
        "versions": versions(),
        "machine": machine(),
        "data": DataSection(train_samples=TOTAL, trained_samples=TOTAL, test_samples=310_000),
        "train": TrainSection(ne_window=0.5812, ne_lifetime=0.6401),
        "test": make_test(),
        "throughput": ThroughputSection(
            seconds=32.0, eps=39_687.5, elp=elp, eps_per_trainer=(19_800.0,) * trainers, startup_seconds=4.2
        ),
        "sync": SyncSection(method="easgd", schedule="background", count=4480, average_gap=10.4),
        "wire": WireSection(
            bytes={"pull": 1_280_000_000, "push": 1_280_000_000, "dense": 704_000_000},
            raw_bytes={"pull": 2_560_000_000, "push": 2_560_000_000, "dense": 704_000_000},
        ),
    }
    return Result(**{**known, **sections})


def make_test(samples: int = 20_000, **figures: Any) -> TestSection:
    """A test set whose positives have higher logits, slightly overpredicted."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(samples, generator=generator) * 2.2 - 2.4
    labels = (torch.rand(samples, generator=generator) < (logits - 0.1).sigmoid()).float()
    metrics = evaluate_scores(logits, labels)
    known = {name: getattr(metrics, name) for name in ("auc", "ne", "logloss", "calibration", "curve")}
    return TestSection(**{**known, **figures})


def make_events(seconds: float = 32.0, trainers: int = 3) -> list[RoleEvent]:
    """A run on a cluster in which a trainer dies, a server is lost and another cut off, and a checkpoint is written."""
    roles = ["driver", "reader-0", *(f"trainer-{rank}" for rank in range(trainers)), "embedding-0", "embedding-1"]
    told = [(0.0, role, "alive", "") for role in [*roles, "dense-0"]]
    told += [(0.30, "trainer-1", "dead", "its process was killed by signal 9"), (0.36, "trainer-1", "restarted", "")]
    told += [(0.42, "trainer-1", "restored", "dense copy taken from dense-0")]
    told += [(0.50, role, "saving", "") for role in roles[-2:]] + [(0.55, role, "saved", "") for role in roles[-2:]]
    told += [(0.60, "embedding-0", "dead", "node lost"), (0.64, "embedding-0", "restarted", "on <another> node")]
    told += [(0.70, "embedding-0", "restored", "loaded checkpoint step-120")]
    told += [(0.72, "dense-0", "unreachable", "no sign of life for 5 s"), (0.80, "dense-0", "reachable", "")]
    told += [(1.0, role, "left", "") for role in [*roles, "dense-0"]]
    return [RoleEvent(share * seconds, role, event, detail) for share, role, event, detail in told]  # type: ignore[arg-type]


@cache
def page_of(name: str) -> str:
    """The page of such a run; drawn once, for drawing is what takes the time."""
    match name:
        case "full":
            return render_page(make_result(test=make_test(best_auc=0.95)), make_frames())
        case "cluster":
            emulated = ThroughputSection(32.0, eps=9e4, elp=512, eps_per_trainer=(3e4,) * 3, emulated_step_ms=20.0)
            return render_page(make_result(3, throughput=emulated), make_frames(32, 3), make_events())
        case "recovery":
            recovery = make_recovery_result(emulated_job_s=72_000.0)
            events = [*make_events(), *make_decisions()]
            return render_page(make_result(3, recovery=recovery), make_failing_frames(), events)
        case "gradients":
            return render_page(make_gradient_result(), make_gradient_frames(), make_switch_events())
        case "bare":
            return render_page(make_result(1, test=None, train=None, sync=None, wire=None, machine=None), [])
    raise ValueError(name)
