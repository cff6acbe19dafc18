"""The account of lost samples."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.recovery.policy import PlsAccount


def account_of(total: int, servers: int, begun: int = 0) -> PlsAccount:
    """Of servers that hold equal shares of the rows."""
    return PlsAccount(total, [1 / servers] * servers, begun)


def test_the_demos_failures() -> None:
    """One of eight shards lost at 45 % and at 90 % with nothing saved since the start, and four of eight."""
    one, four = account_of(1000, 8), account_of(1000, 8)
    for samples in (450, 900):
        one.failed([0], samples)
        four.failed([0, 1, 2, 3], samples)
    assert one.pls == pytest.approx((0.45 + 0.9) / 8)
    assert four.pls == pytest.approx(4 * (0.45 + 0.9) / 8)


def test_each_server_has_a_save_of_its_own() -> None:
    account = account_of(1000, 4)
    account.saved(1, 300)
    account.saved(2, 500)
    account.failed([0, 1, 2], 600)
    assert account.pls == pytest.approx((600 + 300 + 100) / 4000)
    account.failed([2], 700)
    assert account.pls == pytest.approx((1000 + 200) / 4000), "counts from its save again, as the paper does"
    account.failed([3, 3], 800)
    assert account.pls == pytest.approx((1000 + 200 + 800) / 4000), "a server is lost once"


def test_shares_weigh_the_loss() -> None:
    account = PlsAccount(100, (0.7, 0.2, 0.1))
    account.failed([0, 2], 50)
    assert account.pls == pytest.approx(0.5 * 0.8)


def test_saves_may_end_out_of_order() -> None:
    account = account_of(100, 1)
    account.saved(0, 60)
    account.saved(0, 40)
    account.failed([0], 70)
    assert account.pls == pytest.approx(0.1)


def test_an_older_checkpoint_loses_more_and_is_what_the_server_has_now() -> None:
    account = account_of(100, 2)
    account.saved(0, 60)
    account.failed([0], 70, loaded=40)
    assert account.pls == pytest.approx(30 / 200)
    account.failed([0], 80)
    assert account.pls == pytest.approx((30 + 40) / 200)


def test_nothing_is_lost_where_everybody_goes_back() -> None:
    account = account_of(100, 2)
    account.saved(0, 60)
    account.went_back(50)
    assert account.pls == 0
    account.failed([0], 55)
    assert account.pls == pytest.approx(5 / 200)


def test_a_job_that_goes_on_keeps_its_account() -> None:
    account = account_of(100, 2, begun=40)
    account.pls = 0.05
    account.failed([1], 50)
    assert account.pls == pytest.approx(0.1)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 20)), max_size=20))
def test_the_whole_is_the_sum_of_the_servers(events: list[tuple[int, bool, int]]) -> None:
    """Servers that fail together lose what they lose apart, and a loss never exceeds what was trained."""
    together = account_of(1000, 4)
    apart = [account_of(1000, 4) for _ in range(4)]
    samples = 0
    for server, fails, step in events:
        samples += step
        pair = {server, (server + 1) % 4}
        for account in (together, *apart):
            account.saved((server + 2) % 4, samples)
        if fails:
            before = together.pls
            together.failed(pair, samples)
            assert together.pls - before <= 0.5 * samples / 1000 + 1e-12
            for one in pair:
                apart[one].failed([one], samples)
    assert together.pls == pytest.approx(sum(account.pls for account in apart))
