"""The configuration: a pydantic schema, read from YAML and dot-list overrides through OmegaConf.

A section that chooses among the members of a seam (`data.name`, `model.name`, `sync.method` …) keeps the chosen
member's own options beside the keys below; `choices` hands them to that member, which checks them (see `registry`).
Comments say what raising a value does.
"""

import contextlib
import datetime
import math
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, Field
from yaml import YAMLError

from shadowsync.errors import ConfigError
from shadowsync.places import written_places
from shadowsync.registry import MemberOf, explain, flow, nearest, option_names

Pooling = Literal["sum", "mean", "none"]
LONGEST_S = 3.2e7
"""A year: more than a job lasts, and less than the timers of Python take."""
DIM, WIDEST = 16, 4096
"""Width of a vector unless it is given, and of a row at most."""
OTHERS = "default"
"""In a map of widths, those that it does not name."""
EMULATED_S = 1e9
"""Of a job that stands for a longer one."""


_WITHIN = re.compile(r"within=[1-9][0-9]{0,17}")
_DURATION = re.compile(r"(?=.*[1-9])[0-9]{1,9}(\.[0-9]{1,9})?[smhd]")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds_of(duration: str) -> float:
    """Of a number with s, m, h or d behind it."""
    return float(duration[:-1]) * _UNITS_S[duration[-1]]


def _as_ttl(given: Any) -> Any:
    if isinstance(given, str) and not _DURATION.fullmatch(given):
        if given.isdecimal():
            return int(given)
        raise ValueError("it must be a number of samples, or of time with s, m, h or d behind it, for instance 7d")
    return given


Ttl = Annotated[Annotated[int, Field(ge=1)] | str, pydantic.BeforeValidator(_as_ttl)]
"""Samples of training, or a duration in the data's own time."""


class Section(BaseModel):
    """A section in which every key is listed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class Choice(BaseModel):
    """A section that also takes the options of the members chosen in it."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @property
    def options(self) -> dict[str, Any]:
        """What the user wrote besides the keys of the schema."""
        return dict(self.model_extra or {})


class SplitConfig(Section):
    """Rows that are kept from training, one way to say which: those of other files, or some of the training rows."""

    path: str | tuple[str, ...] | None = None
    """for sources of files: the files that hold them, as data.path"""
    fraction: float | None = Field(None, gt=0, lt=1)
    """a share of the rows, drawn by a hash of the place of each; with column by a hash of its value, so that all rows
    with one value are on the same side"""
    last: float | None = Field(None, gt=0)
    """the last rows in the order of the data: below 1 a share of them, else how many"""
    column: str | None = Field(None, min_length=1)
    """whose values decide, with fraction or from; of tables with names of columns"""
    start: int | float | str | None = Field(None, alias="from")
    """rows whose column has this value or one above: a number, a date, a time, text"""
    seed: int = Field(0, ge=0, lt=1 << 63, description="of what is drawn by fraction; another one draws others")

    @pydantic.field_validator("start", mode="before")
    @classmethod
    def _as_text(cls, given: Any) -> Any:
        if isinstance(given, bool):
            raise ValueError("it is a number, a date or text, not true or false")
        return given.isoformat() if isinstance(given, datetime.date) else given

    @pydantic.model_validator(mode="after")
    def _one_way(self) -> "SplitConfig":
        ways = {"path": self.path, "fraction": self.fraction, "last": self.last, "from": self.start}
        given = [name for name, value in ways.items() if value is not None]
        if len(given) != 1:
            not_these = " and ".join(given) or "none of them"
            raise ValueError(f"give one of path, fraction, last and from (with column), not {not_these}")
        if self.start is not None and self.column is None:
            raise ValueError("from needs column, the name of the column whose values from there on are taken")
        if self.column is not None and given[0] in ("path", "last"):
            raise ValueError(f"column has no effect beside {given[0]}: give fraction or from, or leave it out")
        if "seed" in self.model_fields_set and self.fraction is None:
            raise ValueError("seed has no effect without fraction: leave it out")
        if self.last is not None and self.last >= 1 and not self.last.is_integer():
            raise ValueError(f"last={self.last:g} is neither a share below 1 nor a whole number of rows")
        return self

    def __str__(self) -> str:
        return flow(self.told())

    def told(self) -> dict[str, Any]:
        """What was given, by its keys."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


class DataConfig(Choice):
    """Where samples come from and how they are read; the source's own options go beside these keys."""

    name: str = "completejourney"
    """the source; left out with data.path, the one of such files: .parquet, .csv, .tsv, .jsonl"""
    epochs: int = Field(1, ge=1, le=1_000_000, description="passes over the data; more trains longer")
    on_bad_row: Literal["error", "skip"] = "error"
    """a bad row ends the run, or is counted and left out"""
    shuffle: bool | str = True
    """permute slices, and rows inside a slice, anew in every epoch; within=ROWS does so within stretches of at most so
    many rows, which come in their order"""
    slice_rows: int = Field(8192, ge=1, description="rows leased at once; more costs memory and evens out less well")
    readers: int = Field(1, ge=1, le=64, description="threads that parse; more feeds faster trainers")
    prefetch: int = Field(2, ge=1, le=1024, description="slices read ahead per trainer; more costs memory")
    valid: SplitConfig | None = None
    """rows on which training is validated, kept from it; its keys are below"""
    test: SplitConfig | None = None
    """test rows that are part of the training rows, and kept from them; keys as those of valid"""
    max_rows: int | None = Field(None, ge=0)
    """train on the first rows only, at most so many in each epoch, in the order of the data and after data.valid and
    data.test have taken theirs; null or 0: on all"""
    accept: str | None = None
    """with --resume: go on with this data, although it is not what the checkpoint was trained on; the word for it
    stands in the message that refuses the data"""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _name_by_path(cls, given: Any) -> Any:
        path = given.get("path") if isinstance(given, dict) and "name" not in given else None
        first = path[0] if isinstance(path, list | tuple) and path else path
        return {**given, "name": _source_of(first)} if isinstance(first, str) else given

    @pydantic.field_validator("shuffle", mode="before")
    @classmethod
    def _order(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.keys() == {"within"}:
            given = f"within={given['within']}"
        if isinstance(given, str) and _WITHIN.fullmatch(given):
            return given
        try:
            return pydantic.TypeAdapter(bool).validate_python(given)
        except pydantic.ValidationError:
            raise ValueError("it must be true, false or within=ROWS, for instance within=65536") from None

    @property
    def window(self) -> int | None:
        """Rows that a shuffled one stays within; None for all of an epoch."""
        return int(self.shuffle.removeprefix("within=")) if isinstance(self.shuffle, str) else None


def _each_width(given: Any) -> Any:
    """Of a map every value is looked at here, for a sentence that names its key."""
    for name, width in given.items() if isinstance(given, dict) else ():
        if isinstance(width, bool) or not isinstance(width, int) or not 1 <= width <= WIDEST:
            raise ValueError(f"the width of {name} is {width}, it must be a whole number from 1 to {WIDEST}")
    return given


class ModelConfig(Choice):
    """The dense part; the model's own options (layer widths) go beside these keys."""

    name: str = Field("dlrm", description="the model")
    embedding_dim: Annotated[
        Annotated[int, Field(ge=1, le=WIDEST)] | dict[str, int], pydantic.BeforeValidator(_each_width)
    ] = DIM
    """width of the vectors in tables made by default, one number, or by feature with default for the others: {user: 32,
    default: 8}; more costs memory"""


class TableConfig(Section):
    """One embedding table."""

    name: str = Field(description="unique among the tables")
    rows: int | None = Field(None, ge=1, description="ids lie in [0, rows); more costs memory")
    dim: int = Field(ge=1, le=WIDEST, description="width of a row; more costs memory and time")
    features: tuple[str, ...] = Field(min_length=1, description="names of the features that look rows up in it")
    pooling: Pooling | dict[str, Pooling] = "sum"
    """how the rows of one sample become one vector, for all features or by feature"""
    ids: Literal["rows", "dynamic"] = "rows"
    """rows: an id is the number of its row; dynamic: ids are any integers, and get rows as they come"""
    capacity: int | None = Field(None, ge=1)
    """of a dynamic table, in place of rows: ids that can have a row at a time, rounded up to a multiple of 16"""
    admit: float | None = Field(None, gt=0, le=255)
    """of a dynamic table: look-ups after which an id gets a row (null: 2); below 1 the probability that each does"""
    evict: Annotated[str | None, MemberOf("shadowsync.embedding.eviction:Eviction")] = None
    """of a dynamic table: whose row a new id gets where none is free (null: lfu)"""
    ttl: Ttl | None = None
    """of a dynamic table: an id that is not looked up for so many samples of training, or as long by data.time (7d),
    loses its row; null: none does"""
    unadmitted: Literal["shared", "zeros"] | None = None
    """of a dynamic table: what ids without a row look up, rows that they share (null) or zeros"""
    pinned: tuple[int, ...] = ()
    """of a dynamic table: ids that get a row at their first look-up and keep it"""

    @pydantic.model_validator(mode="after")
    def _sized(self) -> Self:
        dynamic = self.ids == "dynamic"
        key, other = ("capacity", "rows") if dynamic else ("rows", "capacity")
        if getattr(self, key) is None:
            raise ValueError(f"table {self.name} needs {key}")
        useless = {other, *(() if dynamic else ("admit", "evict", "ttl", "unadmitted", "pinned"))}
        given = sorted(useless & {name for name in self.model_fields_set if getattr(self, name) not in (None, ())})
        if given:
            raise ValueError(f"{given[0]} has no effect on table {self.name}, as ids={self.ids}: leave it out")
        return self


class EmbeddingConfig(Section):
    """The embedding tables and their servers."""

    servers: int | None = Field(None, ge=1, le=1024)
    """embedding servers; more spreads memory and load over machines. null: 2 with cluster.address, 1 on one machine,
    where more only cost messages"""
    storage: str = Field("auto")
    """auto takes fbgemm where it is installed, else torch; mapped has the rows in a file of a disk, and those in use in
    memory"""
    memory_gib: float | None = Field(None, gt=0)
    """of a mapped storage: what each server keeps in memory; more reads less. null: half of the machine's over the
    servers"""
    folder: str | None = Field(None, min_length=1)
    """of a mapped storage: of a fast disk, with room for all rows; null is the one for temporary files"""
    optimizer: Annotated[str, MemberOf("shadowsync.embedding.optimizers:RowOptimizer")] = "rowwise_adagrad"
    """applied in the fused backward"""
    lr: float = Field(0.15, gt=0, description="learning rate of the rows")
    eps: float = Field(1e-8, gt=0, description="added to the denominator of Adagrad and Adam")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam: decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="Adam: decay of the second moment")
    l2: float = Field(0.0, ge=0)
    """penalty of the rows: with each step of a row so many times the row is added to its gradient, once however often
    it occurs in the batch; more draws rows to zero, and those that nobody looks up stay"""
    unique_rows: Literal["auto", "always", "never"] = "auto"
    """send each distinct row of a batch once: where that is less traffic (auto: never on one machine without
    cluster.address), always or never"""
    sharding: Literal["table_wise", "row_wise"] = "table_wise"
    """table_wise packs whole tables, by their measured cost; row_wise cuts every table evenly over all servers, which
    costs more and makes servers alike"""
    split_rows: int | None = Field(None, ge=1)
    """tables of more rows are cut into parts of at most this many; null cuts what is too large for a server, and on a
    cluster tables of so many ids in a sample that others would wait for their server"""
    tables: tuple[TableConfig, ...] | None = None
    """the tables; None makes one for each feature of the source"""
    pooling: dict[str, Pooling] = Field({})
    """by feature, over what source and tables say: how the rows of one sample become one vector; none keeps them apart,
    as a sequence for models that take one"""


class TrainConfig(Section):
    """The trainers and the dense part's optimization."""

    trainers: int = Field(2, ge=1, le=1024, description="replicas of the dense part")
    workers: int = Field(1, ge=1, le=256, description="Hogwild threads per trainer")
    batch_size: int = Field(512, ge=1, description="samples per step of one worker")
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """of the forward and backward pass; parameters stay fp32. auto is bf16 where the processor multiplies it natively
    and clearly faster (timed at the start), else fp32"""
    kernels: str = "auto"
    """which library multiplies the dense part's matrices on a CPU: torch, onednn, or for each layer the faster one,
    timed at the start (auto); what result.json has under computing.kernels repeats a run's choice"""
    device: str = Field("cpu", description="where the dense part computes: cpu or cuda")
    optimizer: Annotated[str, MemberOf("shadowsync.training.optimizers:DenseOptimizer")] = "adagrad"
    """of the dense part"""
    lr: float = Field(0.005, gt=0, description="learning rate of the dense part")
    eps: float = Field(1e-8, gt=0, description="added to the denominator of Adagrad and Adam")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam: decay of the first moment")
    beta2: float = Field(0.999, ge=0, lt=1, description="Adam: decay of the second moment")
    l2: float = Field(0.0, ge=0)
    """penalty of the dense part's weights, not of biases and norms: with each step so many times the weight is added to
    its gradient (weight decay as torch's optimizers have it); more draws them to zero"""
    accumulate: int = Field(1, ge=1, le=1_000_000)
    """batches of a trainer whose mean gradient makes one step of its dense part; more is as a larger batch that need
    not fit into memory; rows are stepped with every batch"""
    clip_norm: float | None = Field(None, gt=0, description="a dense gradient of a larger L2 norm is scaled down to it")
    warmup_samples: int | None = Field(None, ge=0)
    """samples of the job over which both learning rates rise from 0; more starts more gently; null is a twentieth of
    the run (50,000 at most), or 20 steps of all workers (a quarter of the run at most) if that is more"""
    decay: Literal["none", "linear", "cosine"] = "none"
    """how both learning rates fall after the warm-up, to final_lr with the last sample of data.epochs: planned by
    samples, so that time_limit and patience cut it short"""
    final_lr: float = Field(0.0, ge=0, le=1, description="share of the learning rate left at the end of the decay")
    seed: int = Field(0, ge=0, lt=1 << 63, description="of initial values and of the order of the data")
    prefetch: int | None = Field(None, ge=0, le=64)
    """pulls under way per worker; more hides a slower network and adds staleness; null is 0 in process and where
    workers wait for each other in rounds, else 2"""
    emulate_step_ms: float | None = Field(None, gt=0, le=LONGEST_S * 1e3)
    """each step lasts at least this long, as on a slower machine; results say so"""
    stragglers: str | None = Field(None, min_length=1)
    """with emulate_step_ms: who is slow when, for instance share=0.25,slow=3-10,for_s=60,seed=1"""
    emulate_compute: bool = True
    """false with emulate_step_ms: wait instead of computing, to study servers and networks with more trainers than
    cores; nothing is learned"""
    time_limit: str | None = None
    """training ends after so long, as 90s, 30m, 2h or 1d, or with data.epochs if that comes first; the state is then
    saved and tested, and --resume goes on for as long again. It does not hasten decay, which follows the samples of
    data.epochs"""
    save_every_s: float | None = Field(None, gt=0, le=EMULATED_S)
    """seconds between checkpoints; None saves at the end only"""
    save_values: Annotated[str, MemberOf("shadowsync.checkpoint.values:RowValues", also=("fp32",))] = "fp32"
    """what checkpoints hold rows and their optimizer state in: fewer bits take less disk and round more, and only fp32
    goes on exactly; the dense part is always exact"""
    keep: int = Field(2, ge=1)
    """newest checkpoints kept that share no file, each with what it builds on; more takes more disk"""
    checkpoint_dir: str | None = None
    """where checkpoints go, any fsspec path; None for OUT/checkpoints"""
    validate_every: Annotated[int, Field(ge=1)] | Literal["epoch"] | None = None
    """training rows between validations on the rows of data.valid, or epoch; more costs less time. null is epoch where
    there is data.valid"""
    measures: tuple[str, ...] = ()
    """measured on validation and test rows beside AUC, NE, log loss and calibration: gauc(COLUMN), ndcg@K(COLUMN),
    pr_auc, rmse, mae, poisson_deviance, and metrics of torchmetrics as package.module:Class"""
    best_by: str = Field("auc", min_length=1)
    """measure of the validation that says which checkpoint is the best: that is kept beside train.keep, tested and
    exported: auc, ne, logloss or one as of measures, behind LABEL/ if not of the first label. Left out, ne where that
    is no click"""
    min_delta: float = Field(0.0, ge=0)
    """a validation is better by more than this; more ends training sooner"""
    patience: int | None = Field(None, ge=1)
    """training ends after so many validations in a row that were not better than the best; null never ends it early"""
    plateau_patience: int | None = Field(None, ge=1)
    """both learning rates fall after so many validations in a row that were not better; null leaves them as they are"""
    plateau_factor: float = Field(0.5, gt=0, lt=1, description="what the learning rates are multiplied with then")

    @pydantic.field_validator("validate_every", mode="before")
    @classmethod
    def _rows_or_epoch(cls, given: Any) -> Any:
        if isinstance(given, str) and given != "epoch" and not given.isdecimal():
            raise ValueError("it must be a number of rows, or epoch")
        return given

    @pydantic.field_validator("time_limit", mode="before")
    @classmethod
    def _duration(cls, given: Any) -> Any:
        if given is not None and not (isinstance(given, str) and _DURATION.fullmatch(given)):
            raise ValueError("it must be a number above 0 with s, m, h or d behind it, for instance 30m")
        return given

    @property
    def limit_s(self) -> float:
        """`time_limit` in seconds."""
        return math.inf if self.time_limit is None else seconds_of(self.time_limit)


class SyncConfig(Choice):
    """How replicas of the dense part are merged; the method's and the schedule's own options go beside these keys."""

    method: str = Field("easgd", description="the replica method")
    schedule: str = Field("background", description="when it runs")


class AggregationConfig(Choice):
    """How gradients make global steps, in place of replicas that are merged; the method's own options go beside
    these keys."""

    method: str | None = None
    """the gradient method, which takes the place of sync.method; null merges replicas"""
    global_batch: int | None = Field(None, ge=1)
    """samples of a global step, whatever the number of workers; a multiple of train.batch_size; null is one batch of
    each worker"""
    rows: Literal["containing", "buffer"] = "buffer"
    """a row's gradient is the sum over all batches of the step, divided as the dense part's, as in one large batch, or
    (containing) the mean over the batches that contain it, which for rare rows depends on the size of local batches"""


class CodecConfig(Choice):
    """A codec by its name alone, or a map of `name` and the codec's own options."""

    name: str = Field("plain", description="the codec")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _spell_out(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


class CompressionConfig(Section):
    """What crosses between roles: a codec for each kind of traffic, as `push: int8`, or with options as
    `push: {name: threshold, keep: 0.01}`, on the command line `compression.push=threshold compression.push.keep=0.01`.
    """

    pull: CodecConfig = Field(CodecConfig(), description="codec of pooled embeddings")
    push: CodecConfig = Field(CodecConfig(), description="codec of their gradients")
    dense: CodecConfig = Field(CodecConfig(), description="codec of the dense part")


class RecoveryConfig(Section):
    """What is saved while a job runs, and what happens when an embedding server dies."""

    mode: Annotated[str, MemberOf("shadowsync.recovery.policy:RecoveryPolicy", also=("auto",))] | None = None
    """after a failure everybody goes back to the last checkpoint (full), or only the replacement of the dead server
    (partial); auto takes the cheaper one by what it measures; null is auto on a cluster and where failures are
    injected, else none"""
    priority: Annotated[str, MemberOf("shadowsync.recovery.priority:RowPriority")] = "all"
    """partial: save all rows at once, or a share of them more often: those that changed most (scar), that most
    steps changed (mfu), or a sample of those used (ssu)"""
    target_pls: float = Field(0.1, gt=0, le=1)
    """partial: portion of samples that may be lost; more saves less often"""
    share: float = Field(0.125, gt=0, le=1)
    """of the rows in a save by priority; more saves more rows and less often"""
    min_rows: int = Field(100_000, ge=1)
    """only tables of at least so many rows are saved by priority, the others whole"""
    interval_s: float | None = Field(None, gt=0, le=EMULATED_S)
    """seconds between saves; more loses more at a failure; null leaves it to the mode"""
    prior_fail_s: float = Field(100_800.0, gt=0, le=EMULATED_S)
    """seconds between failures, as believed before any was seen; more saves less often at first"""
    prior_save_s: float = Field(60.0, ge=0, le=EMULATED_S)
    """seconds that a save costs, as believed before the first one"""
    prior_load_s: float | None = Field(None, ge=0, le=EMULATED_S)
    """seconds that loading costs, as believed before the first one; null: as a save"""
    prior_restart_s: float = Field(15.0, ge=0, le=EMULATED_S)
    """seconds until a server is replaced, as believed before the first failure"""
    prior_lost_servers: float = Field(1.0, ge=1, le=1024)
    """partial: embedding servers that one failure takes, as believed before the first one; more saves more often at
    first"""
    emulate_job_s: float | None = Field(None, gt=0, le=EMULATED_S)
    """in one process: the job stands for one of so many seconds; saves and failures follow that clock, each costs what
    prior_*_s say, and nobody waits for it"""
    inject: str | None = Field(None, min_length=1)
    """failures to cause, for instance gamma:mean_s=5,seed=3 or at:30+60,unit=s"""


class ClusterConfig(Section):
    """Where roles run."""

    runtime: Literal["auto", "inprocess", "processes", "ray"] = "auto"
    """where roles run: threads, processes on this machine, or on a Ray cluster; auto takes processes for several
    trainers on four cores and more, and says so"""
    address: str | None = None
    """of the Ray cluster to join, host:port or auto; null starts one of its own on this machine"""
    dense_servers: int = Field(1, ge=1, le=1024)
    """servers that share the dense part; more shortens the sync gap, or a global step"""
    readers: int | None = Field(None, ge=1, le=1024)
    """processes that parse; more feeds more trainers; null is one per machine"""
    placement: Literal["together", "apart"] = "together"
    """trainers share machines with embedding servers, or keep off them"""
    server_memory_gib: float | None = Field(None, gt=0)
    """what one embedding server may hold; null leaves it to the machines' memory"""
    trainer_cpus: float = Field(1.0, ge=0, le=1024, description="CPUs reserved for a trainer; more keeps others off")
    server_cpus: float = Field(0.0, ge=0, le=1024, description="CPUs reserved for an embedding or dense server")
    trainer_resource: str | None = Field(None, min_length=1)
    """Ray resource that machines of trainers and readers must have"""
    server_resource: str | None = Field(None, min_length=1)
    """Ray resource that machines of embedding and dense servers must have"""
    min_trainers: int = Field(1, ge=1, le=1024, description="with fewer for lost_after_s, the job saves and ends")
    max_trainers: int | None = Field(None, ge=1, le=1024)
    """trainers may join up to so many while it runs; null is train.trainers"""
    min_servers: int = Field(1, ge=1, le=1024)
    """machines that hold embedding servers at least: what is to be shut down is not emptied before others are there"""
    max_servers: int | None = Field(None, ge=1, le=1024)
    """embedding servers move, while training goes on, onto up to so many machines as these come, and off those that are
    to be shut down (shadowsync drain); null leaves them where they are"""
    lost_after_s: float = Field(60.0, ge=2, le=LONGEST_S)
    """silence after which a role is given up; more rides out longer cuts of the network"""


class ReportConfig(Section):
    """What is shown and written."""

    every_s: float = Field(1.0, gt=0, le=LONGEST_S)
    """seconds between progress lines and rows of metrics.jsonl"""
    window: int = Field(100_000, ge=1, description="samples in the window of NE; more is smoother and slower to react")
    callbacks: tuple[str, ...] = ()
    """what else is told of the run: mlflow, wandb, or package.module:Class of a shadowsync.Callback"""
    tensorboard: bool = Field(True, description="write TensorBoard events")
    html: bool = Field(True, description="write report.html")
    prometheus_port: int | None = Field(None, ge=0, le=65535)
    """port on which Prometheus finds the job's figures; 0 takes a free one"""
    prometheus_host: str = Field("127.0.0.1", min_length=1)
    """address on which that port is opened; 0.0.0.0 lets everybody read them who can reach this machine"""


class Config(Section):
    """The whole configuration of a job."""

    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    embedding: EmbeddingConfig = EmbeddingConfig()
    train: TrainConfig = TrainConfig()
    sync: SyncConfig = SyncConfig()
    aggregation: AggregationConfig = AggregationConfig()
    compression: CompressionConfig = CompressionConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    cluster: ClusterConfig = ClusterConfig()
    report: ReportConfig = ReportConfig()

    _written: dict[tuple[str, str], Any] = pydantic.PrivateAttr(default_factory=dict)

    @property
    def written(self) -> dict[tuple[str, str], Any]:
        """Places that the user gave by interpolations, as written: this is stored, and not what they stand for."""
        return self._written


def parse(values: dict[str, Any]) -> Config:
    """A checked `Config` from nested dicts.

    Raises:
        ConfigError: a key is unknown (the nearest known one is named) or a value is out of range.
    """
    try:
        return Config.model_validate(values)
    except pydantic.ValidationError as error:
        raise ConfigError(_explain_config(error)) from error


def load(path: Path | None, overrides: Sequence[str], base: dict[str, Any] | None = None) -> Config:
    """`parse` of `base`, then the YAML file, then `key.path=value` overrides, each over the one before.

    Raises:
        ConfigError: the file cannot be read, an override has no `=`, or what `parse` finds.
    """
    given = read_given(path, overrides)
    return with_written(parse(merge(base or {}, given, [])), given)


def with_written(config: Config, given: dict[str, Any]) -> Config:
    """The configuration, which knows of its places in `given` (see `read_given`) how they were written."""
    config._written = written_places(given)
    return config


def _source_of(path: str) -> str:
    """The source of files that are called so."""
    sources = MemberOf("shadowsync.data.source:Source").members()
    if (found := source_called_like(path, sources)) is not None:
        return found
    taking = ", ".join(name for name, source in sources.items() if "path" in option_names(source))
    raise ConfigError(f"data.path={path} does not say by its ending what is in it: set data.name to one of {taking}")


def source_called_like(path: str, sources: Mapping[str, type[Any]]) -> str | None:
    """The source that reads files whose names end so, if there is one."""
    return next((n for n, one in sources.items() if path.lower().endswith(getattr(one, "endings", ()))), None)


def with_data(config: Config, **options: Any) -> Config:
    """The configuration with these keys of its section `data`, as if they had been given."""
    given = {**config.data.model_dump(by_alias=True, exclude_unset=True), **options}
    return config.model_copy(update={"data": DataConfig.model_validate(given)})


def read_given(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """What a command gives, the YAML file and the overrides over it, with its interpolations as they are written."""
    return _given(read_yaml(path) if path else {}, overrides)


def merge(base: dict[str, Any], values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Nested dicts and then a dot-list of overrides laid over `base`.

    `base` may be what somebody stored: only in the others interpolations are resolved, among themselves.
    """
    given = _given(values, overrides)
    with _unreadable(overrides):
        above = OmegaConf.to_container(OmegaConf.create(given), resolve=True)
        return typing.cast("dict[str, Any]", _laid_over(_codecs_spelled_out(base), above))


def _given(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Overrides laid over `values`, not resolved; names of codecs first, since another codec drops options."""
    given: Any = _codecs_spelled_out(values)
    for override in sorted(overrides, key=lambda override: _CODEC_NAME.match(override) is None):
        if "=" not in override:
            raise ConfigError(f"{override!r} is not an override: write key.path=value, for instance train.lr=0.01")
        with _unreadable(overrides):
            dotted: Any = OmegaConf.to_container(OmegaConf.from_dotlist([override]))
            given = _laid_over(given, _codecs_spelled_out(dotted))
    return typing.cast("dict[str, Any]", given)


_CODEC_NAME = re.compile(r"compression\.\w+(\.name)?=[^{]")


def _laid_over(below: Any, above: Any, place: tuple[str, ...] = ()) -> Any:
    """Maps are laid over each other key by key; anything else takes the place of what is below it.

    An empty map inside a section takes the place of the one below it, too (`data.tables={}`), and so does another
    codec, which comes with its own defaults.

    Raises:
        ConfigError: there is a list where keys are given below, or keys where a list is.
    """
    key = ".".join(place)
    if isinstance(below, dict) and isinstance(above, list):
        raise ConfigError(f"{key}={flow(above)}: it holds keys, not a list: write {key}.KEY=VALUE")
    if isinstance(below, list) and isinstance(above, dict):
        raise ConfigError(f"{key}={flow(above)}: it is a list, and one is written whole: {key}=[a,b]")
    if not isinstance(below, dict) or not isinstance(above, dict) or (len(place) > 1 and not above):
        return above
    if len(place) == 2 and place[0] == "compression" and "name" in below and "name" in above:
        below = below if above["name"] == below["name"] else {}
    return {**below, **{key: _laid_over(below.get(key), value, (*place, str(key))) for key, value in above.items()}}


def _codecs_spelled_out(values: dict[str, Any]) -> dict[str, Any]:
    """Codecs given by name alone as maps, so that options can be laid over them."""
    section = values.get("compression")
    if not isinstance(section, dict):
        return values
    spelled = {kind: {"name": codec} if isinstance(codec, str) else codec for kind, codec in section.items()}
    return {**values, "compression": spelled}


@contextlib.contextmanager
def _unreadable(overrides: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except (OmegaConfBaseException, YAMLError, TypeError, ValueError, RecursionError) as error:
        given = textwrap.shorten(" ".join(overrides), 120) if overrides else ""
        where = f" (with the overrides {given})" if given else ""
        raise ConfigError(f"the configuration cannot be read: {str(error).splitlines()[0]}{where}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The nested dicts of a YAML file."""
    named = path.suffix.lower() in (".yaml", ".yml")  # so sources need not be loaded to know what it is
    if not named and source_called_like(path.name, MemberOf("shadowsync.data.source:Source").members()):
        raise ConfigError(
            f"{path} is data and not a configuration: train on it with data.path={path}, or look at it with shadowsync "
            f"data inspect {path}"
        )
    try:
        plain = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: there is no such configuration file") from error
    except OSError as error:  # OmegaConf raises one without an errno for a file that holds a single value
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # PyYAML and OmegaConf raise many kinds for a file that is not YAML
        raise ConfigError(f"{path}: not a YAML file: {str(error).splitlines()[0]}") from error
    if not isinstance(plain, dict):
        raise ConfigError(
            f"{path}: the top level must hold sections ({', '.join(Config.model_fields)}), not {type(plain).__name__}"
        )
    return typing.cast("dict[str, Any]", plain)


def _explain_config(error: pydantic.ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    if first["type"] != "extra_forbidden":
        return explain(error, "")
    *parents, key = [str(part) for part in first["loc"]]
    known = _fields_at(parents)
    place = ".".join(parents) or "the configuration"
    dotted = ".".join([*parents, key])
    return f"{dotted}: there is no such key{nearest(key, known)}; {place} has {', '.join(known)}"


def _fields_at(parents: Sequence[str]) -> list[str]:
    model: type[BaseModel] = Config
    for parent in parents:
        if parent in model.model_fields:
            model = _section_in(model.model_fields[parent].annotation) or model
    return [field.alias or name for name, field in model.model_fields.items()]


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class inside an annotation such as `tuple[TableConfig, ...] | None`."""
    if (
        isinstance(annotation, type)
        and not isinstance(annotation, types.GenericAlias)
        and issubclass(annotation, BaseModel)
    ):
        return annotation
    found = (_section_in(part) for part in typing.get_args(annotation))
    return next((section for section in found if section is not None), None)
