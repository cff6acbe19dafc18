"""What messages are called in errors: by the features, tables and parameters that the user knows."""

from collections.abc import Sequence

from shadowsync.embedding.table import Shard, slots_of

_MOST = 3


def listed(kind: str, names: Sequence[str]) -> str:
    """`features a, b, c, …`."""
    distinct = list(dict.fromkeys(names))
    more = ", …" if len(distinct) > _MOST else ""
    return f"{kind}{'s' if len(distinct) != 1 else ''} {', '.join(distinct[:_MOST])}{more}"


def of_features(shards: Sequence[Shard], slots: Sequence[int]) -> str:
    """The features at these slots; those that are none are passed over."""
    known = slots_of(shards)
    return listed("feature", [known[slot].feature for slot in slots if 0 <= slot < len(known)])


def of_rows(shards: Sequence[Shard], dim: int) -> str:
    """The rows of tables of that width."""
    return "rows of " + listed("table", [shard.table.name for shard in shards if shard.table.dim == dim])
