"""The yardstick of a cluster: one process of TorchRec's distributed trainer, on the batches that shadowsync reads.

DistributedModelParallel over Gloo: FBGEMM tables with the optimizer fused into the backward pass, the dense part under
DDP, a pipeline that sends the next batch's ids while this one computes. One process for each host, one thread each:

    python benchmarks/torchrec_trainer.py --rank 0 --world 2 --master 10.0.0.1 [--sharding row_wise] [key.path=value …]

Overrides are those of `shadowsync train` (data, model, sizes, optimizers, learning rates, precision, seed), so both
sides train the same model on the same samples; what has no meaning here (trainers, workers, sync) is left alone. A
step takes the `train.batch_size` samples of every process, and gradients are averaged. Rank 0 prints one line of JSON:
examples per second of the job, samples, seconds, the test set's AUC and NE.

TorchRec pins a torch of its own, so it is installed beside this project's environment, not into it:

    python3.11 -m venv .venv-torchrec
    echo "import site; site.addsitedir('$PWD/.venv/lib/python3.11/site-packages')" \\
        > .venv-torchrec/lib/python3.11/site-packages/shared.pth
    .venv-torchrec/bin/pip install --no-deps torchrec==1.8.0 pyre-extensions iopath tensordict typing-inspect \\
        portalocker pyvers cloudpickle orjson

`B` samples of one process's batch, `N` dense columns, `F` features of width `D`.
"""

import argparse
import itertools
import json
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shadowsync.assembly import computing_here, make_module, make_tables
from shadowsync.choices import Choices, choose_all, warmup_samples
from shadowsync.config import Config, load
from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.reader import batches as in_order
from shadowsync.data.source import OpenSource
from shadowsync.metrics.quality import TestMetrics, evaluate_scores
from shadowsync.models.dlrm import DlrmModule
from shadowsync.training.kernels import accelerate, parse_kernels
from shadowsync.training.optimizers import Rates

sys.path.insert(0, str(Path(__file__).parent))
from shares import share, share_of

warnings.filterwarnings("ignore")  # torch, FBGEMM and TorchRec warn of each other's deprecations at import
try:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
    from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
    from torchrec.optim.optimizers import in_backward_optimizer_filter
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
    from torchrec.streamable import Pipelineable
except ImportError as error:
    sys.exit(f"TorchRec is not installed here ({error}): see the head of this file")

CPU = torch.device("cpu")
WARMUP_STEPS = 10
PIPELINES = {"sparse": TrainPipelineSparseDist, "base": TrainPipelineBase}
SHARDINGS = {"table_wise": ["table_wise"], "row_wise": ["row_wise"], "planner": None}


@dataclass(frozen=True)
class Options:
    """How TorchRec is to do it.

    Attributes:
        sharding: a key of `SHARDINGS`; `planner` leaves it to TorchRec.
        pipeline: a key of `PIPELINES`.
        wire: `fp32` or `bf16`, of pooled vectors, their gradients and DDP's all-reduce.
        bucket_mb: of DDP.
        fast_linear: the dense part's layers are shadowsync's own.
    """

    sharding: str
    pipeline: str
    wire: str
    bucket_mb: int
    fast_linear: bool


@dataclass
class Samples(Pipelineable):
    """A batch as TorchRec's pipelines take it."""

    dense: Tensor
    sparse: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Samples":
        """Itself: there is one device."""
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        """A CPU has no streams."""

    def pin_memory(self) -> "Samples":
        """Nothing is copied to a device."""
        return self


class Model(nn.Module):
    """The DLRM of shadowsync over an `EmbeddingBagCollection`; the bottom tower runs while pooled vectors arrive."""

    def __init__(self, collection: nn.Module, dense_part: DlrmModule, precision: str) -> None:
        super().__init__()
        self.collection = collection
        self.bottom = DensePart(dense_part.bottom, precision)
        self.top = DensePart(_Top(dense_part), precision)

    def forward(self, samples: Samples) -> tuple[Tensor, Tensor]:
        pooled = self.collection(samples.sparse)
        projected = self.bottom(samples.dense)
        logits = self.top(projected, pooled.values())
        return F.binary_cross_entropy_with_logits(logits, samples.labels), logits.detach()


class DensePart(nn.Module):
    """A part of the model computed in `precision`."""

    def __init__(self, inner: nn.Module | None, precision: str) -> None:
        super().__init__()
        assert inner is not None, "the data has dense columns"
        self.inner = inner
        self.bf16 = precision == "bf16"

    def forward(self, *inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16 and torch.is_grad_enabled()):
            outputs: Tensor = self.inner(*inputs)
        return outputs


class _Top(nn.Module):
    """What `DlrmModule.forward` does after its bottom tower."""

    def __init__(self, dense_part: DlrmModule) -> None:
        super().__init__()
        self.interaction, self.top = dense_part.interaction, dense_part.top

    def forward(self, projected: Tensor, flat: Tensor) -> Tensor:
        products = self.interaction(torch.cat([projected, flat.to(projected.dtype)], dim=1))
        logits: Tensor = self.top(torch.cat([projected, products], dim=1)).squeeze(1)
        return logits.float()


class RowWiseSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """TorchRec's row-wise sharding, which it does not offer for a CPU, though its parts work there."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Row-wise only."""
        return ["row_wise"]


class Trainer:
    """One process's share of the training."""

    def __init__(self, config: Config, choices: Choices, source: OpenSource, options: Options) -> None:
        self.config, self.rank, self.world = config, dist.get_rank(), dist.get_world_size()
        self.names = [feature.name for feature in source.schema.features]
        model = self._model(choices, source, options)
        self.model = _distributed(model, config, options)
        self.optimizer = _optimizer(self.model, config)
        self.pipeline = PIPELINES[options.pipeline](self.model, self.optimizer, CPU)
        self.rates = _rates(config, source.rows * config.data.epochs)

    def _model(self, choices: Choices, source: OpenSource, options: Options) -> Model:
        config = self.config
        tables = make_tables(config, source.schema)
        collection = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=f"table {table.name}",  # a bare `type` would hide a method of the module that holds it
                    embedding_dim=table.dim,
                    num_embeddings=table.rows,
                    feature_names=list(table.features),
                    pooling=PoolingType.SUM if table.pooling == "sum" else PoolingType.MEAN,
                    init_fn=lambda weight, rows=table.rows: nn.init.uniform_(weight, -(rows**-0.5), rows**-0.5),
                )
                for table in tables
            ],
            device=torch.device("meta"),
        )
        dense_part = make_module(config, choices, source.schema, tables, None)
        assert isinstance(dense_part, DlrmModule), "the yardstick is a DLRM"
        computing = computing_here(config, dense_part)
        if options.fast_linear:
            accelerate(dense_part, parse_kernels(computing.kernels))
        return Model(collection, dense_part, computing.precision)

    def train(self, mine: Sequence[Batch], samples_per_step: int) -> float:
        """Trains on this process's batches.

        Returns:
            Seconds of the steps after the first few.
        """
        coming = iter([self._samples(batch) for batch in mine])
        begin = time.perf_counter()
        for step in range(len(mine)):
            if step == WARMUP_STEPS:
                dist.barrier()
                begin = time.perf_counter()
            self._set_rate((step + 1) * samples_per_step)
            self.pipeline.progress(coming)
        dist.barrier()
        return time.perf_counter() - begin

    def evaluate(self, source: OpenSource) -> TestMetrics | None:
        """Quality on all test rows, in rank 0; None in the others."""
        model = self.pipeline.detach() if hasattr(self.pipeline, "detach") else self.model
        model.eval()
        scores = []
        with torch.no_grad():
            for whole in in_order(source, self.config.train.batch_size * self.world):
                batch = share(whole, self.rank, self.world)
                scores.append(torch.stack([model(self._samples(batch))[1], batch.labels]))
        gathered: list[Any] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(torch.cat(scores, dim=1), gathered)
        if gathered is None:
            return None
        logits, labels = torch.cat(gathered, dim=1)
        return evaluate_scores(logits, labels)

    def _set_rate(self, samples: int) -> None:
        factor = self.rates.factor(samples)
        for group, rate in zip(self.optimizer.param_groups, self._base_rates(), strict=True):
            group["lr"] = rate * factor

    def _base_rates(self) -> Iterator[float]:
        """The fused optimizers come first, as in `_optimizer`."""
        fused = len(self.model.fused_optimizer.param_groups)
        yield from itertools.repeat(self.config.embedding.lr, fused)
        yield from itertools.repeat(self.config.train.lr, len(self.optimizer.param_groups) - fused)

    def _samples(self, batch: Batch) -> Samples:
        ids: Jagged = batch.ids
        assert ids.weights is None, "the yardstick's tables take no weights"
        lengths = ids.lengths().to(torch.int32)
        sparse = KeyedJaggedTensor(keys=self.names, values=ids.values, lengths=lengths)
        return Samples(batch.dense, sparse, batch.labels)


def _distributed(model: Model, config: Config, options: Options) -> Any:
    """The model with its tables sharded and its dense part under DDP."""
    assert config.embedding.optimizer == "rowwise_adagrad", "the yardstick's rows have row-wise Adagrad"
    apply_optimizer_in_backward(
        RowWiseAdagrad, model.collection.parameters(), {"lr": config.embedding.lr, "eps": config.embedding.eps}
    )
    codecs = None
    if options.wire == "bf16":
        codecs = get_qcomm_codecs_registry(QCommsConfig(CommType.BF16, CommType.BF16), device=CPU)
    kinds = SHARDINGS[options.sharding]
    kind = RowWiseSharder if options.sharding == "row_wise" else EmbeddingBagCollectionSharder
    sharder: Any = kind(qcomm_codecs_registry=codecs)
    names = [table.name for table in model.collection.embedding_bag_configs()]  # type: ignore[operator]
    constraints = {name: ParameterConstraints(sharding_types=kinds) for name in names}
    topology = Topology(world_size=dist.get_world_size(), local_world_size=1, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    wrapper = DefaultDataParallelWrapper(bucket_cap_mb=options.bucket_mb)
    made = DistributedModelParallel(
        module=model, device=CPU, plan=plan, sharders=[sharder], data_parallel_wrapper=wrapper
    )
    if options.wire == "bf16":
        made._dmp_wrapped_module.register_comm_hook(None, _reduce_in_bf16)
    return made


def _reduce_in_bf16(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's hook of that kind, which refuses Gloo, though Gloo adds bfloat16."""
    buffer = bucket.buffer()
    half = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(half, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: buffer.copy_(done.value()[0]))


def _optimizer(model: Any, config: Config) -> Any:
    """The rows' optimizers, whose steps only hand on the learning rate, and the dense part's."""
    assert config.train.optimizer == "adagrad", "the yardstick's dense part has Adagrad"
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    made = KeyedOptimizerWrapper(
        dense, lambda given: torch.optim.Adagrad(given, lr=config.train.lr, eps=config.train.eps, fused=True)
    )
    return CombinedOptimizer([("fused", model.fused_optimizer), ("dense", made)])


def _rates(config: Config, total_samples: int) -> Rates:
    train = config.train
    given = train.warmup_samples
    warmup = given if given is not None else warmup_samples(config, total_samples)
    return Rates(warmup, train.decay, train.final_lr, total_samples)


def run(config: Config, options: Options) -> dict[str, Any]:
    """Trains and evaluates; what is printed."""
    choices = choose_all(config, own_model=False)
    source = choices.source.open("train", config.data.on_bad_row)
    test = choices.source.open("test", config.data.on_bad_row)
    assert source is not None
    torch.manual_seed(config.train.seed)
    trainer = Trainer(config, choices, source, options)
    world = dist.get_world_size()
    mine = share_of(config, source, dist.get_rank(), world)
    seconds = trainer.train(mine, config.train.batch_size * world)
    counts = torch.tensor([sum(map(len, mine)), sum(map(len, mine[WARMUP_STEPS:]))])
    dist.all_reduce(counts)
    quality = None if test is None else trainer.evaluate(test)
    found: dict[str, Any] = {"eps": int(counts[1]) / seconds, "samples": int(counts[0]), "seconds": seconds}
    if quality is not None:
        found |= {"auc": quality.auc, "ne": quality.ne}
    return found | vars(options)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--master", default="127.0.0.1", help="address of rank 0's host")
    parser.add_argument("--port", type=int, default=29_500)
    parser.add_argument("--sharding", choices=list(SHARDINGS), default="table_wise")
    parser.add_argument("--pipeline", choices=list(PIPELINES), default="sparse")
    parser.add_argument("--wire", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--bucket-mb", type=int, default=25, help="of DDP")
    parser.add_argument("--fast-linear", action="store_true", help="shadowsync's own layers in the dense part")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_args()


def main() -> None:
    """Joins the others, trains, prints."""
    given = _arguments()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    options = Options(given.sharding, given.pipeline, given.wire, given.bucket_mb, given.fast_linear)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{given.master}:{given.port}",
        rank=given.rank,
        world_size=given.world,
        timeout=timedelta(seconds=300),
    )
    try:
        found = run(load(None, given.overrides), options)
        if given.rank == 0:
            print(json.dumps(found))
        dist.barrier()  # one that leaves early takes the others' connections along
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
