"""The central dense copy: the servers that hold its parts, and a trainer's exchanges with all of them.

`P` dense parameters, of which server j holds the `p` of span j; `w_i` the replica of trainer i, `w_PS` the central
copy, `v_i` what has arrived of `w_i`, `e_i` what the trainer has not been told yet of what the central copy took from
it.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from shadowsync.compression.channel import Channel, Differences, Message, Stream
from shadowsync.compression.codec import Codec, NotFinite, Rate, full_rate, naming, received
from shadowsync.compression.plain import Plain
from shadowsync.errors import DataError
from shadowsync.rpc.connection import Connection, Direct
from shadowsync.rpc.kept import PerClient, check_generation
from shadowsync.rpc.pending import all_of
from shadowsync.rpc.served import Client, later, served

READ_S = 20.0
"""Deadline of a copy: it is for a checkpoint, for which all trainers wait."""
CPU_S_PER_BYTE = 3e-9
"""What a byte of an exchange costs in other threads than the caller's, both ends together: to encrypt and decrypt it
(most of it), to copy it and to add it up. Measured on one machine; see docs/decisions.md."""

Span = tuple[int, int]
"""First parameter of a part and the one after its last."""


def split_evenly(length: int, parts: int) -> list[Span]:
    """`parts` consecutive ranges that cover `0 … length − 1` and differ by at most one in size."""
    return [(length * part // parts, length * (part + 1) // parts) for part in range(parts)]


class DenseServer:
    """Parameters `start … start + p − 1` of the central copy `w_PS` (a role; needed by centralised methods only).

    Exchanges take turns, so that every one of them sees all of the one before. Vectors cross as frames of the codec;
    what it remembers of the way back belongs to one connection, and each trainer has its own. `read` and `write` carry
    float32 as it stands: they serve checkpoints and new trainers.

    Args:
        values: the initial copy, `[p]`; kept and changed in place.
        codec: of exchanges.
        generation: whose trainers are heard.
        alone: entered for each turn, where the values are in memory that other processes have in common.
    """

    def __init__(
        self,
        values: Tensor,
        codec: Codec,
        generation: int = 0,
        alone: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> None:
        self._values, self._codec, self._generation = values, codec, generation
        lock = threading.Lock()
        self._alone = alone or (lambda: lock)
        self._ends = PerClient[dict[str, Stream | CenterEnd]](dict)  # by codec

    def client_gone(self, client: str) -> None:
        self._ends.forget(client)

    @served()
    def elastic(
        self, client: Client, trainer: int, alpha: float, codec: str, sent: Message, generation: int = 0
    ) -> Message | None:
        """`d = α (w_i − w_PS); w_PS += d`, with `d` as it arrives at the trainer; under a sparse codec as
        `CenterEnd.answer`.

        Args:
            trainer: its rank, for messages.
            alpha: in (0, 1].
            codec: of both directions, by name.
            sent: the replica's part.
            generation: of the parts that the trainer belongs to.
        """
        return self._exchange(True, client, trainer, alpha, codec, sent, generation)

    @served()
    def sequential(
        self, client: Client, trainer: int, alpha: float, codec: str, sent: Message, generation: int = 0
    ) -> Message | None:
        """`w_PS ← (1−α) w_PS + α w_i`; answers with the new `w_PS`. What is given is as in `elastic`."""
        return self._exchange(False, client, trainer, alpha, codec, sent, generation)

    @served(once=False, timeout_s=READ_S)
    def read(self) -> Tensor:
        with self._alone():
            return self._values.clone()

    @served()
    def write(self, values: Tensor) -> None:
        """Replaces the part, `[p]`; differences begin anew."""
        with self._alone():
            self._values.copy_(self._fitting(values))
        for ends in self._ends.values():
            for name in [name for name, end in list(ends.items()) if isinstance(end, CenterEnd)]:
                ends.pop(name, None)

    def _exchange(
        self, elastic: bool, client: str, trainer: int, alpha: float, level: str, sent: Message, generation: int
    ) -> Message | None:
        check_generation(self._generation, generation)
        codec, ends = self._codec.level(level), self._ends.of(client)
        if (end := ends.get(codec.name)) is None:
            about = f"what the dense server has for trainer {trainer}"
            made = CenterEnd(codec, len(self._values), about) if codec.sparse else Stream(codec, about)
            end = ends.setdefault(codec.name, made)  # which is atomic: of several threads that ask first, all get one
        if isinstance(end, CenterEnd):
            return end.answer(sent, lambda local, encode: self._move(elastic, local, alpha, encode))
        with received("an exchange", codec):
            local = codec.decode(sent.frames, (len(self._values),))
        stream = end

        def encode(tensor: Tensor) -> tuple[Message, Tensor]:
            encoded = stream.encode(tensor)
            return Message(encoded.frames), codec.decode(encoded.frames, encoded.shape)

        return self._move(elastic, self._fitting(local), alpha, encode)

    def _move(
        self, elastic: bool, local: Tensor, alpha: float, encode: Callable[[Tensor], tuple[Message, Tensor]]
    ) -> Message:
        """A turn; `encode` gives the answer to the trainer, and the difference by which the central copy moves."""
        with self._alone():
            if elastic:
                answer, difference = encode((local - self._values).mul_(alpha))
                self._values.add_(difference)
                return answer
            self._values.lerp_(local, alpha)
            return encode(self._values.clone())[0]

    def _fitting(self, values: Tensor) -> Tensor:
        if values.dtype != torch.float32 or values.shape != self._values.shape:
            came = f"{values.dtype} {list(values.shape)}"
            raise DataError(f"a dense server of {len(self._values)} float32 parameters got {came}")
        return values


class CenterEnd:
    """The dense server's end towards one trainer, under a sparse codec.

    The central copy takes all of `d = α (u_i − w_PS)` at once, where `u_i = v_i − e_i` is the replica as it will be
    when its trainer has heard of everything; of `e_i += d` crosses what the codec lets pass. So `w_PS + Σ (w_i − e_i)`
    is conserved, and what is left out on the way back does not hold the central copy up.

    A message that comes whole is answered whole: after it, `v_i = w_i` and `e_i = 0`.

    `length` is `p`, and `about` what answers are called in errors.
    """

    def __init__(self, codec: Codec, length: int, about: str) -> None:
        self._codec, self._about = codec, about
        self._stream = Stream(codec.of_differences(), about)
        self._expected = Differences("an exchange")  # of which `u_i` is known
        self._owed = torch.zeros(length)
        self._turn = threading.Lock()

    def answer(self, sent: Message, move: "Move") -> Message | None:
        """One exchange; None, and nothing was done, if it knows nothing that the message is a difference from.

        Raises:
            NonFiniteTensor: it would send NaN or infinities; nothing was done.
            DataError: the frames are none of such a message, or its rate is none.
        """
        if not 0 <= sent.rate <= 1:
            raise DataError(f"an exchange is at {sent.rate} of the full learning rate, not at a share of it")
        with self._turn:
            expected = self._expected.take(self._codec, sent, tuple(self._owed.shape))
            if expected is None:
                return None
            if sent.whole:
                expected = self._expected.known = expected - self._owed

            def encode(difference: Tensor) -> tuple[Message, Tensor]:
                owed = self._owed + difference
                if sent.whole:
                    if not self._codec.everything and not bool(torch.isfinite(owed).all()):
                        with naming(self._about):
                            raise NotFinite(owed)
                    message, self._owed = Message((owed,)), torch.zeros_like(owed)
                else:
                    encoded = self._stream.encode_change(owed, expected + self._owed, sent.rate)
                    message = Message.of_difference(encoded)
                    self._owed = owed - self._stream.codec.decode(encoded.frames, encoded.shape)
                expected.sub_(difference)
                return message, difference

            try:
                return move(expected, encode)
            except BaseException:
                self._expected.forget()
                raise


Move = Callable[[Tensor, Callable[[Tensor], tuple[Message, Tensor]]], Message]
"""`DenseServer._move` by a replica's part."""


class CentralCopy:
    """A trainer's end towards all dense servers.

    Under a sparse codec, what it lets pass of `w_i − v_i` crosses (`Differences`), and both ends add it to `v_i`; what
    comes back is taken off `w_i` and `v_i`. What is left out stays in the replica, and so in the next difference. The
    first message, and any after a failure, is the replica itself; and workers of one trainer take turns, so that both
    ends see differences in one order.

    There is a connection to each dense server and a span of what it holds (`split_evenly`); the channel, of both
    directions, has the servers' codec.

    Attributes:
        rate: of the trainer, for codecs that select by it.
    """

    def __init__(
        self,
        rank: int,
        connections: Sequence[Connection],
        spans: Sequence[Span],
        channel: Channel,
        generation: int = 0,
    ) -> None:
        self.connections, self.spans, self.cpu_s = connections, spans, 0.0
        self.rate: Rate = full_rate
        self._rank, self._channel, self._generation = rank, channel, generation
        self._abouts = [f"the replica of trainer {rank} for dense server {at}" for at in range(len(spans))]
        self._known = [Differences(about) for about in self._abouts]
        self._behind = False
        self._turn = threading.Lock()
        self._there: dict[tuple[int, str], Stream] = {}

    def sequential(self, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.sequential`, at all servers.

        Raises:
            RunError: a server was given up or did not answer in time; the others have their exchange done.
        """
        return self._exchange(DenseServer.sequential, weights, alpha)

    def elastic(self, weights: Tensor, alpha: float) -> Tensor:
        """As `Group.elastic`, at all servers; raises as `sequential`."""
        codec = self._channel.now.codec
        if not codec.sparse:
            return self._exchange(DenseServer.elastic, weights, alpha)
        with self._turn:
            try:
                return self._exchange_differences(codec, weights, alpha)
            except BaseException:
                self._forget(range(len(self.spans)))
                raise

    def catch_up(self) -> bool:
        with self._turn:
            if self._behind:
                self._forget(range(len(self.spans)))
            return self._behind

    def _forget(self, servers: Iterable[int]) -> None:
        for at in servers:
            self._known[at].forget()

    def _exchange(self, method: Callable[..., Message | None], weights: Tensor, alpha: float) -> Tensor:
        codec, sent = self._channel.now.codec, {}
        for at, (start, stop) in enumerate(self.spans):
            stream = self._there.setdefault((at, codec.name), Stream(codec, self._abouts[at]))
            sent[at] = Message(stream.encode(weights[start:stop]).frames)
        parts = []
        for at, answer in self._carry(method, sent, alpha, codec).items():
            frames, (start, stop) = () if answer is None else answer.frames, self.spans[at]
            with received("an exchange", codec):
                parts.append(codec.decode(frames, (stop - start,)))
        return _joined(parts)

    def _exchange_differences(self, codec: Codec, weights: Tensor, alpha: float) -> Tensor:
        parts = [weights[start:stop] for start, stop in self.spans]
        rate = self.rate()
        sent = {at: self._known[at].encode(codec, part, rate) for at, part in enumerate(parts)}
        answers = self._carry(DenseServer.elastic, sent, alpha, codec)
        if unknown := [at for at, answer in answers.items() if answer is None]:
            self._forget(unknown)
            again = {at: self._known[at].encode(codec, parts[at]) for at in unknown}
            sent |= again
            answers |= self._carry(DenseServer.elastic, again, alpha, codec)
        self._behind = not all(message.whole for message in sent.values())
        moved = []
        for at, answer in answers.items():
            if answer is None:
                raise DataError("a dense server does not accept a replica that comes whole")
            back = Plain() if answer.whole else codec.of_differences()
            with received("an exchange", codec):
                moved.append(back.decode(answer.frames, tuple(parts[at].shape)))
            self._known[at].moved(moved[-1])
        return _joined(moved)

    def _carry(
        self, method: Callable[..., Message | None], sent: Mapping[int, Message], alpha: float, codec: Codec
    ) -> dict[int, Message | None]:
        """Takes messages to servers, by their positions, all at once, and gives their answers; both are counted."""
        for at, message in sent.items():
            self._count(at, message)
        calls = [
            later(self.connections[at], method, Client(""), self._rank, alpha, codec.name, message, self._generation)
            for at, message in sent.items()
        ]
        all_of(calls).result()  # all of them, so that an error leaves no call behind
        answers = {at: call.result() for at, call in zip(sent, calls, strict=True)}
        for at, answer in answers.items():
            if answer is not None:
                self._count(at, answer)
        return answers

    def _count(self, at: int, message: Message) -> None:
        start, stop = self.spans[at]
        message.count(self._channel, stop - start)
        if not isinstance(self.connections[at], Direct):  # where nothing crosses, all is done in the caller's thread
            # of several workers at once a message may be missed
            self.cpu_s += sum(frame.nbytes for frame in message.frames) * CPU_S_PER_BYTE


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
