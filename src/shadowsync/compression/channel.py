"""Channels between two roles: tensors pass a codec and are counted, also where nothing is really sent."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from shadowsync.compression.auto import IN_LINE, LEAST_STEPS, OVERLAPPED, Auto, Chooser, Measured
from shadowsync.compression.codec import Codec, Decoded, Encoded, PartOf, naming
from shadowsync.rpc.connection import Connection
from shadowsync.rpc.link import Clock, Link, MeasuredConnection

_LOG = logging.getLogger(__name__)
STRETCH_S = 1.0
"""A trainer looks so often at what it measured."""


class Counter(Protocol):
    """Adds up bytes (`metrics.wire.WireCounter`)."""

    def add(self, kind: str, sent: int, raw: int) -> None:
        """Counts one message: `sent` bytes of it on the wire, `raw` bytes of it uncompressed."""
        ...

    def add_kept(self, kind: str, elements: int, kept: int, refreshes: int, early: int) -> None:
        """Counts of one message the elements, those that crossed, and the thresholds chosen for it."""
        ...


@dataclass(frozen=True)
class Channel:
    """One direction of traffic of one kind (`pull`, `push` or `dense`), in any number of streams.

    Attributes:
        chooser: changes the codec while the job runs; there is then one channel for each codec, with streams of its
            own, and `now` is the one for the next message.
    """

    kind: str
    codec: Codec
    counter: Counter
    chooser: Chooser | None = field(default=None, repr=False, compare=False)
    _streams: dict[Hashable, "Stream"] = field(default_factory=dict, init=False, repr=False, compare=False)
    _levels: dict[str, "Channel"] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def now(self) -> "Channel":
        """The channel that the next message takes."""
        if self.chooser is None:
            return self
        name = self.chooser.codec
        # setdefault is atomic, here and below: of several threads that ask first, all get one
        return self._levels.get(name) or self._levels.setdefault(
            name, Channel(self.kind, self.codec.level(name), self.counter)
        )

    def stream(
        self, key: Hashable, about: Callable[[], str] | str = "a tensor", part_of: PartOf | None = None
    ) -> "Stream":
        """The stream of that key, the same one each time; `about` and `part_of` as in `Stream`, when it is made."""
        found = self._streams.get(key)
        if found is not None:
            return found
        named = about if isinstance(about, str) else about()
        return self._streams.setdefault(key, Stream(self.codec, named, part_of, self))

    def plain(self, tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Tensors as the receiver sees them under a codec that is `exact`: they are counted, and nothing else."""
        same = tuple(tensors)
        size = sum(tensor.nbytes for tensor in same)
        self.count(size, size)
        return same

    def count(self, sent: int, raw: int) -> None:
        """Counts one message, in bytes."""
        self.counter.add(self.kind, sent, raw)

    def count_kept(self, elements: int, kept: int, refreshes: int = 0, early: int = 0) -> None:
        """Counts the elements of one message, and those that crossed."""
        self.counter.add_kept(self.kind, elements, kept, refreshes, early)


class Stream:
    """The messages of one sender to one receiver about one thing: what the codec remembers belongs to them alone.

    Args:
        codec: of all messages.
        about: what the messages are called in errors.
        part_of: what the element at a position belongs to, for errors.
        channel: counts them; None where whoever sends them does.
    """

    def __init__(
        self, codec: Codec, about: str = "a tensor", part_of: PartOf | None = None, channel: Channel | None = None
    ) -> None:
        self.codec, self._about, self._part_of, self._channel = codec, about, part_of, channel
        self._state: Any = None
        self._lock = threading.Lock()

    def encode(self, tensor: Tensor, groups: Sequence[int] = (), times: float = 1.0) -> Encoded:
        """The next message, counted `times` times; `groups` as `Codec.encode` has them.

        Raises:
            NonFiniteTensor: the tensor holds NaN or infinities, and the codec cannot carry them.
        """
        # workers of one trainer may share a stream; each message starts from the state of the last
        with self._lock, naming(self._about, self._part_of):
            encoded = self.codec.encode(tensor, self._state, groups)
            self._state = encoded.state
        if self._channel is not None:
            self._channel.count(round(encoded.byte_count * times), round(tensor.nbytes * times))
            if self.codec.sparse:
                self._channel.count_kept(tensor.numel(), encoded.kept_count, encoded.refreshes, encoded.early)
        return encoded

    def encode_under(self, tensor: Tensor, kept: Tensor | None) -> Encoded:
        """The next message, of the elements at `kept` alone; raises as `encode`. All messages are of one sort."""
        with self._lock, naming(self._about, self._part_of):
            encoded = self.codec.encode_under(tensor, kept, self._state)
            self._state = encoded.state
        if self._channel is not None:
            self._channel.count(encoded.byte_count, tensor.nbytes)
            self._channel.count_kept(tensor.numel(), encoded.kept_count)
        return encoded

    def send(self, tensor: Tensor, times: float = 1.0) -> Tensor:
        """The float32 tensor as the receiver sees it; `times` messages of its size are counted."""
        if self.codec.exact and self._channel is not None:
            size = round(tensor.nbytes * times)
            self._channel.count(size, size)
            return tensor
        encoded = self.encode(tensor, (), times)
        return self.codec.decode(encoded.frames, encoded.shape)

    def cross(self, tensor: Tensor, groups: Sequence[int] = ()) -> Decoded:
        """As `send`, with the positions that crossed."""
        if self.codec.exact:
            return Decoded(self.send(tensor))
        encoded = self.encode(tensor, groups)
        return self.codec.decode_kept(encoded.frames, encoded.shape)

    def send_under(self, tensor: Tensor, kept: Tensor | None) -> Tensor:
        """The float32 tensor as the receiver sees it, who knows which elements come; the others are zero."""
        encoded = self.encode_under(tensor, kept)
        return self.codec.decode_under(encoded.frames, encoded.shape, kept)

    def tensors(self) -> dict[str, Tensor]:
        """Copies of what the codec remembers, by name; nothing if it remembers nothing yet."""
        with self._lock:
            return {} if self._state is None else dict(self._state.tensors())

    def restore(self, tensors: Mapping[str, Tensor]) -> bool:
        """Goes on from what `tensors` gave; False, and nothing is changed, if it is not this codec's."""
        try:
            state = self.codec.restored(tensors)
        except ValueError:
            return False
        with self._lock:
            self._state = state
        return True


class Restoring(Protocol):
    """Goes on from what was kept of a worker's gradients (a `Stream`, or several)."""

    def restore(self, tensors: Mapping[str, Tensor], /) -> bool:
        """As `Stream.restore`."""
        ...


def restore_all(workers: Iterable[tuple[Restoring, Mapping[str, Tensor]]]) -> None:
    """`restore` of each worker; a word in the log where a residual is lost."""
    refused = [tensors for worker, tensors in workers if not worker.restore(tensors)]
    lost = sum(any(name.endswith("residual") for name in tensors) for tensors in refused)
    if lost:
        _LOG.warning(
            "what %d workers had not sent of their gradients is not of this codec: it is lost, and they start from "
            "nothing",
            lost,
        )


def float_bytes(codec: Codec) -> float:
    """Bytes on the wire of one float, as the codec encodes numbers of all sizes."""
    return codec.encode(numbers := _numbers()).byte_count / numbers.numel()


def pulled_and_pushed_bytes(pull: Codec, push: Codec) -> float:
    """Bytes on the wire of one float and of its gradient, which goes back under the mask of what came, if there is
    one."""
    there = pull.encode(numbers := _numbers())
    back = push.encode_under(numbers, there.kept) if pull.sparse else push.encode(numbers)
    return (there.byte_count + back.byte_count) / numbers.numel()


def _numbers() -> Tensor:
    return torch.linspace(-1, 1, 1 << 12).view(-1, 16)


@dataclass(frozen=True)
class Situation:
    """What `auto` has to know of the job.

    Attributes:
        workers: of the trainer, which share its link.
        overlapped: pulls are prefetched.
        elastic: the dense part is merged in the background, in whatever time the network has left.
        collective: all trainers send the dense part in one codec, so that none of them can choose it.
    """

    workers: int = 1
    overlapped: bool = True
    elastic: bool = False
    collective: bool = False


class CodecChoice:
    """Measures a trainer's link and steps, and has `auto` choose codecs by that, each kind of traffic for itself.

    Where nothing is to be chosen, it is not in anybody's way: channels and connections are the ordinary ones.

    Args:
        codecs: of the job by kind.
        clock: seconds.

    Attributes:
        decisions: all that was decided so far, in sentences, in order.
    """

    def __init__(
        self, codecs: Mapping[str, Codec], situation: Situation = Situation(), clock: Clock = time.monotonic
    ) -> None:
        self._codecs, self._situation, self._clock = codecs, situation, clock
        self._link = Link(clock)
        self._lock = threading.Lock()
        self._choosers = {}
        for kind, codec in codecs.items():
            if isinstance(codec, Auto) and not (kind == "dense" and situation.collective):
                default = OVERLAPPED if situation.overlapped else IN_LINE
                self._choosers[kind] = Chooser(
                    [level.name for level in codec.levels],
                    [float_bytes(level) for level in codec.levels],
                    default if codec.share is None else codec.share,
                    codec.stay_s,
                    elastic=situation.elastic and kind == "dense",
                )
        self._since = clock()
        self._steps, self._computed_s, self._waited_s = 0, 0.0, 0.0
        self.decisions: tuple[str, ...] = ()

    def channel(self, kind: str, counter: Counter) -> Channel:
        """A channel of that kind; those of one kind change together."""
        codec, chooser = self._codecs[kind], self._choosers.get(kind)
        return Channel(kind, codec.levels[0] if chooser is None else codec, counter, chooser)

    def measured(self, connection: Connection) -> Connection:
        """A connection to a server, measured if anything is to be chosen."""
        return MeasuredConnection(connection, self._link) if self._choosers else connection

    def stepped(self, computed_s: float, waited_s: float) -> None:
        """A worker has made a step: what it computed, and what it waited for before and after. In any thread."""
        if not self._choosers:
            return
        with self._lock:
            self._steps += 1
            self._computed_s += computed_s
            self._waited_s += waited_s
            if (now := self._clock()) - self._since >= STRETCH_S and self._steps >= LEAST_STEPS:
                self._look(now)

    @property
    def names(self) -> dict[str, str]:
        """The codec in use by kind, where it is chosen here."""
        return {kind: chooser.codec for kind, chooser in self._choosers.items()}

    def _look(self, now: float) -> None:
        traffic = {kind: self._link.take(kind) for kind in ("pull", "push", "dense")}
        workers = self._situation.workers
        for kind, chooser in self._choosers.items():
            seen, before = traffic[kind], chooser.codec
            if self._situation.elastic and kind == "dense":
                seen = max(traffic["pull"], traffic["push"])
            why = chooser.judge(Measured(self._steps, self._computed_s / workers, self._waited_s / workers, *seen), now)
            if why is not None:
                told = f"compression.{kind}: {chooser.codec} instead of {before}, because {why}"
                self.decisions = (*self.decisions, told)
                self._link.forget(kind)
        self._since, self._steps, self._computed_s, self._waited_s = now, 0, 0.0, 0.0
