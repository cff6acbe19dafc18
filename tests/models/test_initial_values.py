"""Initial values of the dense part depend on the seed only."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch

from shadowsync.assembly import make_module
from shadowsync.choices import choose_all
from shadowsync.config import parse
from shadowsync.data.source import Feature, Schema
from shadowsync.embedding.table import Table

THREADS = 8


def test_modules_that_are_made_at_once_in_one_process_are_alike() -> None:
    config = parse({"data": {"name": "synthetic"}, "train": {"seed": 5}})
    choices, together = choose_all(config, own_model=False), Barrier(THREADS)
    schema = Schema(("x", "y"), (Feature("f", 9),))
    tables = [Table("f", 9, 16, ("f",))]

    def made() -> torch.Tensor:
        together.wait()
        module = make_module(config, choices, schema, tables, None)
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    before = torch.random.get_rng_state()
    with ThreadPoolExecutor(THREADS) as pool:
        first, *others = [answer.result() for answer in [pool.submit(made) for _ in range(THREADS)]]
    assert all(torch.equal(first, other) for other in others)
    assert torch.equal(torch.random.get_rng_state(), before)
