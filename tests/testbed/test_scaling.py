"""The grid, the layout of hosts, the law, and the table of the scaling benchmark."""

import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
import scaling
from clustered import Cells
from scaling import Cell, Emulated

from shadowsync.aggregation.stragglers import parse_stragglers
from shadowsync.choices import choose_all
from shadowsync.cluster.roles import ROLES
from shadowsync.cluster.scheduler import Scheduler
from shadowsync.config import load
from shadowsync.runtime.runtime import Machine

EMULATED = Emulated("60mbit", 100.0, 120)
MEAN_OF_100 = 100.0 / scaling.MEAN_FACTOR


def row(method: str, trainers: int, **changes: Any) -> dict[str, Any]:
    plain = {"method": method, "trainers": trainers, "dense_servers": 2, "rate": "60mbit", "step_ms": MEAN_OF_100}
    return {**plain, "dense_bytes": 1_187_500, "eps": 640.0, "gap": 5.0, "auc": 0.8, "load": 1.0, **changes}


def test_every_method_runs_on_the_first_number_of_servers_and_some_on_the_others() -> None:
    groups = [cells for cells, _ in scaling.grid([1, 10], [2, 4], EMULATED)]
    assert [len(cells) for cells in groups] == [5, 2, 2, 2, 1, 1]
    assert all(len({(cell.trainers, cell.dense_servers) for cell in cells}) == 1 for cells in groups)
    assert groups[3] == [Cell(10, 4, "EASGD every 5"), Cell(10, 4, "background EASGD")]
    assert len({EMULATED.name(cell) for cells in groups for cell in cells}) == 13


def test_one_server_has_the_links_of_two_and_the_same_law() -> None:
    alone = EMULATED.together(2)
    assert alone.rate == "120mbit"
    two, one = Cell(10, 2, "EASGD every 5"), Cell(10, 1, "EASGD every 5")
    assert scaling.cycle_s(one, alone) == pytest.approx(scaling.cycle_s(two, EMULATED))
    assert alone.name(one) != EMULATED.name(one)


@pytest.mark.parametrize("trainers", [1, 2, 3, 4, 6, 16])
def test_each_trainer_has_a_place_and_as_much_of_a_link_as_a_server(trainers: int) -> None:
    nodes, links = scaling.layout(trainers, dense_servers=2)
    assert len(nodes) == len(links)
    assert links[:4] == [0, 1, 1, 1]  # the third server's is that of rows
    assert [node.cpus for node in nodes] == links
    assert sum(links[4:]) == trainers
    assert max(links[4:]) - min(links[4:]) <= 1
    assert ["server" in node.resources for node in nodes] == [False, True, True, True] + [False] * len(links[4:])
    assert ["trainer" in node.resources for node in nodes] == [False] * 4 + [True] * len(links[4:])


def test_every_server_has_a_link_of_its_own() -> None:
    cell = Cell(6, 2, "EASGD every 5")
    nodes, _ = scaling.layout(6, 2)
    machines = [
        Machine(str(host), "", float(node.cpus), 1 << 30, frozenset(node.resources)) for host, node in enumerate(nodes)
    ]
    scheduler = Scheduler(machines)
    cluster = load(None, ["cluster.runtime=ray", *scaling.overrides(cell, EMULATED)]).cluster
    roles = "embedding-0", *(f"dense-{index}" for index in range(2))
    requests = [ROLES[role.partition("-")[0]].of(cluster, role) for role in roles]
    placed = [scheduler.put(request) for request in requests]
    assert {place.machine for place in placed if place is not None} == {"1", "2", "3"}


def test_trainers_do_not_step_together() -> None:
    slow = parse_stragglers(scaling.apart(1000.0, longest=6).partition("=")[2])
    first = [slow.factor(worker, 0.2) for worker in range(200)]
    assert 1 <= min(first) < 1.5
    assert 5.5 < max(first) <= 6
    cell, second = Cell(6, 2, "EASGD every 5"), Emulated("6mbit", 1000.0, 120)
    assert 5 * scaling.MEAN_FACTOR < scaling.cycle_s(cell, second) < 12 * scaling.MEAN_FACTOR
    assert scaling.cycle_s(Cell(6, 2, "background EASGD"), second) == 0.0
    later = [slow.factor(worker, 1.6 + 1.1 * step) for worker in range(20) for step in range(200)]
    assert statistics.fmean(later) == pytest.approx(scaling.MEAN_FACTOR, abs=0.01)


def test_the_dense_part_is_weighed() -> None:
    bottom = 13 * 512 + 512 + 512 * 256 + 256 + 256 * 64 + 64 + 64 * 2 + 2
    top = (3 + 2) * 512 + 512 + 512 * 256 + 256 + 256 + 1
    assert scaling.dense_bytes() == 4 * (bottom + top)


def test_the_configuration_of_every_run_is_accepted() -> None:
    for cells, used in scaling.grid([20], [2, 4], EMULATED):
        for cell in cells:
            config = load(None, ["cluster.runtime=ray", *scaling.overrides(cell, used)])
            choices = choose_all(config, own_model=False)
            assert config.cluster.dense_servers == (cell.dense_servers if choices.method.centralised else 1)
            assert config.train.trainers == 20


def test_the_law() -> None:
    # 2 servers of 7.125 MB/s take in 12 dense parts of 1.1875 MB a second; one there and back takes 1/6 s, and a
    # trainer comes every 0.5 s + 1/6 s, that is 1.5 times a second
    every_5, background = row("EASGD every 5", 16), row("background EASGD", 11)
    assert scaling.exchange_s(every_5) == pytest.approx(1 / 12)
    assert scaling.exchange_s({**every_5, "dense_servers": 4}) == pytest.approx(1 / 24)
    assert scaling.predicted_share(every_5, queues=False) == pytest.approx(12 / (16 * 1.5))
    assert scaling.predicted_share(row("EASGD every 5", 8), queues=False) == pytest.approx(1.0)
    assert scaling.predicted_share(row("EASGD every 5", 16, dense_servers=4), queues=False) == pytest.approx(14 / 16)
    # of two, each finds the other at a link for an eighth of the time: 1/12 s become 9/96
    two = 2 / (0.5 + 2 * 9 / 96)
    assert scaling.exchanges(row("EASGD every 5", 2), 2, queues=True) == pytest.approx(two)
    assert scaling.predicted_share(row("EASGD every 5", 2), queues=True) == pytest.approx(two / 3)
    assert scaling.predicted_share(row("EASGD every 5", 500), queues=True) == pytest.approx(12 / (500 * 1.5), rel=0.01)
    assert scaling.predicted_gap(every_5) == 5.0
    assert scaling.predicted_share(background, queues=True) == 1.0
    assert scaling.predicted_gap(background) == pytest.approx(12 / 12 / 0.1)
    assert scaling.predicted_gap(row("background EASGD", 1, step_ms=10 * MEAN_OF_100)) == 1.0
    assert scaling.predicted_gap(row("background MA", 8)) is None
    assert scaling.predicted_share(row("background MA", 8), queues=True) is None


def test_the_rate_is_that_of_the_middle_of_the_run() -> None:
    slow_start = [(0.0, 0), (10.0, 300), (11.0, 400), (13.0, 600), (15.0, 800), (15.5, 900), (40.0, 1000)]
    assert scaling.steady_rate(slow_start, 1000) == pytest.approx(600 / 5.5)
    assert scaling.steady_rate(slow_start[:2], 1000) is None
    assert scaling.steady_rate([(1.0, 300), (1.0, 300)], 1000) is None
    assert scaling.steady_rate([], 1000) is None


def test_the_table_and_the_picture_are_made_from_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Cells(tmp_path / "cells")
    rows = [row("EASGD every 5", 1), row("EASGD every 5", 16, eps=3_840.0), row("background MA", 2, gap=None)]
    for number, one in enumerate(rows):
        kept.write(str(number), one)
    picture = tmp_path / "picture.png"
    monkeypatch.setattr(sys, "argv", ["s", "--out", str(tmp_path / "cells"), "--report", "--picture", str(picture)])
    scaling.main()
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [
        "EASGD",
        "every",
        "5",
        "2",
        "at",
        "60mbit",
        "16",
        "3,840",
        "38%",
        "50%",
        "45%",
        "5.0",
        "5.0",
        "0.8000",
        "1.0",
    ] in said
    assert ["background", "MA", "-", "2", "640", "-", "-", "-", "-", "-", "0.8000", "1.0"] in said
    assert picture.read_bytes().startswith(b"\x89PNG")
