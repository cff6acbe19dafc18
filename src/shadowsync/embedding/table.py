"""What an embedding table is, and which rows of it a server holds."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field


@dataclass(frozen=True)
class Table:
    """An embedding table of `rows × dim` float32 and the features that look rows up in it.

    Attributes:
        name: unique among the tables of a job.
        rows: number of rows; ids lie in `[0, rows)`.
        dim: width of a row.
        features: names of the features that share the table; their order has no meaning.
        pooling: how the rows of one sample become one vector. A sample without ids gives zeros either way.
    """

    name: str
    rows: Annotated[int, Field(gt=0)]
    dim: Annotated[int, Field(gt=0)]
    features: tuple[str, ...]
    pooling: Literal["sum", "mean"] = "sum"


@dataclass(frozen=True)
class Shard:
    """Rows `start … stop − 1` of a table, held by one server."""

    table: Table
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Number of rows in the shard."""
        return self.stop - self.start

    @property
    def key(self) -> str:
        """A name for the shard that is unique in a job and fit for a file name's end."""
        return f"{self.table.name}[{self.start}:{self.stop}]"
