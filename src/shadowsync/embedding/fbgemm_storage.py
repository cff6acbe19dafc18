"""Storage on FBGEMM's table-batched embedding operators for the CPU, called without autograd.

The module that FBGEMM offers keeps a graph from the pull to the push and takes its learning rate at construction. The
operators beneath it are stateless: a push needs the ids and the gradient only, whenever it comes, so a server holds
nothing between the two, and the learning rate comes with each push. Measured on one core (Zen 4), 1,024 × 26 ids of 16
floats: pull 0.34 ms, push with row-wise Adagrad 0.57 ms.

The backward steps a table that one feature looks up by a kernel made for it, and one that several share by plain code.
That kernel mixes SSE with AVX instructions, which on Intel processors since Ice Lake takes a microsecond for each row,
fifteen times as long as the plain code. So both are timed, and where the kernel loses, a feature that has a table of
its own gets a twin without ids and columns, and with it the plain code.

`B` samples, `T` features of a request.
"""

import functools
import importlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor

from shadowsync.data.batch import Jagged
from shadowsync.embedding.memory import ShardMemory
from shadowsync.embedding.optimizers import SGD, RowOptimizer, RowwiseAdagrad
from shadowsync.embedding.table import Shard
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import ConfigError, MissingExtra, UserError
from shadowsync.memory.room import Room

VERSION = "1.8"
SUM = 0  # FBGEMM's PoolingMode.SUM
FP32 = 0  # FBGEMM's SparseType.FP32
_TIMED, _LEAD = 5, 0.7
"""Times that each way is timed, and the share of the other's time in which twins have to step rows to be taken."""


@dataclass(frozen=True)
class Request:
    """What the operators want to know about a sequence of features, all `T` in the order they are looked up.

    Attributes:
        order: positions to look up in; None for the order of the request. The backward sums duplicates over adjacent
            features of one table only, so features of one table must stand together.
        columns: the output's columns in the order of the look-up; None as above.
        restore: the inverse of `columns`.
        weights_offsets: where each feature's rows start in the flat weights, int64 `[T]`.
        rows_offsets: where each feature's rows start in the flat per-row state, int64 `[T]`.
        d_offsets: first column of each feature, and the total, int32 `[T + 1]`.
        rows_before: rows of the request's other tables before each feature's table, and the total, int64 `[T + 1]`.
        placements: zeros (host memory), int32 `[T]`.
        row_bits: bits of a row number over all tables of the request.
        bags: of a request with twins, the features behind one another, `T + f` for the twin of feature f; else None.
        twins: the same for the backward, with a twin behind each feature that alone looks its table up; None where
            there is none.
    """

    order: tuple[int, ...] | None
    columns: Tensor | None
    restore: Tensor | None
    weights_offsets: Tensor
    rows_offsets: Tensor
    d_offsets: Tensor
    rows_before: Tensor
    placements: Tensor
    max_dim: int
    row_bits: int
    width: int
    bags: Tensor | None = None
    twins: "Request | None" = None


@functools.cache
def twins_lead() -> bool:
    """Whether this processor steps rows of row-wise Adagrad in clearly less time with twins; timed once, in about a
    millisecond."""
    rows, dim = 256, 16
    alone = _request([dim], [0], [0], [0, rows])
    assert alone.twins is not None
    backward = load_operators().split_embedding_backward_codegen_rowwise_adagrad_cpu
    ids, momentum = Jagged(torch.arange(rows), None, None, 1, rows), torch.ones(rows)
    seconds = []
    for request in (alone, alone.twins):
        state = momentum, request.placements, request.rows_offsets, torch.tensor(0.0), 1e-8
        given = (*_common(request, ids, torch.zeros(rows, dim), torch.zeros(rows * dim)), *state)
        took = []
        for _ in range(_TIMED):  # the first time the kernel is made, too
            began = time.thread_time()
            backward(*given)
            took.append(time.thread_time() - began)
        seconds.append(min(took))
    return seconds[1] < _LEAD * seconds[0]


class FbgemmStorage(TorchStorage):
    """Forward, and fused backward with the optimizer, by FBGEMM; Adam, which it has no CPU operator for, as in torch.

    Raises as `load_operators`.
    """

    name: ClassVar[str] = "fbgemm"
    _twins_lead = staticmethod(twins_lead)

    def __init__(
        self,
        shards: Sequence[Shard],
        features: Sequence[int],
        optimizer: RowOptimizer,
        seed: int | None,
        room: Room | None = None,
    ) -> None:
        self._operators = load_operators()
        super().__init__(shards, features, optimizer, seed, room)
        self._features = tuple(features)
        self._fused = isinstance(optimizer, (RowwiseAdagrad, SGD))
        self._twins = isinstance(optimizer, RowwiseAdagrad) and self._twins_lead()  # before threads might disagree
        self._requests: dict[tuple[int, ...], Request] = {}
        starts, numbers = self._memory.weight_start, self._memory.numbers
        self._blocks = {  # rows of all shards of one width are looked up as those of one table
            w.dim: _request([w.dim], [starts[numbers.members(w.dim)[0]]], [w.start], [0, w.stop - w.start])
            for w in numbers.widths
        }

    @classmethod
    def loads(cls) -> bool:
        try:
            load_operators()
        except UserError:
            return False
        return True

    def pull(self, ids: Jagged, features: Sequence[int]) -> Tensor:
        if not features or not ids.samples:
            return torch.zeros(ids.samples, self._width(features))
        request = self._request(tuple(features))
        ids = ids if request.order is None else ids.select(request.order)
        pooled: Tensor = self._operators.split_embedding_codegen_forward_cpu(
            self._memory.flat["weight"],
            request.weights_offsets,
            request.d_offsets,
            request.width,
            request.rows_before,
            ids.values,
            ids.bag_offsets(),
            SUM,
            ids.weights,
            FP32,
        )
        return pooled if request.restore is None else pooled.index_select(1, request.restore)

    def push(self, ids: Jagged, features: Sequence[int], gradient: Tensor, lr: float) -> None:
        if not features or not ids.samples:
            return
        # the operators' own weight decay leaves out tables that a single feature looks up, and that of SGD has none
        if not self._fused or self._optimizer.l2:
            super().push(ids, features, gradient, lr)
            return
        request = self._request(tuple(features))
        if request.order is not None and request.columns is not None:
            ids, gradient = ids.select(request.order), gradient.index_select(1, request.columns)
        self._apply(request, ids, gradient.contiguous(), lr)

    def _step(self, dim: int, rows: Tensor, gradient: Tensor, pushes: Tensor | None, lr: float) -> None:
        if self._fused:
            self._apply(self._blocks[dim], Jagged(rows, None, None, 1, len(rows)), gradient.contiguous(), lr)
        else:
            super()._step(dim, rows, gradient, pushes, lr)

    def _request(self, features: tuple[int, ...]) -> Request:
        request = self._requests.get(features)
        if request is None:
            request = self._requests[features] = plan(self._memory, [self._features[f] for f in features])
        return request

    def _apply(self, request: Request, ids: Jagged, gradient: Tensor, lr: float) -> None:
        """Backward and optimizer in one operator: steps every row in `ids`."""
        flat, optimizer = self._memory.flat, self._optimizer
        if isinstance(optimizer, RowwiseAdagrad):
            request = request.twins if request.twins is not None and self._twins else request
            state = flat["momentum"], request.placements, request.rows_offsets, torch.tensor(lr), optimizer.eps
            backward = self._operators.split_embedding_backward_codegen_rowwise_adagrad_cpu
            backward(*_common(request, ids, gradient, flat["weight"]), *state)
        else:
            backward = self._operators.split_embedding_backward_codegen_sgd_cpu
            backward(*_common(request, ids, gradient, flat["weight"]), torch.tensor(lr))


def _common(request: Request, ids: Jagged, gradient: Tensor, weights: Tensor) -> tuple[Any, ...]:
    """What the backward operators of all optimizers take."""
    offsets = ids.bag_offsets()
    if request.bags is not None:
        begins, ends = (part.view(ids.feature_count, -1) for part in (offsets[:-1], offsets[1:]))
        bags = torch.cat([begins, ends[:, -1:].expand_as(begins)]).index_select(0, request.bags)
        offsets = torch.cat([bags.flatten(), offsets[-1:]])
    return (
        gradient,
        weights,
        request.placements,
        request.weights_offsets,
        request.d_offsets,
        request.max_dim,
        request.rows_before,
        request.row_bits,
        ids.values,
        offsets,
        SUM,
        ids.weights,
        False,  # stochastic rounding
    )


_OPERATORS = (
    "split_embedding_codegen_forward_cpu",
    "split_embedding_backward_codegen_rowwise_adagrad_cpu",
    "split_embedding_backward_codegen_sgd_cpu",
)


def load_operators() -> Any:
    """FBGEMM's operators, known to take the arguments given here.

    Raises:
        MissingExtra: FBGEMM is not installed.
        ConfigError: it cannot be loaded beside this torch, or is of another version.
    """
    try:
        fbgemm = importlib.import_module("fbgemm_gpu")
    except ModuleNotFoundError as error:
        raise MissingExtra("fbgemm-gpu-cpu", "fbgemm") from error
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"embedding.storage=fbgemm: FBGEMM cannot be loaded beside torch {torch.__version__} ({reason}): "
            "pip install 'shadowsync[fbgemm]', or embedding.storage=torch"
        ) from error
    version = str(getattr(fbgemm, "__version__", "unknown"))
    if not version.startswith(VERSION + ".") or not all(hasattr(torch.ops.fbgemm, name) for name in _OPERATORS):
        raise ConfigError(
            f"embedding.storage=fbgemm: FBGEMM {version} is installed and {VERSION} is needed: "
            "pip install 'shadowsync[fbgemm]', or embedding.storage=torch"
        )
    return torch.ops.fbgemm


def plan(memory: ShardMemory, shards: Sequence[int]) -> Request:
    """The `Request` for features that look up these shards."""
    together = sorted(range(len(shards)), key=lambda position: shards.index(shards[position]))
    ordered = [shards[position] for position in together]
    order, columns = None, None
    if together != list(range(len(shards))):
        order, starts = tuple(together), [0, *accumulate(memory.shards[shard].table.dim for shard in shards)]
        columns = torch.tensor([column for p in together for column in range(starts[p], starts[p + 1])])
    rows_of = {shard: memory.shards[shard].rows for shard in ordered}
    first = dict(zip(rows_of, accumulate(rows_of.values(), initial=0), strict=False))
    return _request(
        [memory.shards[shard].table.dim for shard in ordered],
        [memory.weight_start[shard] for shard in ordered],
        [memory.row_start[shard] for shard in ordered],
        [*(first[shard] for shard in ordered), sum(rows_of.values())],
        order,
        columns,
    )


def _request(
    dims: list[int],
    weights: list[int],
    rows: list[int],
    before: list[int],
    order: tuple[int, ...] | None = None,
    columns: Tensor | None = None,
) -> Request:
    request = Request(
        order=order,
        columns=columns,
        restore=None if columns is None else columns.argsort(),
        weights_offsets=torch.tensor(weights),
        rows_offsets=torch.tensor(rows),
        d_offsets=torch.tensor([0, *accumulate(dims)], dtype=torch.int32),
        rows_before=torch.tensor(before),
        placements=torch.zeros(len(dims), dtype=torch.int32),
        max_dim=max(dims),
        row_bits=int(math.log2(before[-1]) + 1),
        width=sum(dims),
    )
    return replace(request, twins=_with_twins(request, dims))


def _with_twins(request: Request, dims: list[int]) -> Request | None:
    count, tables = len(dims), request.rows_before[:-1].tolist()
    bags = [b for f in range(count) for b in ((f, count + f) if tables.count(tables[f]) == 1 else (f,))]
    if len(bags) == count:
        return None
    features = torch.tensor(bags) % count
    widths = [dims[bag] if bag < count else 0 for bag in bags]
    return replace(
        request,
        weights_offsets=request.weights_offsets[features],
        rows_offsets=request.rows_offsets[features],
        d_offsets=torch.tensor([0, *accumulate(widths)], dtype=torch.int32),
        rows_before=torch.cat([request.rows_before[features], request.rows_before[-1:]]),
        placements=torch.zeros(len(bags), dtype=torch.int32),
        bags=torch.tensor(bags),
    )
