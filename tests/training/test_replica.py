"""The flat replica and its workers. `B` samples, `N` dense columns."""

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from shadowsync.errors import ConfigError
from shadowsync.models.dcn import Dcn
from shadowsync.models.deepfm import DeepFm
from shadowsync.models.dlrm import Dlrm
from shadowsync.models.model import ModelSpec
from shadowsync.models.vectors import JaggedVectors, Pooled
from shadowsync.training.kernels import Computing, Kernels, accelerate
from shadowsync.training.optimizers import Adagrad, Adam, DenseOptimizer, Sgd
from shadowsync.training.replica import Replica, Stepper

DIMS = {"user": 4, "item": 4, "shop": 4}
FP32, BF16 = Computing("fp32"), Computing("bf16")
SPECS: tuple[ModelSpec, ...] = (Dlrm(bottom=(16,), top=(16,)), DeepFm(deep=(16,)), Dcn(cross=2, deep=(16,)))


class Toy(nn.Module):
    """A user's own module: knows no flat tensor, has tied, frozen and unused parameters, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.tied = nn.Linear(12, 12)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        vectors = torch.cat(list(embeddings.values()), dim=1)
        hidden = self.norm(self.tied(torch.tanh(self.first(vectors))))
        return self.scale * self.frozen(hidden).sum(dim=1) + dense.sum(dim=1)


def make_batch(samples: int = 16, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = (torch.rand(samples, generator=generator) < 0.3).float()
    return torch.randn(samples, 3, generator=generator), torch.randn(samples, 12, generator=generator), labels


def make_replica(module: nn.Module | None = None, optimizer: DenseOptimizer | None = None) -> Replica:
    torch.manual_seed(0)
    return Replica(module or SPECS[0].build(3, DIMS), optimizer or Adagrad(), DIMS)


class PlainLoop:
    """The loop anyone would write: a module, torch's optimizer, and its own gradient of the pooled vectors."""

    def __init__(self, module: nn.Module, optimizer: str, fused: bool, clip_norm: float | None = None) -> None:
        kinds = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
        eps = {} if optimizer == "sgd" else {"eps": 1e-8}
        self.module = module
        self.clip_norm = clip_norm
        self.optimizer = kinds[optimizer](module.parameters(), lr=0.05, fused=fused, **eps)

    def step(self, dense: Tensor, pooled: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        leaf = pooled.clone().requires_grad_()
        loss = nn.functional.binary_cross_entropy_with_logits(self.module(dense, Pooled(leaf, DIMS)), labels)
        self.optimizer.zero_grad()
        loss.backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
        self.optimizer.step()
        assert leaf.grad is not None
        return loss.detach(), leaf.grad


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("optimizer", [Sgd(), Adagrad(), Adam()], ids=lambda optimizer: optimizer.name)
@pytest.mark.parametrize("clip_norm", [None, 0.05, 1e6], ids=["unclipped", "clipped", "left alone"])
def test_one_worker_equals_a_plain_loop(spec: ModelSpec, optimizer: DenseOptimizer, clip_norm: float | None) -> None:
    """Bit by bit where the loop has the same layers and fused optimizer, within rounding where it has torch's own."""
    torch.manual_seed(2)
    module = spec.build(3, DIMS)
    worker = Replica(module, optimizer, DIMS).worker_module(clip_norm=clip_norm)
    same = copy.deepcopy(module)
    accelerate(same, Kernels())
    exact = PlainLoop(same, optimizer.name, True, clip_norm)
    close = PlainLoop(copy.deepcopy(module), optimizer.name, False, clip_norm)
    for seed in range(5):
        batch = make_batch(seed=seed)
        loss, _, by_vectors = worker.loss_and_gradients(*batch)
        gradient = worker.flat_gradient()
        worker.step(0.05)
        assert torch.equal(worker.flat_gradient(), gradient), "what is clipped is a copy"
        exact_loss, exact_gradient = exact.step(*batch)
        close_loss, close_gradient = close.step(*batch)
        assert torch.equal(loss, exact_loss)
        assert torch.equal(by_vectors.pooled, exact_gradient)
        torch.testing.assert_close(loss, close_loss, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(by_vectors.pooled, close_gradient, rtol=1e-3, atol=1e-5)
    for own, other in zip(worker.module.parameters(), exact.module.parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_bf16_is_close_to_fp32(spec: ModelSpec) -> None:
    torch.manual_seed(2)
    replica = Replica(spec.build(3, DIMS), Adagrad(), DIMS)
    full, half = replica.worker_module(FP32), replica.worker_module(BF16)
    batch = make_batch(256)
    loss, logits, by_vectors = full.loss_and_gradients(*batch)
    half_loss, half_logits, half_by_vectors = half.loss_and_gradients(*batch)
    by_pooled, half_by_pooled = by_vectors.pooled, half_by_vectors.pooled
    assert half_logits.dtype == half_by_pooled.dtype == torch.float32
    assert not torch.equal(logits, half_logits)
    torch.testing.assert_close(half_loss, loss, rtol=0.02, atol=0)
    torch.testing.assert_close(half_logits, logits, rtol=0.05, atol=0.05)
    assert nn.functional.cosine_similarity(half_by_pooled.flatten(), by_pooled.flatten(), dim=0) > 0.995
    assert nn.functional.cosine_similarity(half.flat_gradient(), full.flat_gradient(), dim=0) > 0.995


def test_a_step_of_one_worker_is_seen_by_all() -> None:
    replica = make_replica()
    first, second = replica.worker_module(), replica.worker_module()
    batch = make_batch()
    _, before, _ = second.loss_and_gradients(*batch)
    first.loss_and_gradients(*batch)
    first.step(0.1)
    _, after, _ = second.loss_and_gradients(*batch)
    _, own, _ = first.loss_and_gradients(*batch)
    assert not torch.equal(before, after)
    assert torch.equal(after, own)
    torch.testing.assert_close(replica.predict(*batch[:2]), after)


def test_writing_to_the_flat_tensor_changes_every_worker() -> None:
    replica = make_replica()
    workers = [replica.worker_module(), replica.worker_module(BF16)]
    replica.flat.zero_()
    for worker in workers:
        assert not worker.loss_and_gradients(*make_batch())[1].any()


def test_workers_have_gradients_of_their_own() -> None:
    replica = make_replica()
    first, second = replica.worker_module(), replica.worker_module()
    first.loss_and_gradients(*make_batch(seed=1))
    kept = first.flat_gradient()
    second.loss_and_gradients(*make_batch(seed=2))
    assert torch.equal(first.flat_gradient(), kept)
    assert not torch.equal(second.flat_gradient(), kept)


def test_workers_share_the_optimizers_state() -> None:
    replica = make_replica(optimizer=Adam())
    for seed in range(4):
        worker = replica.worker_module()
        worker.loss_and_gradients(*make_batch(seed=seed))
        worker.step(0.01)
    assert replica.state["step"].tolist() == [4.0] * len(replica.slots)
    assert replica.state["exp_avg_sq"].count_nonzero() > 0


def test_threads_may_step_at_the_same_time() -> None:
    replica = make_replica()

    def train(seed: int) -> None:
        worker = replica.worker_module(BF16)
        for step in range(20):
            worker.loss_and_gradients(*make_batch(64, seed=step % 3))
            worker.step(0.02)

    loss_before = replica.worker_module().loss_and_gradients(*make_batch(64))[0]
    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replica.flat.isfinite().all()
    assert replica.worker_module().loss_and_gradients(*make_batch(64))[0] < 0.8 * loss_before


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5))
@settings(deadline=None, max_examples=20, derandomize=True)
def test_slots_are_aligned_and_do_not_overlap(sizes: list[int]) -> None:
    module = nn.ParameterList([nn.Parameter(torch.full((size,), float(index + 1))) for index, size in enumerate(sizes)])
    replica = Replica(module, Sgd(), {})
    ends = [0, *(slot.start + slot.numel for slot in replica.slots)]
    assert all(slot.start % 16 == 0 for slot in replica.slots)
    assert all(slot.start >= end for slot, end in zip(replica.slots, ends, strict=False))
    assert len(replica.flat) % 16 == 0
    assert replica.flat.sum() == sum(size * (index + 1) for index, size in enumerate(sizes))
    assert all(parameter.data_ptr() % 64 == 0 for parameter in replica.module.parameters())


@given(brought=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12), enough=st.integers(2, 5))
@settings(deadline=None, max_examples=30, derandomize=True)
def test_gradients_wait_until_there_are_enough_and_become_their_mean(
    brought: list[tuple[bool, bool]], enough: int
) -> None:
    module = nn.ParameterList([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))])
    waiting = Replica(module, Sgd(), {}, accumulate=enough).waiting
    assert waiting is not None
    since: list[list[Tensor | None]] = []
    for number, there in enumerate(brought):
        shapes = [(3,), (2, 2)]
        given_now = [torch.randn(shape) if used else None for shape, used in zip(shapes, there, strict=True)]
        since.append(given_now)
        found = waiting.add(given_now)
        if (number + 1) % enough:
            assert found is None
            continue
        assert found is not None
        for index, mean in enumerate(found):
            parts = [batch[index] for batch in since if batch[index] is not None]
            assert (mean is None) == (not parts)
            if mean is not None:
                torch.testing.assert_close(mean, sum(parts[1:], parts[0]) / enough)
        since = []
    assert waiting.tensors["batches"][-1] == len(since)


def test_a_penalty_is_for_weights_and_not_for_biases_and_norms() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    replica = make_replica(module, Sgd(l2=0.5))
    before = {slot.name: slot.view(replica.flat).clone() for slot in replica.slots}
    Stepper(replica, None).step([torch.zeros(slot.shape) for slot in replica.slots], 0.1)
    after = {slot.name: slot.view(replica.flat) for slot in replica.slots}
    torch.testing.assert_close(after.pop("0.weight"), 0.95 * before["0.weight"])
    assert after.keys() == {"0.bias", "1.weight", "1.bias"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())


def test_the_given_module_is_not_touched() -> None:
    module = SPECS[0].build(3, DIMS)
    before = copy.deepcopy(module.state_dict())
    worker = make_replica(module).worker_module()
    worker.loss_and_gradients(*make_batch())
    worker.step(0.1)
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())


def test_a_users_module_with_tied_frozen_and_unused_parameters() -> None:
    module = Toy()
    replica = make_replica(module, Adam())
    names = [slot.name for slot in replica.slots]
    worker = replica.worker_module()
    frozen = module.frozen.weight.clone()
    loop = PlainLoop(copy.deepcopy(module), "adam", fused=False)
    for seed in range(3):
        batch = make_batch(seed=seed)
        loss, _, _ = worker.loss_and_gradients(*batch)
        worker.step(0.05)
        torch.testing.assert_close(loss, loop.step(*batch)[0], rtol=1e-4, atol=1e-5)
    assert "tied.weight" not in names
    assert "tied.bias" in names
    assert not any(name.startswith("frozen") for name in names)
    assert worker.gradients[names.index("unused")] is None
    assert replica.module.unused.tolist() == [1, 1, 1]
    assert replica.state["step"][names.index("unused")] == 0
    assert torch.equal(replica.module.frozen.weight, frozen)
    assert replica.module.tied.weight is replica.module.first.weight


def test_buffers_are_shared_by_the_workers_of_a_replica() -> None:
    replica = make_replica(Toy())
    for seed in (1, 2):
        replica.worker_module().loss_and_gradients(*make_batch(seed=seed))
    assert replica.module.norm.num_batches_tracked == 2
    assert replica.module.norm.running_mean.any()
    alone, together = (replica.predict(*(part[:count] for part in make_batch()[:2])) for count in (1, 4))
    torch.testing.assert_close(alone, together[:1])


def test_clipping_does_not_scale_a_gradient_twice_that_two_parameters_share() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

        def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
            return (self.left + self.right).sum() + embeddings["user"].sum(dim=1)

    replica = make_replica(Sum(), Sgd())
    worker = replica.worker_module(clip_norm=0.001)
    worker.loss_and_gradients(*make_batch())
    worker.step(1.0)
    assert replica.flat.norm() == pytest.approx(0.001, rel=1e-2)
    assert torch.equal(replica.module.left, replica.module.right)


class Histories(nn.Module):
    """Takes one sequence and leaves another alone."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(3 + 4, 1)

    def forward(self, dense: Tensor, embeddings: Mapping[str, Any]) -> Tensor:
        return self.top(torch.cat([dense, embeddings["seen"].weighted_sum()], dim=1)).squeeze(1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("lengths", [[2, 0, 3, 1], [0, 0, 0, 0]], ids=str)
def test_the_gradient_reaches_the_vectors_of_every_sequence(precision: str, lengths: list[int]) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    sequences = {name: JaggedVectors(name, torch.randn(sum(lengths), 4), offsets) for name in ("seen", "unused")}
    replica, labels = Replica(Histories(), Sgd(), {}), torch.tensor([0.0, 1, 1, 0])
    dense, pooled = torch.randn(4, 3), torch.zeros(4, 0)
    _, logits, found = replica.worker_module(Computing(precision)).loss_and_gradients(dense, pooled, labels, sequences)
    by_logit = ((logits.sigmoid() - labels) / 4)[sequences["seen"].owners]
    expected = by_logit[:, None] * replica.module.top.weight.detach()[0, 3:]
    torch.testing.assert_close(found.sequences["seen"], expected, rtol=1e-2 if precision == "bf16" else 1e-5, atol=1e-3)
    assert found.sequences["seen"].dtype == torch.float32
    assert found.sequences["unused"].shape == (sum(lengths), 4)
    assert not found.sequences["unused"].any()
    torch.testing.assert_close(replica.predict(dense, pooled, sequences), logits, rtol=2e-2, atol=2e-2)


class Answering(nn.Module):
    """Answers by the dense columns alone."""

    def __init__(self, answer: Callable[[Tensor], object] = lambda logits: logits) -> None:
        super().__init__()
        self.layer, self.answer = nn.Linear(3, 1), answer

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> object:
        return self.answer(self.layer(dense).squeeze(1))


def test_a_module_that_ignores_its_embeddings_gives_them_a_zero_gradient() -> None:
    by_pooled = make_replica(Answering()).worker_module().loss_and_gradients(*make_batch())[2].pooled
    assert by_pooled.shape == (16, 12)
    assert not by_pooled.any()


def test_a_module_of_frozen_parameters_still_trains_its_embeddings() -> None:
    replica = make_replica(SPECS[0].build(3, DIMS).requires_grad_(False))
    worker = replica.worker_module()
    by_pooled = worker.loss_and_gradients(*make_batch())[2].pooled
    worker.step(0.1)
    assert len(replica.flat) == 0
    assert by_pooled.any()


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        (lambda logits: logits[:, None], r"returns logits of shape \[16, 1\] for a batch of 16 samples"),
        (lambda logits: (logits, 1), "returns tuple"),
        (lambda _: None, "returns NoneType"),
        (lambda logits: logits.detach(), "returns a tensor without a gradient"),
        (lambda logits: logits.long(), "returns a tensor without a gradient"),
    ],
)
def test_answers_that_are_no_logits_are_refused(answer: Callable[[Tensor], object], named: str) -> None:
    with pytest.raises(ConfigError, match=f"the model Answering {named}"):
        make_replica(Answering(answer)).worker_module().loss_and_gradients(*make_batch())


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (3, r"must be an instance of torch\.nn\.Module, not 3"),
        (nn.Linear, r"must be an instance of torch\.nn\.Module, not Linear"),
        (nn.Sequential(nn.Linear(2, 2).double()), r"parameter 0.weight of the model is torch.float64"),
        (nn.LazyLinear(3), r"parameter weight of the model has no shape yet"),
    ],
)
def test_what_is_no_module_of_known_float32_parameters_is_refused(module: nn.Module, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_replica(module)


def test_a_module_that_cannot_be_copied_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"the model Linear cannot be copied for each worker: cannot pickle"):
        make_replica(module)


@pytest.mark.parametrize("device", ["cuda:99", "abacus"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f"train.device={device} cannot be used"):
        Replica(nn.Linear(2, 2), Sgd(), {}, device)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", [Sgd(), Adagrad(), Adam()], ids=lambda optimizer: optimizer.name)
def test_every_device_follows_the_cpu(device: str, precision: str, optimizer: DenseOptimizer) -> None:
    """On a machine with a GPU its replica takes the same steps as the one on the CPU."""
    module = SPECS[0].build(3, DIMS)
    here = Replica(module, optimizer, DIMS)
    there = Replica(module, optimizer, DIMS, device)
    workers = [here.worker_module(Computing(precision), 1.0), there.worker_module(Computing(precision), 1.0)]
    for seed in range(4):
        for worker in workers:
            loss, logits, by_vectors = worker.loss_and_gradients(*make_batch(seed=seed))
            assert {loss.device.type, logits.device.type, by_vectors.pooled.device.type} == {"cpu"}
            worker.step(0.01)
    assert there.flat.device.type == device
    torch.testing.assert_close(there.flat.cpu(), here.flat, rtol=0.02, atol=2e-3 if precision == "fp32" else 0.03)
    assert there.predict(*make_batch()[:2]).device.type == "cpu"


class Restless(Toy):
    """A module that does something to its parameters when it is called for the third time."""

    def __init__(self, deed: Callable[["Restless"], object]) -> None:
        super().__init__()
        self.deed, self.calls = deed, 0

    def forward(self, dense: Tensor, embeddings: Mapping[str, Tensor]) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            self.deed(self)
        return super().forward(dense, embeddings)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Restless":
        twin = Restless(self.deed)
        twin.load_state_dict(self.state_dict())
        return twin


@pytest.mark.parametrize(
    "deed",
    [
        lambda module: setattr(module, "scale", nn.Parameter(torch.ones(()))),
        lambda module: setattr(module, "norm", nn.BatchNorm1d(12)),
        lambda module: setattr(module.scale, "data", torch.ones(())),
        lambda module: module.scale.requires_grad_(False),
    ],
    ids=["a parameter", "a layer", "its memory", "frozen"],
)
def test_a_module_that_swaps_parameters_in_mid_run_is_refused(deed: Callable[[Restless], object]) -> None:
    worker = make_replica(Restless(deed)).worker_module(FP32)
    batch = make_batch()
    for _ in range(2):
        worker.loss_and_gradients(*batch)
        worker.step(0.1)
    with pytest.raises(ConfigError, match="Restless replaces, freezes or moves parameters"):
        worker.loss_and_gradients(*batch)


@pytest.mark.parametrize("part", ["scale", "norm"])
def test_a_module_without_values_is_refused(part: str) -> None:
    module = Toy()
    if part == "scale":
        module.scale = nn.Parameter(torch.ones((), device="meta"))
    else:
        module.norm.register_buffer("running_mean", torch.ones(12, device="meta"))
    with pytest.raises(ConfigError, match=f"^{part}.* is on the device meta"):
        make_replica(module)
