"""An answer says how long the server had the request."""

import time
from collections.abc import Callable

from wire_cases import PATIENCE_S, Bank, Deposit

from shadowsync.rpc.client import WireConnection
from shadowsync.rpc.server import WireServer


def test_an_answer_says_how_long_the_server_had_the_request(
    serve: Callable[..., WireServer], connect: Callable[..., WireConnection]
) -> None:
    bank, began = Bank(), time.monotonic()
    connection = connect(serve(bank).address)
    slow = connection.call("slow_deposit", Deposit("slow", 1))
    assert bank.entered.wait(PATIENCE_S)
    entered = time.monotonic()
    quick = connection.call("deposit", Deposit("quick", 1)).result(PATIENCE_S)
    between = time.monotonic() - entered
    bank.open.set()
    served_s = slow.result(PATIENCE_S).served_s
    assert between <= served_s <= time.monotonic() - began
    assert 0 < quick.served_s <= between


def test_what_is_answered_later_counts_until_then(
    serve: Callable[..., WireServer], connect: Callable[..., WireConnection]
) -> None:
    bank = Bank()
    connection = connect(serve(bank).address)
    answer = connection.call("deposit_later", Deposit("later", 1))
    for number in range(20):
        connection.call("deposit", Deposit(f"{number}", 1)).result(PATIENCE_S)
    waited_from = time.monotonic()
    connection.call("deposit", Deposit("last", 1)).result(PATIENCE_S)
    between = time.monotonic() - waited_from
    assert bank.later
    bank.end_later()
    assert answer.result(PATIENCE_S).served_s >= between
