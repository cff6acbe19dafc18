"""Whole jobs under thresholds: exact where everything is kept, counted, resumed with what was not sent."""

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from job_helpers import SMALL_DLRM, beside_own_model, checkpoints, decided, fails, result_of, settings, write_rows
from safetensors.torch import load_file
from test_gradient_methods import gradient_settings, weights
from test_resume import SignalAt
from torch import Tensor, nn

from shadowsync import CompressedCut, Job, Trained
from shadowsync.compression.threshold import Threshold
from shadowsync.errors import CheckpointError, ConfigError
from shadowsync.report.files import read_frames

EVERYTHING = {"name": "threshold", "keep": 1.0}
WIDE_DLRM = {"name": "dlrm", "bottom": [64], "top": [64, 32]}
"""Some of its parameters have 256 elements and more."""


def trained(config: dict[str, Any], out: Path) -> dict[str, torch.Tensor]:
    """Everything that was trained, without what codecs keep."""
    Job(config, out=out).run()
    return {name: tensor for name, tensor in weights(out).items() if not name.startswith("feedback.")}


@pytest.mark.parametrize("method", ["sync", "gba", None])
def test_keeping_everything_is_the_plain_job_bit_for_bit(tmp_path: Path, method: str | None) -> None:
    data = write_rows(tmp_path / "rows.parquet", 96)
    sections: dict[str, Any] = {
        "model": WIDE_DLRM,
        "train": {"batch_size": 8},
        "embedding": {"servers": 2, "unique_rows": "auto"},
    }
    kinds = ("pull", "push") if method is None else ("pull", "push", "dense")
    found = []
    for name, codec in (("plain", "plain"), ("kept", EVERYTHING)):
        given = {kind: codec if kind != "push" or codec == "plain" else "plain" for kind in kinds}
        given = {**sections, "compression": given}
        config = settings(data, data, **given) if method is None else gradient_settings(data, method, **given)
        found.append(trained(config, tmp_path / name))
    assert found[0].keys() == found[1].keys()
    assert [name for name in found[0] if not torch.equal(found[0][name], found[1][name])] == []
    wire = result_of(tmp_path / "kept")["wire"]
    assert wire["kept_share"] == dict.fromkeys(kinds, 1.0)
    assert "kept_share" not in result_of(tmp_path / "plain")["wire"]


def test_what_a_threshold_lets_pass_is_told(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 640)
    sections = {
        "model": WIDE_DLRM,
        "train": {"batch_size": 64},
        "compression": {
            "pull": {"name": "threshold", "keep": 0.25},
            "push": "int8",
            "dense": {"name": "threshold", "keep": 0.1, "refresh": 4},
        },
    }
    result = Job(gradient_settings(data, "sync", **sections), out=tmp_path / "out").run()
    assert result.wire.kept_share.keys() == {"pull", "push", "dense"}
    assert result.wire.kept_share["push"] == result.wire.kept_share["pull"] == pytest.approx(0.25, abs=0.05)
    assert 0.1 < result.wire.kept_share["dense"] < 0.5
    assert min(result.wire.refreshes["pull"], result.wire.refreshes["dense"]) >= 1
    assert result.wire.bytes["push"] < result.wire.raw_bytes["push"] / 10
    assert json.loads((tmp_path / "out" / "result.json").read_text())["wire"]["refreshes"] == result.wire.refreshes
    frames = [frame for frame in read_frames(tmp_path / "out") if frame.wire_kept_share]
    assert frames
    assert frames[-1].wire_refreshes == result.wire.refreshes


def sparse(data: Path, **sections: Any) -> dict[str, Any]:
    return gradient_settings(
        data,
        "sync",
        model=WIDE_DLRM,
        data={"epochs": 3, "slice_rows": 16},
        compression={"dense": {"name": "threshold", "keep": 0.02}},
        **sections,
    )


def interrupt(config: dict[str, Any], out: Path, iteration: int) -> None:
    script = SignalAt(iteration)
    script.run(Job(config, out=out, failures=script))


def residuals(out: Path) -> dict[str, torch.Tensor]:
    dense = load_file(checkpoints(out)[-1] / "dense.safetensors")
    return {name: tensor for name, tensor in dense.items() if name.startswith("feedback.")}


def test_what_was_not_sent_goes_on_after_a_resume_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parameters that always come whole, as they do after a resume; what they leave out is not in checkpoints."""
    monkeypatch.setattr(Threshold, "of_differences", lambda codec: replace(codec, keep=1.0, feedback=False))
    data = write_rows(tmp_path / "rows.parquet", 96)
    config = sparse(data, train={"batch_size": 8})
    Job(config, out=tmp_path / "whole").run()
    interrupt(config, tmp_path / "out", 11)
    kept = residuals(tmp_path / "out")
    assert any(bool(tensor.any()) for name, tensor in kept.items() if name.endswith(".residual"))
    Job(config, out=tmp_path / "out", resume=tmp_path / "out").run()
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "out")
    assert whole.keys() == resumed.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


@pytest.mark.parametrize(
    ("change", "goes_on"),
    [
        ({"compression": {"dense": "plain"}}, []),
        ({"compression": {"dense": {"name": "threshold", "values": "int8", "rounding": "stochastic"}}}, ["0.0", "0.1"]),
        ({"train": {"workers": 1}, "aggregation": {"global_batch": 16}}, ["0.0"]),
        ({"train": {"workers": 3}, "aggregation": {"global_batch": 16}}, ["0.0", "0.1", "0.2"]),
    ],
    ids=["another codec", "other values", "fewer workers", "more workers"],
)
def test_a_job_goes_on_without_what_belongs_to_nobody_any_more(
    tmp_path: Path, change: dict[str, Any], goes_on: list[str]
) -> None:
    data = write_rows(tmp_path / "rows.parquet", 96)
    config = sparse(data, train={"batch_size": 8, "workers": 2})
    interrupt(config, tmp_path / "out", 5)
    resumed = {name: section | change.get(name, {}) for name, section in config.items()}
    result = Job(resumed, out=tmp_path / "new", resume=tmp_path / "out").run()
    assert result.data.trained_samples == 288
    workers = {".".join(name.split(".")[1:3]) for name in residuals(tmp_path / "new")}
    assert sorted(workers) == goes_on


def test_elastic_differences_cross_through_a_threshold(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 640)
    found, wires = {}, {}
    for name, codec in (("plain", "plain"), ("kept", EVERYTHING), ("few", {"name": "threshold", "keep": 0.05})):
        config = settings(
            data,
            data,
            model=WIDE_DLRM,
            sync={"method": "easgd", "schedule": "every_k", "k": 1, "alpha": 0.5},
            train={"batch_size": 16},
            cluster={"dense_servers": 2},
            compression={"dense": codec},
        )
        found[name] = trained(config, tmp_path / name)
        wires[name] = result_of(tmp_path / name)["wire"]
    assert [name for name in found["plain"] if not torch.equal(found["plain"][name], found["kept"][name])] == []
    assert wires["kept"]["bytes"] == wires["plain"]["bytes"]
    assert 0.02 < wires["few"]["kept_share"]["dense"] < 0.2
    assert wires["few"]["bytes"]["dense"] < wires["few"]["raw_bytes"]["dense"] / 3
    apart = (found["few"]["replica.0.weight"] - found["few"]["center"]).norm() / found["few"]["center"].norm()
    assert float(apart) < 0.2


def synthetic(codec: Any, **sync: Any) -> dict[str, Any]:
    return {
        "data": {
            "name": "synthetic",
            "rows": 40_000,
            "test_rows": 20_000,
            "features": 4,
            "dense": 4,
            "table_rows": 200,
        },
        "model": WIDE_DLRM,
        "embedding": {"storage": "torch"},
        "train": {"trainers": 4, "batch_size": 128},
        "sync": {"method": "easgd", "schedule": "every_k", "k": 1, **sync},
        "report": {"html": False, "tensorboard": False},
        "compression": {"dense": codec},
    }


def test_the_central_copy_is_as_good_as_without_a_threshold(tmp_path: Path) -> None:
    """It is what is tested and saved. 78 exchanges of each trainer; without coupling NE is 0.03 worse."""
    plain, few = (Job(synthetic(codec), out=tmp_path / codec).run() for codec in ("plain", "threshold"))
    assert few.test.ne < plain.test.ne + 0.01
    assert few.wire.bytes["dense"] < few.wire.raw_bytes["dense"] / 5


def test_what_is_saved_and_tested_has_everything(tmp_path: Path) -> None:
    """After an exchange with alpha 0.5 of which nothing was left out, replica and central copy are one."""
    data = write_rows(tmp_path / "rows.parquet", 96)
    sync = {"method": "easgd", "schedule": "every_k", "k": 1, "alpha": 0.5}
    codec = {"name": "threshold", "keep": 0.01}
    train = {"batch_size": 8, "trainers": 1}
    config = settings(data, data, model=WIDE_DLRM, sync=sync, train=train, compression={"dense": codec})
    interrupt({**config, "data": config["data"] | {"epochs": 3}}, tmp_path / "stopped", 20)
    found = {"stopped": weights(tmp_path / "stopped"), "ended": trained(config, tmp_path / "ended")}
    for stored in found.values():
        torch.testing.assert_close(stored["replica.0.weight"], stored["center"], atol=1e-6, rtol=0)
    wire = result_of(tmp_path / "ended")["wire"]
    whole = 4 * found["ended"]["center"].numel()
    assert wire["bytes"]["dense"] > 4 * whole, "the first exchange and the last one, both ways"
    assert wire["raw_bytes"]["dense"] == (12 + 1) * 2 * whole


@pytest.mark.parametrize("method", ["ma", "bmuf", "easgd"])
def test_what_is_significant_follows_the_learning_rate(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates, plain = list[float](), Threshold.encode_change

    def noted(codec: Threshold, change: torch.Tensor, known: torch.Tensor, rate: float, state: Any = None) -> Any:
        rates.append(rate)
        return plain(codec, change, known, rate, state)

    monkeypatch.setattr(Threshold, "encode_change", noted)
    data = write_rows(tmp_path / "rows.parquet", 1280)
    sections = {
        "model": WIDE_DLRM,
        "train": {"trainers": 2, "batch_size": 8, "decay": "linear", "warmup_samples": 0},
        "sync": {"method": method, "schedule": "every_k", "k": 2},
        "compression": {"dense": {"name": "threshold", "select": "significant", "significance": 0.05}},
    }
    trained({**settings(data, data), **sections}, tmp_path / "out")
    wire = result_of(tmp_path / "out")["wire"]
    assert rates[0] > 0.9
    assert 0 <= min(rates[-3:]) < 0.1
    if method != "easgd":  # whose exchanges wait for nobody
        assert all(later <= earlier + 0.05 for earlier, later in itertools.pairwise(rates))
    assert 0 < wire["kept_share"]["dense"] < 1
    assert "dense" not in wire["refreshes"] or wire["refreshes"]["dense"] == 0


AVERAGES = [
    {"method": "ma", "schedule": "every_k", "k": 1},
    {"method": "bmuf", "schedule": "every_k", "k": 2, "nesterov": True},
    {"method": "bmuf", "schedule": "background", "max_share": 1.0},
]


@pytest.mark.parametrize("sync", AVERAGES, ids=lambda sync: f"{sync['method']} {sync['schedule']}")
def test_averages_cross_as_differences(tmp_path: Path, sync: dict[str, Any]) -> None:
    """In the foreground trainers stay as near to each other as their last steps and what was left out are small."""
    data = write_rows(tmp_path / "rows.parquet", 1280)
    codec = {"name": "threshold", "keep": 0.05, "refresh": 50, "band": 1.2, "values": "int8"}
    train = {"trainers": 3, "batch_size": 8, "emulate_step_ms": 1.0}
    sections = {"model": WIDE_DLRM, "train": train, "compression": {"dense": codec}}
    config = {**settings(data, data, **sections), "sync": sync}
    found = trained(config, tmp_path / "out")
    result = result_of(tmp_path / "out")
    wire = result["wire"]
    assert result["data"]["trained_samples"] == 1280
    assert result["sync"]["count"] > 3
    assert 0.02 < wire["kept_share"]["dense"] < 0.5
    assert wire["refreshes"]["dense"] >= 1
    assert wire["bytes"]["dense"] < wire["raw_bytes"]["dense"]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in found.values())
    if sync["schedule"] == "every_k":
        apart = (found["replica.0.weight"] - found["replica.1.weight"]).norm() / found["replica.0.weight"].norm()
        assert float(apart) < 0.2


@pytest.mark.parametrize("method", ["ma", "bmuf"])
def test_a_job_with_averages_of_differences_goes_on_after_a_stop(tmp_path: Path, method: str) -> None:
    """What was left out is in the replicas, so that nothing else is stored."""
    data = write_rows(tmp_path / "rows.parquet", 96)
    config = settings(
        data,
        data,
        model=WIDE_DLRM,
        data={"epochs": 3, "slice_rows": 16},
        train={"batch_size": 8, "trainers": 2},
        compression={"dense": {"name": "threshold", "keep": 0.02}},
    )
    config["sync"] = {"method": method, "schedule": "every_k", "k": 1}
    interrupt(config, tmp_path / "out", 5)
    stored = load_file(checkpoints(tmp_path / "out")[-1] / "dense.safetensors")
    assert not [name for name in stored if "residual" in name or "floors" in name]
    Job(config, out=tmp_path / "out", resume=tmp_path / "out").run()
    assert result_of(tmp_path / "out")["data"]["trained_samples"] == 288


def test_a_model_of_too_many_parameters_is_averaged_otherwise(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "rows.parquet", 20)
    deep = {"name": "dlrm", "bottom": [2] * 160, "top": [2]}
    config = settings(data, data, model=deep, compression={"dense": "threshold"})
    config["sync"] = {"method": "ma"}
    fails(Job(config, out=tmp_path / "out").run, ConfigError, "at most 300 parameters")


@pytest.mark.parametrize(
    ("sync", "said"), [({}, True), ({"max_share": 0.15}, False), ({"schedule": "every_k", "k": 4}, False)]
)
def test_encoding_that_takes_up_the_time_of_the_shadow_is_told(
    tmp_path: Path, sync: dict[str, Any], said: bool
) -> None:
    data = write_rows(tmp_path / "rows.parquet", 40)
    config = settings(
        data, data, model=SMALL_DLRM, compression={"dense": "threshold"}, sync={"method": "easgd", **sync}
    )
    Job(config, out=tmp_path / "out").run()
    told = decided(tmp_path / "out")
    assert [sentence.endswith("sync.max_share=0.15 keeps them together") for sentence in told] == [True] * said


class Unsaved(CompressedCut):
    """As it was before its thresholds were saved."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("tau", self.tau, persistent=False)


class Cut(nn.Module):
    """A model of a user's own in two stages."""

    def __init__(self, kind: type[CompressedCut] = CompressedCut) -> None:
        super().__init__()
        self.bottom, self.cut, self.top = nn.Linear(2 + 3 * 4, 300), kind(keep=0.1), nn.Linear(300, 1)

    def forward(self, dense: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return self.top(self.cut(self.bottom(torch.cat([dense, *embeddings.values()], dim=1)))).squeeze(1)


def config_of_a_cut(path: Path, method: str | None, **sections: Any) -> dict[str, Any]:
    sections = {"train": {"batch_size": 8, "trainers": 2}, **sections}
    sections |= {} if method is None else {"aggregation": {"global_batch": 16}}
    return beside_own_model(
        settings(path, path, **sections) if method is None else gradient_settings(path, method, **sections)
    )


@pytest.mark.parametrize("method", [None, "sync", "gba"])
def test_a_cut_predicts_under_the_mask_that_it_was_trained_with(tmp_path: Path, method: str | None) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 96), tmp_path / "out"
    result = Job(config_of_a_cut(data, method), model=Cut(), out=out).run()
    assert result.test is not None
    trained = Trained(out, model=Cut())
    assert float(trained.module.cut.tau) > 0
    assert trained.evaluate(data).ne == pytest.approx(result.test.ne, abs=1e-6)
    trained.module.cut.tau.zero_()
    assert trained.evaluate(data).ne != pytest.approx(result.test.ne, abs=1e-5)
    for other in (nn.Identity(), CompressedCut("int8")):
        uncut = Cut()
        uncut.cut = other
        resumed = Job(config_of_a_cut(data, method), model=uncut, out=tmp_path / "other", resume=out)
        for read in (partial(Trained, out, model=uncut), resumed.run):
            fails(read, CheckpointError, "this model has no buffer cut.tau: configure the model that the")


@pytest.mark.parametrize("method", [None, "gba"])
def test_runs_from_before_a_cut_saved_its_thresholds_are_read_and_go_on(tmp_path: Path, method: str | None) -> None:
    data, out = write_rows(tmp_path / "rows.parquet", 96), tmp_path / "out"
    Job(config_of_a_cut(data, method), model=Cut(Unsaved), out=out).run()
    trained = Trained(out, model=Cut())
    assert not trained.module.cut.tau.any()
    assert 0 < trained.evaluate(data).auc <= 1
    again = config_of_a_cut(data, method, data={"epochs": 2})
    other = Cut()
    other.register_buffer("scale", torch.ones(1))
    for run in (
        lambda: Trained(out, model=other),
        lambda: Job(again, model=other, out=tmp_path / "o", resume=out).run(),
    ):
        fails(run, CheckpointError, "the checkpoint has no buffer scale: configure the model that the")
    for trainers in (2, 1):
        again["train"]["trainers"] = trainers
        rest = Job(again, model=Cut(), out=tmp_path / f"rest of {trainers}", resume=out).run()
        assert rest.data.trained_samples == 2 * 96
        assert Trained(tmp_path / f"rest of {trainers}", model=Cut()).module.cut.tau > 0
