"""A link that is lost, half delivers, stalls or leads to another server: nothing is lost and nothing runs twice."""

import threading
import time
from collections.abc import Callable

import pytest
import torch
from wire_cases import PATIENCE_S, Balance, Bank, Connect, Link, Serve, Setup, deposit, read, until

from shadowsync.rpc import client
from shadowsync.rpc.client import WireClient, WireConnection
from shadowsync.rpc.connection import JobKeys
from shadowsync.rpc.errors import CallTimeout, PeerLost
from shadowsync.rpc.server import WireServer

MakeLink = Callable[[WireServer], Link]
Linked = Callable[..., Setup]
FORGETFUL = {"tick_s": 0.01, "forget_client_after_s": 0.2}


def settled(connection: WireConnection) -> None:
    """Until the connection stands."""
    connection.call("echo").result(PATIENCE_S)


def test_calls_before_the_server_is_there_wait_for_it(serve: Serve, connect: Connect, link: MakeLink) -> None:
    bank = Bank()
    way = link(serve(bank))
    way.cut()
    connection = connect(way.address)
    futures = [connection.call("deposit", deposit(str(i), i)) for i in range(10)]
    way.mend()
    assert [read(future.result(PATIENCE_S), Balance) for future in futures]
    assert bank.total == 45


@pytest.mark.parametrize("welcomed", [False, True])
def test_nobody_waits_to_take_leave_of_a_peer_that_is_gone(
    serve: Serve, keys: JobKeys, link: MakeLink, monkeypatch: pytest.MonkeyPatch, welcomed: bool
) -> None:
    monkeypatch.setattr(client, "_BYE_MS", int(1000 * PATIENCE_S))
    way = link(serve(Bank()))
    if not welcomed:
        way.cut()
    connector = WireClient(keys)
    connection = connector.connect(way.address)
    if welcomed:
        settled(connection)
        way.cut()
        until(lambda: not connection._ready, "the news of it")
    closing = threading.Thread(target=connector.close)
    closing.start()
    closing.join(PATIENCE_S / 2)
    assert not closing.is_alive()


def test_a_link_lost_again_and_again_loses_and_doubles_nothing(linked: Linked) -> None:
    bank, _, way, connection = linked()

    def work(worker: int) -> None:
        for i in range(40):
            assert allowed.acquire(timeout=PATIENCE_S)
            connection.call("deposit", deposit(f"{worker}/{i}", 1, torch.ones(1000))).result(PATIENCE_S)
            ran.release()

    allowed, ran = threading.Semaphore(0), threading.Semaphore(0)
    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(5):
        allowed.release(24)  # fewer are left over than are waited for next time, so that needs a new connection
        for _ in range(15):
            assert ran.acquire(timeout=PATIENCE_S)
        way.cut()
        way.mend()
    for thread in threads:
        thread.join()
    assert bank.total == 120
    assert len(bank.runs) == 120
    assert set(bank.runs.values()) == {1}
    assert way.made >= 4


@pytest.mark.parametrize("byte_count", [1, 60, 1500])
def test_a_lost_reply_is_sent_again_and_the_method_does_not_run_again(linked: Linked, byte_count: int) -> None:
    bank, server, way, connection = linked(ping_every_s=100)
    settled(connection)
    way.break_after("back", byte_count)
    futures = [connection.call("deposit", deposit(str(i), 1)) for i in range(50)]
    balances = {read(future.result(PATIENCE_S), Balance).total for future in futures}
    assert balances == set(range(1, 51))
    assert set(bank.runs.values()) == {1}
    assert way.made == 2
    assert server.dispatcher.repeated > 0


@pytest.mark.parametrize("byte_count", [1, 5000, 500_000])
def test_a_request_that_arrives_in_part_runs_once(linked: Linked, byte_count: int) -> None:
    bank, _, way, connection = linked(ping_every_s=100)
    settled(connection)
    way.break_after("there", byte_count)
    future = connection.call("deposit", deposit("large", 1, *[torch.ones(1000)] * 200))
    assert read(future.result(PATIENCE_S), Balance).total == 1
    assert bank.vault[0] == 200
    assert way.made == 2


def test_a_request_that_comes_again_while_it_runs_is_answered_by_the_first(linked: Linked) -> None:
    bank, server, way, connection = linked()
    future = connection.call("slow_deposit", deposit("slow", 1))
    assert bank.entered.wait(PATIENCE_S)
    way.cut()
    way.mend()
    until(lambda: server.dispatcher.repeated == 1, "the request's return")
    bank.open.set()
    assert read(future.result(PATIENCE_S), Balance).total == 1
    assert bank.runs["slow"] == 1


def test_a_call_that_has_time_travels_with_the_next_one(linked: Linked) -> None:
    bank, _, _, connection = linked(tick_s=1000.0)
    settled(connection)
    along = [connection.call_along("deposit", deposit(str(i), 1, torch.ones(1000))) for i in range(3)]
    assert not bank.runs
    assert read(connection.call("deposit", deposit("next", 1)).result(PATIENCE_S), Balance) == Balance(4)
    assert [read(future.result(PATIENCE_S), Balance).total for future in along] == [1, 2, 3]
    assert bool((bank.vault == 3).all())


def test_a_call_that_has_time_and_no_company_goes_with_the_next_tick(linked: Linked) -> None:
    connection = linked(tick_s=0.01).connection
    settled(connection)
    assert read(connection.call_along("deposit", deposit("alone", 1)).result(PATIENCE_S), Balance) == Balance(1)


def test_calls_that_travel_together_run_once_when_their_link_is_lost(linked: Linked) -> None:
    bank, _, way, connection = linked()
    settled(connection)
    for turn in range(20):
        way.break_after("there" if turn % 2 else "back", 1)
        along = connection.call_along("deposit", deposit(f"along {turn}", 1))
        assert connection.call("deposit", deposit(f"{turn}", 1)).result(PATIENCE_S)
        along.result(PATIENCE_S)
    assert set(bank.runs.values()) == {1}
    assert bank.total == 40


def test_a_stalled_link_shows_and_harms_nothing(linked: Linked) -> None:
    bank, _, way, connection = linked(ping_every_s=0.05, tick_s=0.01)
    settled(connection)
    way.hold()
    futures = [connection.call("deposit", deposit(str(i), 1)) for i in range(10)]
    until(lambda: connection.silent_s() > 0.3, "the silence")
    assert bank.total <= 1  # what was on its way
    way.release()
    for future in futures:
        future.result(PATIENCE_S)
    assert bank.total == 10
    until(lambda: connection.silent_s() < 0.2, "a sign of life")
    until(lambda: connection.silent_s() > 0.03, "a short silence")
    until(lambda: connection.silent_s() < 0.03, "a sign of life without a call")


def test_a_deadline_passes(linked: Linked) -> None:
    bank, _, _, connection = linked(tick_s=0.01)
    late = connection.call("slow_deposit", deposit("late", 1), timeout_s=0.1)
    with pytest.raises(CallTimeout, match=r"slow_deposit at tcp://.* gave no answer in 0\.1 s"):
        late.result(PATIENCE_S)
    bank.open.set()
    connection.call("deposit", deposit("next", 1)).result(PATIENCE_S)
    until(lambda: bank.total == 2, "the end of the late one")


def test_the_default_deadline_holds_where_nobody_listens(connect: Connect) -> None:
    connection = connect("tcp://127.0.0.1:1", timeout_s=0.05, tick_s=0.01)
    with pytest.raises(CallTimeout, match=r"gave no answer in 0\.05 s"):
        connection.call("echo").result(PATIENCE_S)


def test_what_is_under_way_goes_to_the_replacement(serve: Serve, connect: Connect) -> None:
    first, second = Bank(), Bank()
    connection = connect(serve(first).address)
    connection.call("deposit", deposit("old", 1)).result(PATIENCE_S)
    waiting = connection.call("slow_deposit", deposit("waiting", 1))
    assert first.entered.wait(PATIENCE_S)
    second.open.set()
    connection.redirect(serve(second).address)
    assert read(waiting.result(PATIENCE_S), Balance).total == 1
    assert second.runs == {"waiting": 1}
    assert read(connection.call("deposit", deposit("new", 1)).result(PATIENCE_S), Balance).total == 2


def test_a_redirect_to_the_same_server_runs_nothing_twice(linked: Linked) -> None:
    bank, server, _, connection = linked()
    waiting = connection.call("slow_deposit", deposit("waiting", 1))
    assert bank.entered.wait(PATIENCE_S)
    connection.redirect(server.address)
    until(lambda: server.dispatcher.repeated == 1, "the request's return")
    bank.open.set()
    assert read(waiting.result(PATIENCE_S), Balance).total == 1
    assert bank.runs["waiting"] == 1


@pytest.mark.parametrize("between", ["another server", "nobody"])
def test_who_comes_back_to_a_server_goes_on_there(between: str, serve: Serve, connect: Connect) -> None:
    first, second = Bank(), Bank()
    there, elsewhere = serve(first), serve(second)
    connection = connect(there.address)
    connection.call("deposit", deposit("before", 1)).result(PATIENCE_S)
    waiting = connection.call("slow_deposit", deposit("waiting", 1))
    assert first.entered.wait(PATIENCE_S)
    if between == "another server":
        connection.redirect(elsewhere.address)
        connection.call("deposit", deposit("meanwhile", 1)).result(PATIENCE_S)
        connection.redirect(there.address)
        until(lambda: there.dispatcher.repeated == 1, "the request's return")
    else:
        connection.redirect(None)
        connection.redirect(there.address)
    first.open.set()
    connection.call("deposit", deposit("after", 1)).result(PATIENCE_S)
    if between == "another server":
        assert read(waiting.result(PATIENCE_S), Balance).total >= 2
    assert (first.runs["before"], first.runs["waiting"], first.runs["after"]) == (1, 1, 1)


def test_a_peer_that_is_given_up_fails_calls_until_it_is_replaced(serve: Serve, connect: Connect) -> None:
    bank = Bank()
    server = serve(bank)
    connection = connect(server.address)
    waiting = connection.call("slow_deposit", deposit("waiting", 1))
    assert bank.entered.wait(PATIENCE_S)
    connection.redirect(None)
    for future in (waiting, connection.call("deposit", deposit("no", 1))):
        with pytest.raises(PeerLost, match="given up"):
            future.result(PATIENCE_S)
    replacement = Bank()
    connection.redirect(serve(replacement).address)
    connection.call("deposit", deposit("yes", 1)).result(PATIENCE_S)
    assert replacement.runs == {"yes": 1}


def test_a_server_that_is_back_at_its_address_is_a_new_one(serve: Serve, connect: Connect) -> None:
    first, second = Bank(), Bank()
    server = serve(first)
    connection = connect(server.address)
    waiting = connection.call("slow_deposit", deposit("waiting", 1))
    assert first.entered.wait(PATIENCE_S)
    first.open.set()
    server.close()
    second.open.set()
    serve(second, port=int(server.address.rpartition(":")[2]))
    waiting.result(PATIENCE_S)
    connection.call("deposit", deposit("next", 1)).result(PATIENCE_S)
    assert second.runs["next"] == 1
    assert first.runs["waiting"] == 1


def test_a_client_that_vanishes_is_forgotten_when_its_methods_have_ended(linked: Linked) -> None:
    bank, server, way, connection = linked(FORGETFUL, ping_every_s=0.05, tick_s=0.01)
    waiting = connection.call("slow_deposit", deposit("waiting", 1))
    assert bank.entered.wait(PATIENCE_S)
    way.hold()
    unsent = connection.call("deposit", deposit("lost on the way", 1))
    until(lambda: server.dispatcher.clients == [], "the forgetting")
    assert bank.gone == []
    assert server.dispatcher.clients == []
    bank.open.set()
    until(lambda: bank.gone == [connection.client], "the client's end")
    way.release()
    assert read(waiting.result(PATIENCE_S), Balance).total == 1  # its answer was on the way
    with pytest.raises(PeerLost, match="has forgotten this connection"):
        unsent.result(PATIENCE_S)
    connection.call("deposit", deposit("again", 1)).result(PATIENCE_S)
    assert bank.runs == {"waiting": 1, "again": 1}


def test_a_reply_that_comes_later_finds_its_way_over_another_link(linked: Linked) -> None:
    bank, _, way, connection = linked()
    answer = connection.call("deposit_later", deposit("d", 3))
    until(lambda: bool(bank.later), "the request")
    way.cut()
    bank.end_later()
    way.mend()
    assert read(answer.result(PATIENCE_S), Balance).total == 3
    assert (bank.runs["d"], bank.later) == (1, [])


def test_an_answer_says_how_long_the_server_had_the_request(serve: Serve, connect: Connect) -> None:
    bank, began = Bank(), time.monotonic()
    connection = connect(serve(bank).address)
    slow = connection.call("slow_deposit", deposit("slow", 1))
    assert bank.entered.wait(PATIENCE_S)
    entered = time.monotonic()
    quick = connection.call("deposit", deposit("quick", 1)).result(PATIENCE_S)
    between = time.monotonic() - entered
    bank.open.set()
    served_s = slow.result(PATIENCE_S).served_s
    assert between <= served_s <= time.monotonic() - began
    assert 0 < quick.served_s <= between


def test_what_is_answered_later_counts_until_then(linked: Linked) -> None:
    bank, _, _, connection = linked()
    answer = connection.call("deposit_later", deposit("later", 1))
    for number in range(20):
        connection.call("deposit", deposit(f"{number}", 1)).result(PATIENCE_S)
    waited_from = time.monotonic()
    connection.call("deposit", deposit("last", 1)).result(PATIENCE_S)
    between = time.monotonic() - waited_from
    assert bank.later
    bank.end_later()
    assert answer.result(PATIENCE_S).served_s >= between
