"""A reader behind the wire, and a trainer's end of it: a lease goes in, batches come out.

`B` samples of a batch, `F` features.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future

from torch import Tensor

from shadowsync.data.batch import Batch, Jagged
from shadowsync.data.leases import Lease
from shadowsync.data.parsing import Parsed, Parser
from shadowsync.data.reading_messages import LeaseInfo, ParsedInfo
from shadowsync.errors import DataError, RunError
from shadowsync.rpc.connection import Answer, Connection
from shadowsync.rpc.errors import CallTimeout
from shadowsync.rpc.service import Method, Reply, Request

OFFSETS, WEIGHTS = 4, 1
PARSE_S = 900.0
"""Deadline of a lease: a reader waits for nobody but its file system."""


class ReaderService:
    """What a `Parser` offers. It keeps nothing, so whoever takes a dead reader's place can be asked the same again."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser
        self.methods: Mapping[str, Method] = {"parse": Method(self._parse, once=False)}

    def client_gone(self, client: str) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing to end."""

    def _parse(self, request: Request) -> Reply:
        lease = request.read(LeaseInfo).lease()
        _check(lease, self._parser)
        parsed = self._parser.parse(lease)
        ids = [batch.ids for batch in parsed.batches]
        parts = tuple(OFFSETS * (i.offsets is not None) + WEIGHTS * (i.weights is not None) for i in ids)
        features = ids[0].feature_count if ids else 0
        tensors = tuple(tensor for batch in parsed.batches for tensor in _tensors(batch))
        return Reply(ParsedInfo(parsed.rows, parsed.spans, features, parts), tensors)


def _check(lease: Lease, parser: Parser) -> None:
    """Raises `DataError` for a lease that no desk of this data gives."""
    known = 0 <= lease.slice < len(parser.slices) and lease.epoch >= 0
    rows = parser.slices[lease.slice].rows if known else 0
    if not known or not all(0 <= start < stop <= rows for start, stop in lease.spans):
        raise DataError(f"a lease of slice {lease.slice} with rows {list(lease.spans)[:4]} does not fit this data")


def _tensors(batch: Batch) -> Iterator[Tensor]:
    yield batch.labels.contiguous()
    yield batch.dense.contiguous()
    ids = batch.ids
    yield from (tensor.contiguous() for tensor in (ids.values, ids.offsets, ids.weights) if tensor is not None)


class ReaderRemote:
    """Has leases parsed elsewhere."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def parse(self, lease: Lease) -> "Future[Parsed]":
        """As `Parser.parse`; its errors are in the future."""
        parsed: Future[Parsed] = Future()
        asked = self._connection.call("parse", LeaseInfo.of(lease), timeout_s=PARSE_S)
        asked.add_done_callback(lambda answered: _pass_on(answered, parsed))
        return parsed


def _pass_on(answered: "Future[Answer]", parsed: "Future[Parsed]") -> None:
    try:
        parsed.set_result(_parsed(answered.result()))
    except CallTimeout:  # it is not the trainer that is to be replaced, as after the loss of a peer
        parsed.set_exception(
            RunError(f"no reader has read its rows within {PARSE_S:g} s: does the file system of data.path answer?")
        )
    except BaseException as error:  # whoever waits is to hear of it, not the thread that serves the connection
        parsed.set_exception(error)


def _parsed(answer: Answer) -> Parsed:
    info = answer.read(ParsedInfo)
    tensors = iter(answer.tensors)
    try:
        batches = tuple(_batch(info.feature_count, parts, tensors) for parts in info.parts)
    except StopIteration as error:
        raise DataError("a reader's reply lacks tensors") from error
    if len(batches) != len(info.spans):
        raise DataError(f"a reader's reply has {len(batches)} batches for {len(info.spans)} spans")
    return Parsed(info.rows, info.spans, batches)


def _batch(features: int, parts: int, tensors: Iterator[Tensor]) -> Batch:
    labels, dense, values = next(tensors), next(tensors), next(tensors)
    offsets = next(tensors) if parts & OFFSETS else None
    weights = next(tensors) if parts & WEIGHTS else None
    return Batch(labels, dense, Jagged(values, offsets, weights, features, len(labels)))
