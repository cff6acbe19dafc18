"""Public models as they are, in a job and in plain PyTorch: lines changed, the largest difference of the loss over 200
steps, and examples per second.

    python benchmarks/unedited_models.py [--rounds 3] [--models "TorchRec DLRM" …]

Models that are not installed are skipped with a sentence. To have all of them, in an environment of their own:

    pip install torchrec fuxictr deepctr-torch
    git clone https://github.com/reczoo/FuxiCTR fuxictr-models        # its package lacks the models
    git clone https://github.com/facebookresearch/dlrm dlrm
    PYTHONPATH=fuxictr-models:dlrm python benchmarks/unedited_models.py

The losses are those of one worker with SGD for rows and dense part on both sides, in the same order of rows. Speeds are
those of two workers without locks against two threads inside torch, with SGD, in fp32, batch 1,024, on 13 dense columns
and 26 tables of 20,000 × 16; each run is a process of its own, and variants take turns. `lines` counts what is written
in the user's model to train it here: the call of `wrap` stands in the last column.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module as load
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from shadowsync import Job, wrap
from shadowsync.cluster.session import reader_options
from shadowsync.config import parse
from shadowsync.data.batch import Batch
from shadowsync.data.reader import Reader
from shadowsync.data.source import OpenSource
from shadowsync.data.synthetic import Synthetic
from shadowsync.models.inputs import Inputs

sys.path.insert(0, str(Path(__file__).parent))
from machine import describe, table

DENSE, FEATURES, ROWS, DIM, BATCH, STEPS, TIMED = 13, 26, 20_000, 16, 1024, 200, 120
NAMES = [f"c{number}" for number in range(1, FEATURES + 1)]
DENSE_NAMES = [f"i{number}" for number in range(1, DENSE + 1)]
LR = {"dense": 0.02, "rows": 0.5}
ANSWER = "answer: "
"""Stands before it, because libraries print, too."""


@dataclass(frozen=True)
class Unedited:
    """A model, what is written to train it here, and how it is called."""

    model: nn.Module
    written: str
    inputs: Callable[[Inputs], tuple[Any, ...]]
    output: str = "logits"
    lines: int = 0


def torchrec_bags() -> Any:
    """One table for each feature."""
    torchrec, config = load("torchrec"), load("torchrec.modules.embedding_configs").EmbeddingBagConfig
    tables = [config(ROWS, DIM, name=f"t_{name}", feature_names=[name]) for name in NAMES]
    return torchrec.EmbeddingBagCollection(tables=tables)


def keyed(batch: Inputs) -> tuple[Any, ...]:
    """As TorchRec's models are called."""
    return batch.dense, batch.kjt()


def torchrec_dlrm() -> Unedited:
    """TorchRec's, with the widths of the reference."""
    model = load("torchrec.models.dlrm").DLRM(torchrec_bags(), DENSE, [512, 256, DIM], [512, 256, 1])
    return Unedited(model, "wrap(model)", keyed)


def torchrec_deepfm() -> Unedited:
    """TorchRec's, which ends in a sigmoid."""
    model = load("torchrec.models.deepfm").SimpleDeepFMNN(DENSE, torchrec_bags(), 64, 64)
    return Unedited(model, 'wrap(model, output="probability")', keyed, "probability")


def dlrm_reference() -> Unedited:
    """The authors' own."""
    pairs = (FEATURES + 1) * FEATURES // 2
    np.random.seed(0)
    model = load("dlrm_s_pytorch").DLRM_Net(
        m_spa=DIM,
        ln_emb=np.array([ROWS] * FEATURES),
        ln_bot=np.array([DENSE, 512, 256, DIM]),
        ln_top=np.array([pairs + DIM, 512, 256, 1]),
        arch_interaction_op="dot",
        sigmoid_top=2,
    )

    def of_bags(batch: Inputs) -> tuple[Any, ...]:
        ids = batch.ids()
        return batch.dense, torch.arange(len(ids)).expand(ids.shape[1], -1), list(ids.T)

    return Unedited(model, 'wrap(model, inputs=of_bags, output="probability")', of_bags, "probability")


def fuxictr_deepfm() -> Unedited:
    """From FuxiCTR's collection of models."""
    features = load("fuxictr.features").FeatureMap("synthetic", tempfile.mkdtemp())
    numbers = {name: {"source": "", "type": "numeric"} for name in DENSE_NAMES}
    ids = {name: {"source": "", "type": "categorical", "vocab_size": ROWS} for name in NAMES}
    features.features.update(numbers | ids)
    features.labels, features.default_emb_dim = ["label"], DIM
    features.num_fields = features.get_num_fields()
    features.set_column_index()
    model = load("model_zoo.DeepFM.DeepFM_torch.src").DeepFM(
        features,
        gpu=-1,
        embedding_dim=DIM,
        hidden_units=[400, 400],
        optimizer="adam",
        loss="binary_crossentropy",
        task="binary_classification",
        metrics=["AUC"],
        verbose=0,
        model_root=tempfile.mkdtemp(),
    )
    return Unedited(model, 'wrap(model, output="probability")', lambda b: (b.columns(),), "probability")


def deepctr_deepfm() -> Unedited:
    """DeepCTR-Torch's."""
    inputs = load("deepctr_torch.inputs")
    columns = [inputs.DenseFeat(name, 1) for name in DENSE_NAMES]
    columns += [inputs.SparseFeat(name, ROWS, embedding_dim=DIM) for name in NAMES]
    model = load("deepctr_torch.models").DeepFM(
        columns, columns, dnn_hidden_units=(400, 400), task="binary", init_std=0.01
    )
    written = 'wrap(model, output="probability")'
    return Unedited(model, written, lambda b: (b.matrix(),), "probability")


MODELS: dict[str, Callable[[], Unedited]] = {
    "DLRM reference": dlrm_reference,
    "TorchRec DLRM": torchrec_dlrm,
    "TorchRec DeepFM": torchrec_deepfm,
    "FuxiCTR DeepFM": fuxictr_deepfm,
    "DeepCTR-Torch DeepFM": deepctr_deepfm,
}


class Outputs:
    """What a model answered to each whole batch; a copied model writes to the same one."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self


class Noting(nn.Module):
    """Calls a model and notes what it answers, one per sample."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.outputs = model, Outputs()

    def forward(self, *given: Any) -> Tensor:
        found = self.model(*given)
        flat: Tensor = (found["y_pred"] if isinstance(found, dict) else found).flatten()
        if self.training and len(flat) == BATCH:
            self.outputs.found.append(flat.detach().clone())
        return flat


def made(name: str) -> Unedited:
    """Always with the same initial values."""
    torch.manual_seed(0)
    return MODELS[name]()


def loss_of(outputs: Tensor, labels: Tensor, output: str) -> Tensor:
    """The mean log loss of logits or probabilities."""
    functional = nn.functional
    if output == "logits":
        return functional.binary_cross_entropy_with_logits(outputs, labels)
    return functional.binary_cross_entropy(outputs, labels)


def settings(steps: int, workers: int) -> dict[str, Any]:
    """Of the job."""
    return {
        "data": {"name": "synthetic", "rows": steps * BATCH, "test_rows": 0, "dense": DENSE, "features": FEATURES,
                 "table_rows": ROWS, "repeat_blocks": 16},
        "embedding": {"optimizer": "sgd", "lr": LR["rows"]},
        "train": {"batch_size": BATCH, "workers": workers, "trainers": 1, "optimizer": "sgd", "lr": LR["dense"],
                  "precision": "fp32", "warmup_samples": 0},
        "sync": {"method": "none"},
        "report": {"html": False, "tensorboard": False, "every_s": 2.0},
    }  # fmt: skip


def batches(steps: int) -> Iterator[Batch]:
    """In the order in which a single worker gets them."""
    reader = Reader(opened(steps), reader_options(parse(settings(steps, 1))))
    feed = reader.feed(0)
    while (leased := feed.next()) is not None:
        yield leased.batch
        feed.done(leased)
    reader.close()


def opened(steps: int) -> OpenSource:
    """The rows of a job."""
    data = {key: value for key, value in settings(steps, 1)["data"].items() if key != "name"}
    source = Synthetic(**data).open("train", "error")
    assert source is not None
    return source


def job(name: str, steps: int, workers: int) -> tuple[list[Tensor], float]:
    """Outputs of each step, and examples per second."""
    given = made(name)
    noting = Noting(given.model)
    wrapped = wrap(noting, given.inputs, output=given.output)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        result = Job(settings(steps, workers), model=wrapped, out=Path(folder) / "run").run()
    return noting.outputs.found, result.throughput.eps


def plain(name: str, steps: int, threads: int) -> tuple[list[Tensor], float]:
    """As `job`, by torch alone; batches come from memory."""
    torch.set_num_threads(threads)
    torch.sparse.check_sparse_tensor_invariants.disable()
    given = made(name)
    model = Noting(given.model).train()
    kinds = (nn.Embedding, nn.EmbeddingBag)
    rows = [child.weight for child in model.modules() if isinstance(child, kinds)]
    others = [p for p in model.parameters() if p.requires_grad and not any(p is row for row in rows)]
    optimizer = torch.optim.SGD([{"params": rows, "lr": LR["rows"]}, {"params": others, "lr": LR["dense"]}])
    schema, prepared, started = opened(steps).schema, list(batches(steps)), 0.0
    for number, batch in enumerate(prepared):
        if number == steps // 10:
            started = time.perf_counter()
        outputs = model(*given.inputs(Inputs(schema, batch.dense, batch.ids)))
        optimizer.zero_grad(set_to_none=True)
        loss_of(outputs, batch.labels, given.output).backward()
        optimizer.step()
    eps = (steps - steps // 10) * BATCH / (time.perf_counter() - started)
    return model.outputs.found, eps


def largest_difference(name: str) -> tuple[float, float]:
    """Of the losses of all steps between a job of one worker and plain torch; and the last loss."""
    output, labels = made(name).output, [batch.labels for batch in batches(STEPS)]
    ours, theirs = job(name, STEPS, 1)[0], plain(name, STEPS, 1)[0]
    assert len(ours) == len(theirs) == STEPS
    curves = [[float(loss_of(o, y, output)) for o, y in zip(found, labels, strict=True)] for found in (ours, theirs)]
    return max(abs(a - b) for a, b in zip(*curves, strict=True)), curves[0][-1]


def apart(*arguments: str) -> Any:
    """This script's answer to `--one`, from a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--one", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return json.loads(next(line.removeprefix(ANSWER) for line in done.stdout.splitlines() if line.startswith(ANSWER)))


def one(name: str, what: str) -> Any:
    """A figure, made in this process."""
    if what == "curve":
        given = made(name)
        return [given.lines, given.written, *largest_difference(name)]
    run = job if what == "job" else plain
    return run(name, TIMED, 2)[1]


def measured(name: str, rounds: int) -> tuple[Any, ...] | str:
    """A line of the table, or why there is none."""
    curve = apart(name, "curve")
    if isinstance(curve, str):
        return f"{name} is skipped: {curve}"
    lines, written, difference, last = curve
    speeds: dict[str, list[float]] = {"job": [], "plain": []}
    for _, kind in itertools.product(range(rounds), speeds):
        speeds[kind].append(apart(name, kind))
    eps = {kind: statistics.median(found) for kind, found in speeds.items()}
    figures = (f"{difference:.1e}", f"{last:.4f}", f"{eps['job']:,.0f}", f"{eps['plain']:,.0f}")
    return name, lines, *figures, f"{eps['job'] / eps['plain']:.2f}", written


def main() -> None:
    """Prints the machine and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    if arguments.one:
        print(ANSWER + json.dumps(one(*arguments.one)))
        return
    found = [measured(name, arguments.rounds) for name in arguments.models]
    head = ["model", "lines", "largest difference", "last loss", "examples/s", "plain torch", "ratio", "written"]
    print("\n".join(describe()), "\n".join(row for row in found if isinstance(row, str)), sep="\n\n", end="\n\n")
    print(table(head, [row for row in found if not isinstance(row, str)]))


if __name__ == "__main__":
    main()
