"""Every replica method: the seam's contract, then the algebra that tells the methods apart."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from helpers import WholeCopy
from hypothesis import given, settings
from hypothesis import strategies as st
from sync_threads import run_all
from torch import Tensor

from shadowsync.compression.bf16 import Bf16
from shadowsync.compression.channel import Channel
from shadowsync.compression.codec import Codec
from shadowsync.compression.low_bit import Int8
from shadowsync.compression.plain import Plain
from shadowsync.compression.threshold import Threshold
from shadowsync.compression.wire import WireCounter
from shadowsync.errors import ConfigError
from shadowsync.registry import build, members
from shadowsync.sync.all_reduce import LocalAverages
from shadowsync.sync.bmuf import Bmuf
from shadowsync.sync.ds_sync import DivideAndShuffle
from shadowsync.sync.easgd import Easgd
from shadowsync.sync.ma import ModelAveraging
from shadowsync.sync.method import DeviceGroup, Group, State, SyncMethod
from shadowsync.training.gate import Gate

METHODS: list[Callable[[], SyncMethod]] = [
    *members("shadowsync.sync", SyncMethod).values(),
    lambda: Easgd(alpha=0.3, form="sequential"),
    lambda: Bmuf(momentum=0.9, nesterov=True),
]
SIZE = 7


class Cluster:
    """`n` trainers with random replicas, joined by the in-process group."""

    def __init__(self, n: int, method: SyncMethod, dense_servers: int = 2, codec: Codec | None = None) -> None:
        generator = torch.Generator().manual_seed(n)
        start = torch.randn(SIZE, generator=generator)
        line = Channel("dense", codec or Plain(), WireCounter())
        self.method = method.resolved(n)
        self.servers = WholeCopy(start, dense_servers, line)
        averages = LocalAverages(range(n), line, Gate().waiting)
        self.groups: list[Group] = [Group(averages.of[rank], self.servers.of(rank)) for rank in range(n)]
        self.states: list[State] = [self.method.init(start) for _ in range(n)]
        self.weights = [start + torch.randn(SIZE, generator=generator) for _ in range(n)]

    def sync_all(self, ranks: Sequence[int] | None = None) -> None:
        """One synchronisation of every trainer, or of these, each in its thread."""
        run_all(self.sync_one, range(len(self.groups)) if ranks is None else ranks)

    def sync_one(self, rank: int) -> None:
        self.states[rank] = self.method.sync(self.weights[rank], self.groups[rank], self.states[rank])

    def spread(self) -> float:
        stacked = torch.stack(self.weights)
        return float((stacked - stacked.mean(0)).norm())


@pytest.mark.parametrize("make", METHODS)
@pytest.mark.parametrize("n", [1, 3])
def test_contract(make: Callable[[], SyncMethod], n: int) -> None:
    cluster = Cluster(n, make())
    before = cluster.spread()
    storage = [weights.data_ptr() for weights in cluster.weights]
    for _ in range(3):
        cluster.sync_all()
    assert [weights.data_ptr() for weights in cluster.weights] == storage, "replicas are changed in place"
    assert cluster.spread() <= before
    assert all(torch.isfinite(weights).all() for weights in cluster.weights)
    final = cluster.method.final(cluster.weights, cluster.servers.read())
    assert final.shape == (SIZE,)


@pytest.mark.parametrize("make", [m for m in METHODS if m().name != "none"])
def test_repeated_synchronisation_brings_replicas_together(make: Callable[[], SyncMethod]) -> None:
    cluster = Cluster(4, make())
    before = cluster.spread()
    for _ in range(60):
        cluster.sync_all()
    assert cluster.spread() < 0.01 * before


CODECS: list[Codec] = [Plain(), Bf16(), Int8(rounding="nearest"), Threshold(keep=0.5)]


@pytest.mark.parametrize(
    ("make", "codec"),
    [
        (make, codec)
        for make, codec in itertools.product(METHODS, CODECS)
        if not (codec.sparse and make() == Easgd(alpha=0.3, form="sequential"))  # the pair is refused
    ],
)
def test_a_replica_on_another_device_is_synchronised_alike(make: Callable[[], SyncMethod], codec: Codec) -> None:
    """Here the other device is this one too: what is tested is that nothing of the way there is taken for the way
    back."""
    near, far = Cluster(3, make(), codec=codec), Cluster(3, make(), codec=codec)
    far.groups = [DeviceGroup(group.averaging, group.servers, torch.device("cpu")) for group in far.groups]
    noise = torch.Generator().manual_seed(1)
    for _ in range(4):
        for cluster in (near, far):
            for rank in range(3) if cluster.method.centralised else [None]:
                cluster.sync_all(None if rank is None else [rank])
        for here, there in zip(near.weights, far.weights, strict=True):
            torch.testing.assert_close(there, here, rtol=0, atol=1e-5)
            moved = torch.randn(SIZE, generator=noise)
            here.add_(moved)
            there.add_(moved)
    torch.testing.assert_close(far.servers.read(), near.servers.read(), rtol=0, atol=1e-5)


def test_what_workers_do_while_a_replica_on_another_device_is_averaged_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(1, ModelAveraging(alpha=1.0))
    before, (group,) = cluster.weights[0].clone(), cluster.groups
    cluster.groups = [DeviceGroup(group.averaging, group.servers, torch.device("cpu"))]
    approach = group.averaging.strategy.approach

    def meanwhile(weights: Tensor, target: Tensor, alpha: float) -> None:
        cluster.weights[0].add_(1.0)
        approach(weights, target, alpha)

    monkeypatch.setattr(group.averaging.strategy, "approach", meanwhile)
    cluster.sync_one(0)
    torch.testing.assert_close(cluster.weights[0], before + 1.0)


@pytest.mark.parametrize("member", [ModelAveraging, Bmuf, DivideAndShuffle])
def test_alpha_may_be_null_as_its_default_was_once(member: type[ModelAveraging]) -> None:
    assert build(member, {"alpha": None}, "sync").alpha == member().alpha == 1.0


@pytest.mark.parametrize("form", ["elastic", "sequential"])
def test_what_workers_do_during_an_exchange_is_kept(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    still, moving = (Cluster(1, Easgd(alpha=0.3, form=form)) for _ in range(2))  # type: ignore[arg-type]
    (group,) = moving.groups
    exchange = getattr(group, form)

    def meanwhile(weights: Tensor, alpha: float) -> Tensor:
        answer: Tensor = exchange(weights, alpha)
        moving.weights[0].add_(1.0)
        return answer

    monkeypatch.setattr(group, form, meanwhile)
    for cluster in (still, moving):
        cluster.sync_one(0)
    torch.testing.assert_close(moving.weights[0], still.weights[0] + 1.0)


@given(
    n=st.integers(1, 6),
    servers=st.integers(1, SIZE + 2),
    alpha=st.floats(0.05, 1.0),
    order=st.lists(st.integers(0, 5), max_size=12),
    codec=st.sampled_from([Plain(), Bf16()]),
)
@settings(deadline=None, max_examples=40, derandomize=True)
def test_symmetric_easgd_conserves_the_sum(n: int, servers: int, alpha: float, order: list[int], codec: Codec) -> None:
    """`w_PS + Σ w_i`, also with more servers than parameters and through a lossy codec."""
    cluster = Cluster(n, Easgd(alpha=alpha), servers, codec)
    total = cluster.servers.read() + torch.stack(cluster.weights).sum(0)
    for rank in order:
        cluster.sync_one(rank % n)
    now = cluster.servers.read() + torch.stack(cluster.weights).sum(0)
    torch.testing.assert_close(now, total, atol=1e-5, rtol=1e-5)


def test_elastic_and_sequential_by_hand() -> None:
    """And what crosses: a parameter there, and one back."""
    for form, expected in (("elastic", 10 - 0.25 * 8), ("sequential", 0.75 * 10 + 0.25 * (0.75 * 2 + 0.25 * 10))):
        line = Channel("dense", Plain(), counter := WireCounter())
        servers = WholeCopy(torch.tensor([2.0]), 1, line)
        weights = torch.tensor([10.0])
        method = Easgd(alpha=0.25, form=form)  # type: ignore[arg-type]
        method.sync(weights, Group(LocalAverages([0], line, Gate().waiting).of[0], servers.of(0)), {})
        assert weights.item() == pytest.approx(expected)
        assert servers.read().item() == pytest.approx(2 + 0.25 * 8)
        assert counter.totals().bytes["dense"] == counter.totals().raw_bytes["dense"] == 2 * 4


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_bmuf_without_momentum_equals_model_averaging(alpha: float) -> None:
    averaging, bmuf = Cluster(3, ModelAveraging(alpha=alpha)), Cluster(3, Bmuf(alpha=alpha, momentum=0.0, eta=1.0))
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        for rank in range(3):
            step = torch.randn(SIZE, generator=generator)
            averaging.weights[rank] += step
            bmuf.weights[rank] += step
        averaging.sync_all()
        bmuf.sync_all()
        torch.testing.assert_close(torch.stack(bmuf.weights), torch.stack(averaging.weights), atol=1e-6, rtol=1e-6)


def test_bmuf_momentum_by_hand() -> None:
    """One step, and none ever after: momentum repeats half of the last block's update each time."""
    for nesterov, expected in ((False, 1.0), (True, 1.0 + 0.5 * 1.0)):
        line = Channel("dense", Plain(), WireCounter())
        group = Group(LocalAverages([0], line, Gate().waiting).of[0], WholeCopy(torch.zeros(1), 1, line).of(0))
        method = Bmuf(alpha=1.0, momentum=0.5, nesterov=nesterov)
        weights = torch.zeros(1)
        state = method.init(weights)
        weights += 1
        state = method.sync(weights, group, state)
        assert weights.item() == pytest.approx(expected)
        assert state["global"].item() == pytest.approx(1.0)
        state = method.sync(weights, group, state)
        assert state["global"].item() == pytest.approx(1.5)
        for _ in range(30):
            state = method.sync(weights, group, state)
        assert state["global"].item() == pytest.approx(2.0)
        assert weights.item() == pytest.approx(2.0)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_trainer_that_missed_averages_goes_on_from_the_first_that_it_sees(nesterov: bool) -> None:
    def step() -> None:
        for weights in cluster.weights:
            weights.add_(1 + torch.randn(SIZE, generator=generator))

    generator = torch.Generator().manual_seed(2)
    cluster = Cluster(3, Bmuf(alpha=1.0, momentum=0.5, nesterov=nesterov))
    cluster.sync_all()
    assert all(torch.equal(state["delta"], cluster.states[0]["delta"]) for state in cluster.states)
    cluster.groups[2].leave()
    for _ in range(5):
        step()
        cluster.sync_all([0, 1])
    cluster.groups[2].join()
    average = torch.stack(cluster.weights).mean(0)
    cluster.sync_all()
    assert torch.equal(cluster.states[2]["delta"], torch.zeros(SIZE))
    torch.testing.assert_close(cluster.states[2]["global"], average)
    torch.testing.assert_close(cluster.weights[2], average)
    kept = "delta" if nesterov else "global"  # with it, and η = 1, the model is the average
    away = [float((cluster.states[2][kept] - cluster.states[0][kept]).norm())]
    assert away[0] > 0.1, "the others have momentum"
    for _ in range(20):
        step()
        cluster.sync_all()
        away.append(float((cluster.states[2][kept] - cluster.states[0][kept]).norm()))
    assert away[-1] < 3 * 0.5 ** (20 / 2) * away[0], "the difference shrinks by √μ with every average"


def test_full_averaging_gives_every_trainer_the_mean() -> None:
    cluster = Cluster(4, ModelAveraging(alpha=1.0))
    mean = torch.stack(cluster.weights).mean(0)
    cluster.sync_all()
    for weights in cluster.weights:
        torch.testing.assert_close(weights, mean)


def test_dense_servers_split_makes_no_difference() -> None:
    def run(servers: int) -> tuple[Tensor, Tensor]:
        cluster = Cluster(2, Easgd(alpha=0.3), dense_servers=servers)
        for rank in (0, 1, 1, 0):
            cluster.sync_one(rank)
        return torch.stack(cluster.weights), cluster.servers.read()

    for servers in (2, 3, SIZE, SIZE + 4):
        for one, many in zip(run(1), run(servers), strict=True):
            assert torch.equal(one, many)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (Easgd, {"alpha": 0}, "sync.alpha=0"),
        (Easgd, {"alpha": 1.5}, "sync.alpha=1.5"),
        (Easgd, {"form": "round"}, "sync.form=round"),
        (Bmuf, {"momentum": 1.0}, "sync.momentum=1.0"),
        (ModelAveraging, {"alpha": "much"}, "sync.alpha=much"),
    ],
)
def test_options_out_of_range(method: type[SyncMethod], options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(method, options, "sync")
