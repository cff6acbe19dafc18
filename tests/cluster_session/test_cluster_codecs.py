"""Jobs on a cluster that choose their codecs by the link and the steps they see."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cluster_jobs import Tower, cluster_settings
from job_helpers import beside_own_model, write_rows

from shadowsync import Job, Result, assembly
from shadowsync.cluster.trainer import TrainerPart
from shadowsync.compression import choice
from shadowsync.compression.choice import CodecChoice, Link
from shadowsync.compression.codec import Codec
from shadowsync.report.files import read_events
from shadowsync.rpc.connection import EMPTY, Connection, Payload
from shadowsync.rpc.pending import Pending, Promise

STEP_S, SPEED = 0.002, 100_000


@dataclass(frozen=True)
class SlowLink(Connection):
    """A connection whose answers come as late as a link of `speed` bytes per second would have them."""

    inner: Connection
    speed: float

    def call(self, method: str, payload: Payload = EMPTY, timeout_s: float | None = None) -> Pending[Payload]:
        late: Promise[Payload] = Promise()
        asked = self.inner.call(method, payload, timeout_s)

        def answered(error: BaseException | None) -> None:
            if error is not None:
                late.fail(error)
                return
            answer = asked.result()
            seconds = sum(tensor.nbytes for tensor in (*payload.tensors, *answer.tensors)) / self.speed
            timer = threading.Timer(seconds, late.keep, [answer])
            timer.daemon = True
            timer.start()

        asked.then(answered)
        return late

    def close(self) -> None:
        self.inner.close()


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "STRETCH_S", 0.03)


def slow(monkeypatch: pytest.MonkeyPatch, speed: float) -> None:
    measured = TrainerPart._measured

    def slowed(part: TrainerPart, kind: str, index: int, address: str) -> Connection:
        found = measured(part, kind, index, address)
        if isinstance(found, choice.MeasuredConnection):
            return choice.MeasuredConnection(SlowLink(found.inner, speed), found.link)
        return found

    monkeypatch.setattr(TrainerPart, "_measured", slowed)


def run(tmp_path: Path, rows: int = 1600, step_ms: float = 2.0, **sections: Any) -> Result:
    data = write_rows(tmp_path / "rows.parquet", rows)
    train = {"batch_size": 8, "emulate_step_ms": step_ms, "prefetch": 2}
    config = cluster_settings(data, data={"slice_rows": 64}, train=train, **sections)
    if "aggregation" in sections:
        del config["sync"]
    return Job(beside_own_model(config), model=Tower(), out=tmp_path / "out").run()


AUTO = {"name": "auto", "stay_s": 0.1}


@pytest.mark.usefixtures("cluster", "quick_looks")
def test_a_slow_link_leads_to_a_stronger_codec_and_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, speed=30_000)  # so that computing is short beside it on any machine
    result = run(tmp_path, compression={"pull": AUTO, "push": AUTO})
    assert result.wire is not None
    assert set(result.wire.codecs) == {"pull", "push", "dense"}
    assert result.wire.codecs["dense"] == "plain"
    assert result.wire.codecs["pull"] != "plain"
    assert result.wire.bytes["pull"] < result.wire.raw_bytes["pull"]
    told = [event for event in read_events(tmp_path / "out") if event.detail.startswith("compression.")]
    assert {(event.role, event.event) for event in told} == {("trainer-0", "decided")}
    first = next(event.detail for event in told if event.detail.startswith("compression.pull"))
    assert " instead of plain, because the link carries 0.0" in first
    assert first.endswith("above share=0.8, and workers wait")
    frames = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert frames[0]["wire_codecs"] == {"pull": "plain", "push": "plain"}


@pytest.mark.usefixtures("cluster", "quick_looks")
def test_a_quick_link_stays_plain_and_nothing_is_told(tmp_path: Path) -> None:
    result = run(tmp_path, rows=160, step_ms=20.0, compression={"pull": AUTO, "push": AUTO})
    assert result.wire is not None
    assert result.wire.codecs == dict.fromkeys(("pull", "push", "dense"), "plain")
    assert result.wire.bytes == result.wire.raw_bytes
    assert not any(event.detail.startswith("compression.") for event in read_events(tmp_path / "out"))


class PacedLink(Link):
    """What crosses took as long as on a link of `SPEED` bytes per second, however busy this machine is."""

    def take(self, kind: str) -> tuple[float, int, int]:
        _, fixed_bytes, float_bytes = super().take(kind)
        return (fixed_bytes + float_bytes) / SPEED, fixed_bytes, float_bytes


class PacedChoice(CodecChoice):
    """Every step computes and waits for `STEP_S` each, and no other time passes."""

    def __init__(self, codecs: Mapping[str, Codec], workers: int, overlapped: bool, elastic: bool) -> None:
        self._now = 0.0
        super().__init__(codecs, workers, overlapped, elastic, lambda: self._now)
        self._link = PacedLink(lambda: self._now)

    def stepped(self, computed_s: float, waited_s: float) -> None:
        self._now += 2 * STEP_S
        super().stepped(STEP_S, STEP_S)


FAMILIES: dict[str, dict[str, Any]] = {
    "replicas in the background": {"sync": {"method": "easgd"}},
    "replicas in the foreground": {"sync": {"method": "easgd", "schedule": "every_k", "k": 1}},
    "gradients": {"aggregation": {"method": "async"}},
}


@pytest.mark.usefixtures("cluster", "quick_looks")
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_dense_part_gets_out_of_the_way_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: dict[str, Any]
) -> None:
    monkeypatch.setattr(assembly, "CodecChoice", PacedChoice)
    result = run(tmp_path, rows=800, compression={"pull": AUTO, "dense": AUTO}, **family)
    assert result.wire is not None
    assert result.wire.codecs["dense"] != "plain"
    assert result.wire.bytes["dense"] < result.wire.raw_bytes["dense"]


@pytest.mark.usefixtures("cluster", "quick_looks")
def test_averages_are_plain_and_say_so(tmp_path: Path) -> None:
    result = run(tmp_path, rows=100, compression={"dense": "auto"}, sync={"method": "ma"})
    assert result.wire is not None
    assert result.wire.codecs["dense"] == "plain"
    told = {event.detail for event in read_events(tmp_path / "out") if event.role == "driver"}
    said = "all trainers have to send alike to be averaged by sync.method=ma"
    assert f"compression.dense=auto is plain, because {said}" in told
