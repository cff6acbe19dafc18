"""Which role goes to which machine; when a job gives up is decided from events and times alone."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.assembly import GIB
from shadowsync.cluster.manager import role_of
from shadowsync.cluster.scheduler import RestartPolicy, Scheduler
from shadowsync.config import ClusterConfig
from shadowsync.runtime.runtime import LaunchRequest, Machine


def machine(name: str, cpus: float = 8, gib: float = 16, *resources: str) -> Machine:
    return Machine(name, name, cpus, int(gib * GIB), frozenset(resources))


Need = tuple[str, int]
"""A role, and the memory that it will fill."""


def need(role: str) -> Need:
    return role, 0


def rows(index: int, gib: float) -> Need:
    return f"embedding-{index}", int(gib * GIB)


def trainers(count: int) -> list[Need]:
    return [need(f"trainer-{rank}") for rank in range(count)]


class Map:
    """A scheduler that is asked for roles by their names."""

    def __init__(
        self, config: ClusterConfig, machines: Sequence[Machine], placed: Sequence[tuple[Need, str]] = ()
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(machines, [replace(self.request(wanted), machine=where) for wanted, where in placed])

    def request(self, wanted: Need) -> LaunchRequest:
        return role_of(wanted[0]).of(self.config, *wanted)

    def put(self, wanted: Need) -> LaunchRequest | None:
        return self.scheduler.put(self.request(wanted))


def spread(config: ClusterConfig, machines: Sequence[Machine], needs: Sequence[Need]) -> list[str | None]:
    """The machine of each, in their order."""
    places = Map(config, machines)
    orders = [places.put(wanted) for wanted in needs]
    return [None if order is None else order.machine for order in orders]


def test_rows_go_where_most_memory_is_free() -> None:
    machines = [machine("a", gib=10), machine("b", gib=16), machine("c", gib=12)]
    found = spread(ClusterConfig(), machines, [rows(0, 8), rows(1, 7), rows(2, 6), rows(3, 5)])
    assert found == ["b", "c", "a", "b"]


def test_the_largest_first_fills_machines_to_the_brim() -> None:
    machines = [machine("a", gib=10), machine("b", gib=10)]
    assert spread(ClusterConfig(), machines, [rows(0, 7), rows(1, 6), rows(2, 4), rows(3, 3)]) == ["a", "b", "b", "a"]
    assert spread(ClusterConfig(), machines, [rows(0, 7), rows(1, 6), rows(2, 4), rows(3, 4)])[3] is None


def test_equal_rows_are_spread_over_equal_machines() -> None:
    machines = [machine(name) for name in "abc"]
    found = spread(ClusterConfig(), machines, [rows(index, 0.001) for index in range(6)])
    assert Counter(found) == {"a": 2, "b": 2, "c": 2}


def test_trainers_and_dense_servers_are_spread() -> None:
    machines = [machine(name) for name in "abc"]
    needs = [*trainers(6), *(need(f"dense-{index}") for index in range(3))]
    found = spread(ClusterConfig(), machines, needs)
    assert Counter(found[:6]) == {"a": 2, "b": 2, "c": 2}
    assert Counter(found[6:]) == {"a": 1, "b": 1, "c": 1}


def test_together_trainers_share_machines_with_rows_and_apart_they_do_not() -> None:
    machines = [machine("a"), machine("b")]
    needs = [rows(0, 1), *trainers(2)]
    assert spread(ClusterConfig(placement="together"), machines, needs) == ["a", "b", "a"]
    assert spread(ClusterConfig(placement="apart"), machines, needs) == ["a", "b", "b"]


def test_apart_holds_for_rows_that_were_there_before() -> None:
    before = [(rows(0, 1), "b")]
    places = Map(ClusterConfig(placement="apart"), [machine("a"), machine("b")], before)
    assert {order.machine for wanted in trainers(3) if (order := places.put(wanted)) is not None} == {"a"}


@pytest.mark.parametrize("wanted", [rows(0, 1), need("trainer-0"), need("reader-0")], ids=lambda wanted: wanted[0])
def test_a_machine_that_may_be_gone_comes_last(wanted: Need) -> None:
    """But where no other one has room, it is tried."""
    doubtful = replace(machine("doubtful"), doubtful=True)
    assert spread(ClusterConfig(), [doubtful, machine("small", gib=2)], [wanted]) == ["small"]
    assert spread(ClusterConfig(), [doubtful, machine("full", cpus=0)], [wanted]) == ["doubtful"]


def test_readers_go_where_trainers_are() -> None:
    places = Map(ClusterConfig(), [machine("a"), machine("b"), machine("c")])
    assert [order.machine for wanted in trainers(2) if (order := places.put(wanted)) is not None] == ["a", "b"]
    assert places.scheduler.machines_of("trainer") == 2
    orders = [places.put(need(f"reader-{index}")) for index in range(2)]
    assert [order.machine for order in orders if order is not None] == ["a", "b"]
    assert [order.cpus for order in orders if order is not None] == [0.0, 0.0]


def test_a_trainer_takes_its_cpus_and_no_more_fit_than_there_are() -> None:
    found = spread(ClusterConfig(trainer_cpus=2), [machine("a", cpus=5)], trainers(3))
    assert found == ["a", "a", None]


def test_a_head_without_cpus_is_left_to_the_driver() -> None:
    machines = [machine("head", cpus=0, gib=64), machine("worker", gib=4)]
    assert spread(ClusterConfig(trainer_cpus=0), machines, [rows(0, 1), *trainers(1), need("reader-0")]) == [
        "worker",
        "worker",
        "worker",
    ]


def test_custom_resources_say_who_goes_where() -> None:
    config = ClusterConfig(trainer_resource="gpu_box", server_resource="big")
    machines = [machine("plain"), machine("t", 8, 16, "gpu_box"), machine("s", 8, 4, "big")]
    places = Map(config, machines)
    needs = [rows(0, 1), need("dense-0"), *trainers(1), need("reader-0")]
    orders = [order for wanted in needs if (order := places.put(wanted)) is not None]
    assert [(order.machine, order.resource) for order in orders] == [
        ("s", "big"),
        ("s", "big"),
        ("t", "gpu_box"),
        ("t", "gpu_box"),
    ]


def test_an_order_holds_what_the_process_takes() -> None:
    order = Map(ClusterConfig(server_cpus=0.5), [machine("a")]).put(rows(3, 1))
    assert order is not None
    assert (order.role, order.machine, order.cpus) == ("embedding-3", "a", 0.5)


@pytest.mark.parametrize(
    ("config", "wanted", "sentence"),
    [
        (
            {},
            rows(2, 40),
            "embedding-2 needs a machine with 40.0 GiB of memory, and none of the 2 has room",
        ),
        (
            {"trainer_cpus": 32, "placement": "apart", "trainer_resource": "fast"},
            need("trainer-1"),
            "trainer-1 needs a machine with 32 free CPU(s) and the resource fast and no embedding server, "
            "and none of the 2 has room",
        ),
    ],
)
def test_who_finds_no_place_says_what_was_needed(config: dict[str, Any], wanted: Need, sentence: str) -> None:
    places = Map(ClusterConfig(**config), [machine("a"), machine("b")])
    assert places.put(wanted) is None
    assert places.scheduler.why_not(places.request(wanted)) == sentence


NEEDS = st.one_of(
    st.tuples(st.just("embedding"), st.integers(0, 6 * GIB)),
    st.tuples(st.sampled_from(["trainer", "dense", "reader"]), st.just(0)),
)
MACHINES = st.lists(
    st.tuples(st.sampled_from([0.0, 1.0, 2.0, 4.0]), st.integers(0, 8 * GIB), st.frozensets(st.sampled_from("xy"))),
    min_size=1,
    max_size=4,
)
CONFIGS = st.builds(
    ClusterConfig,
    placement=st.sampled_from(["together", "apart"]),
    trainer_cpus=st.sampled_from([0.0, 0.5, 1.0]),
    server_cpus=st.sampled_from([0.0, 0.5]),
    trainer_resource=st.sampled_from([None, "x"]),
    server_resource=st.sampled_from([None, "y"]),
)


@settings(deadline=None, max_examples=150)
@given(CONFIGS, MACHINES, st.lists(NEEDS, max_size=12))
def test_nothing_is_ever_overfull_and_the_same_is_placed_the_same(
    config: ClusterConfig, offers: list[tuple[float, int, frozenset[str]]], wanted: list[tuple[str, int]]
) -> None:
    machines = [Machine(f"m{i}", f"m{i}", *offer) for i, offer in enumerate(offers)]
    counts: Counter[str] = Counter()
    needs = []
    for kind, size in wanted:
        needs.append((f"{kind}-{counts[kind]}", size))
        counts[kind] += 1
    places = Map(config, machines)
    orders = [(wanted, places.put(wanted)) for wanted in needs]
    for machine_ in machines:
        here = [(wanted, order) for wanted, order in orders if order is not None and order.machine == machine_.id]
        assert sum(order.cpus for _, order in here) <= machine_.cpus
        assert sum(size for (_, size), _ in here) <= machine_.memory_bytes
        assert all(order.resource is None or order.resource in machine_.resources for _, order in here)
        assert machine_.cpus > 0 or not here
    again = Map(config, machines)
    assert [again.put(wanted) for wanted in needs] == [order for _, order in orders]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 8 * GIB), min_size=1, max_size=4), st.integers(0, 9 * GIB))
def test_rows_find_a_place_if_and_only_if_one_machine_has_the_memory(memories: list[int], size: int) -> None:
    machines = [Machine(f"m{i}", f"m{i}", 1.0, memory) for i, memory in enumerate(memories)]
    order = Map(ClusterConfig(), machines).put(("embedding-0", size))
    assert (order is not None) == (size <= max(memories))


def test_a_place_is_vacant_for_too_long_only_after_its_time() -> None:
    restarts = RestartPolicy(lost_after_s=10.0, min_trainers=1)
    restarts.died("dense-0", trained=5, now=100.0)
    restarts.died("dense-0", trained=6, now=105.0)
    assert not restarts.too_long("dense-0", 110.0)
    assert restarts.too_long("dense-0", 110.1)
    assert not restarts.too_long("dense-1", 1000.0)
    restarts.taken("dense-0")
    assert not restarts.too_long("dense-0", 1000.0)


def test_too_few_trainers_end_a_job_unless_they_come_back_in_time() -> None:
    restarts = RestartPolicy(lost_after_s=10.0, min_trainers=2)
    assert restarts.too_few(1, 0.0) is None
    assert restarts.too_few(1, 9.0) is None
    assert restarts.too_few(2, 9.5) is None
    assert restarts.too_few(1, 10.5) is None
    assert restarts.too_few(0, 20.5) is None
    assert "cluster.min_trainers=2" in str(restarts.too_few(1, 20.6))


def test_deaths_without_progress_end_a_job_and_progress_forgives_them() -> None:
    restarts = RestartPolicy(lost_after_s=10.0, min_trainers=1, most_deaths=3)
    for number in range(3):
        restarts.died("trainer-0", trained=100, now=float(number))
        assert restarts.hopeless("trainer-0") is None
    restarts.died("trainer-0", trained=101, now=4.0)
    assert restarts.hopeless("trainer-0") is None
    for _ in range(3):  # going back and training the same rows again is no progress
        restarts.died("embedding-0", trained=50, now=5.0)
    assert "4 roles died in a row" in str(restarts.hopeless("embedding-0"))


# --- moves -----------------------------------------------------------------------------------------------------------


class Moving(Map):
    """Machines and what is on them, of which some are to be shut down."""

    def __init__(
        self,
        machines: Sequence[Machine],
        placed: Sequence[tuple[Need, str]],
        leaving: Sequence[str] = (),
        most: int | None = None,
    ) -> None:
        super().__init__(ClusterConfig(), machines)
        there = [replace(self.request(wanted), machine=where) for wanted, where in placed]
        self.scheduler = Scheduler(machines, there, leaving, most)

    def next(self, fewest: int = 1) -> tuple[str, str | None, str | None] | None:
        """The role, from where, and where to."""
        found = self.scheduler.next_move(fewest)
        return None if found is None else (found[0].role, found[0].machine, found[1].machine)


def test_rows_go_to_a_machine_that_has_come() -> None:
    placed = [(rows(0, 3), "a"), (rows(1, 2), "a"), (rows(2, 1), "b")]
    assert Moving([machine("a"), machine("b")], placed).next() == ("embedding-1", "a", "b")
    assert Moving([machine("a"), machine("b")], placed[:2], most=1).next() is None
    three = [machine("a"), machine("b"), machine("c")]
    assert Moving(three, placed, most=3).next() == ("embedding-1", "a", "c")
    assert Moving(three, placed, most=2).next() == ("embedding-1", "a", "b")
    assert Moving(three, [(rows(0, 3), "a"), (rows(1, 2), "b"), (rows(2, 1), "c")]).next() is None


def test_rows_stay_where_little_is_gained() -> None:
    assert Moving([machine("a"), machine("b")], [(rows(0, 8), "a"), (rows(1, 0.1), "a")]).next() is None
    assert Moving([machine("a"), machine("b", gib=0.5)], [(rows(0, 2), "a"), (rows(1, 1), "a")]).next() is None
    assert Moving([machine("a")], [(rows(0, 2), "a"), (rows(1, 1), "a")]).next() is None
    apart = [(rows(0, 8), "a"), (rows(1, 8), "b")]
    assert Moving([machine("a"), machine("b", gib=64)], apart).next() == ("embedding-0", "a", "b")
    assert Moving([machine("a"), machine("b", gib=64)], apart).next(fewest=2) is None
    assert Moving([machine("a")], [(need("trainer-0"), "a")]).next() is None


def test_a_machine_that_is_to_be_shut_down_is_emptied() -> None:
    machines = [machine("a"), machine("b"), machine("c")]
    placed = [(rows(0, 1), "a"), (rows(1, 2), "a"), (need("dense-0"), "a"), (need("trainer-0"), "a"), (rows(2, 9), "b")]
    assert Moving(machines, placed, ["a"]).next() == ("embedding-1", "a", "c"), "the largest first"
    assert Moving(machines, placed, ["a"], most=1).next() == ("embedding-1", "a", "b")
    assert Moving(machines, placed, ["a"]).next(fewest=2) == ("embedding-1", "a", "c")
    assert Moving(machines[:2], placed, ["a"]).next(fewest=2) is None, "it waits until another machine is there"
    assert Moving(machines, placed, ["a", "c"]).next() == ("embedding-1", "a", "b")
    without_rows = placed[2:]
    assert Moving(machines, without_rows, ["a"]).next() is None, "trainers may reach it in the machine's memory"
    assert Moving(machines, [placed[2], placed[4]], ["a"]).next() == ("dense-0", "a", "c")


def test_rows_come_back_to_as_many_machines_as_may_hold_some() -> None:
    """One that was to be shut down and is not has left rows on one more."""
    three = [machine("a"), machine("b"), machine("c"), machine("d")]
    placed = [(rows(0, 3), "a"), (rows(1, 1), "b"), (rows(2, 2), "c")]
    assert Moving(three, placed, most=2).next() == ("embedding-1", "b", "c")
    assert Moving(three, placed, most=3).next() is None


def test_rows_without_a_size_stay() -> None:
    assert Moving([machine("a"), machine("b")], [(rows(0, 0), "a"), (rows(1, 0), "a")]).next() is None


def test_nobody_is_put_on_a_machine_that_is_to_be_shut_down() -> None:
    places = Moving([machine("a"), machine("b")], [(rows(0, 1), "b")], ["a"])
    assert {order.machine for wanted in trainers(3) if (order := places.put(wanted)) is not None} == {"b"}
    back = replace(places.request(rows(1, 1)), machine="a")
    assert places.scheduler.put(back) is not None, "but what is in the memory there is found there"
    full = Moving([machine("a"), machine("b")], [(rows(0, 1), "b")], ["a"], most=1)
    assert full.scheduler.put(back) is not None


def test_trainers_go_where_others_stay_from_which_they_can_go_on() -> None:
    guests = [(need("trainer-0"), "a"), (need("reader-0"), "a")]
    machines = [machine("a"), machine("b")]

    def let_go(placed: Sequence[tuple[Need, str]], fewest: int = 1, with_trainers: bool = True) -> list[str]:
        scheduler = Moving(machines, placed, ["a"]).scheduler
        return [request.role for request in scheduler.to_let_go(fewest, with_trainers)]

    assert let_go(guests) == [], "nobody is left from whom it could go on"
    assert let_go(guests, with_trainers=False) == ["trainer-0"]
    both = [*guests, (need("trainer-1"), "b")]
    assert let_go(both) == ["trainer-0", "reader-0"]
    assert let_go(both, fewest=2) == ["trainer-0"], "and the reader when another is there"
    machines = [machine("a"), machine("b", cpus=1)]
    assert let_go(both, fewest=2) == [], "no room elsewhere"
    assert let_go(guests[1:]) == []
    assert let_go([guests[1], both[2]]) == ["reader-0"]


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=10),
    st.integers(1, 5),
    st.integers(1, 4),
)
def test_moves_come_to_an_end_within_what_machines_can_hold(
    held: Sequence[tuple[int, int]], count: int, most: int
) -> None:
    machines = [machine(str(index), gib=64) for index in range(count)]
    placed = [(rows(index, gib), str(at % count)) for index, (at, gib) in enumerate(held)]
    before = {where for _, where in placed}
    for _ in range(100):
        moving = Moving(machines, placed, most=most)
        found = moving.next()
        if found is None:
            break
        role, _, where = found
        placed = [(wanted, str(where) if wanted[0] == role else at) for wanted, at in placed]
    else:
        raise AssertionError("rows move for ever")
    assert len({where for _, where in placed}) <= max(most, len(before))
