"""How fast codecs are on one core, and what training loses with each.

    python benchmarks/compression.py speed [--elements 4194304] [--rounds 15] [--keep 0.01]
    python benchmarks/compression.py quality --out FOLDER [--seeds 3] [--tasks demo synthetic] [--picture out.png]

`speed` prints three tables for one tensor of float32: encoding and decoding of every codec beside a copy; positions
alone at several shares; and choosing elements over 1,000 steps with one exact selection against `torch.topk` in every
step. Jobs alternate, medians are shown, GB/s count the bytes of the float32 tensor.

`quality` prints AUC and NE of the test set over how many times fewer bytes crossed than without codecs, ids and masks
included, for the dense gradients of `gba`, for the embedding cut, for both at once (`hybrid`), and for a cut behind a
wide layer of a model. Top-k is thresholding with an exact choice in each message. DCT is thresholding as published: the
threshold is frozen for 100 messages, so that the share drifts from the one asked, and values are in fp32; ours corrects
it after each, and what int8 and int4 add stands beside it. `plain again` is a second run without a codec: its distance
is chance.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lossy
import numpy as np
import torch
from clustered import PUBLISHED
from machine import alternate, describe, medians, table
from torch import Tensor

from shadowsync.compression.codec import Codec, Encoded
from shadowsync.compression.positions import exact_floors, mask_of, pack, reach, unpack
from shadowsync.memory.pages import keep_freed_memory
from shadowsync.registry import build, members

STEPS = 1000
"""Messages from one exact selection to the next."""
WARM_UP = 100
"""Messages of a stream before it is timed, so that residuals and thresholds have settled."""
WIDTH = 16
MEMBERS = members("shadowsync.compression", Codec)
CODECS: dict[str, tuple[str, Mapping[str, object], tuple[int, ...]]] = {
    "plain": ("plain", {}, (-1,)),
    "bf16": ("bf16", {}, (-1,)),
    "int8, blocks": ("int8", {}, (-1,)),
    "int8, rows of 16": ("int8", {}, (-1, WIDTH)),
    "int8 stochastic, blocks": ("int8", {"rounding": "stochastic"}, (-1,)),
    "int4, blocks": ("int4", {}, (-1,)),
    "int4, rows of 16": ("int4", {}, (-1, WIDTH)),
    "int4 stochastic, blocks": ("int4", {"rounding": "stochastic"}, (-1,)),
    "threshold": ("threshold", {}, (-1,)),
    "threshold, int8 values": ("threshold", {"values": "int8"}, (-1,)),
    "threshold, int4 values": ("threshold", {"values": "int4"}, (-1,)),
    "threshold, no feedback": ("threshold", {"feedback": False}, (-1,)),
    "DCT": ("threshold", PUBLISHED, (-1,)),
    "DCT, no feedback": ("threshold", {**PUBLISHED, "feedback": False}, (-1,)),
}
"""Member, options and shape by the name in the table."""


class Stream:
    """A codec's messages one after another, as a trainer sends them."""

    def __init__(self, codec: Codec, tensors: Sequence[Tensor]) -> None:
        self._codec, self._tensors, self._state, self._sent = codec, tensors, None, 0
        self.last: Encoded = self.encode()

    def encode(self) -> Encoded:
        """The next message."""
        self.last = self._codec.encode(self._tensors[self._sent % len(self._tensors)], self._state)
        self._state, self._sent = self.last.state, self._sent + 1
        return self.last

    def decode(self) -> Tensor:
        """The last message's tensor."""
        return self._codec.decode(self.last.frames, self.last.shape)


def gradients(elements: int, messages: int = 8) -> list[Tensor]:
    """Noise of another size in each element, as the gradients of a model have."""
    generator = torch.Generator().manual_seed(0)
    size = torch.randn(elements, generator=generator).exp_()
    return [torch.randn(elements, generator=generator) * size for _ in range(messages)]


def codec_table(tensors: Sequence[Tensor], keep: float, rounds: int) -> str:
    """Encoding and decoding of every codec beside a copy of the tensor."""
    streams = {}
    for name, (member, options, shape) in CODECS.items():
        asked: Mapping[str, Any] = {**options, "keep": keep} if member == "threshold" else options
        streams[name] = Stream(build(MEMBERS[member], asked, "codec"), [tensor.view(shape) for tensor in tensors])
    for stream in streams.values():
        for _ in range(WARM_UP if stream.last.state is not None else 2):
            stream.encode()
    room = torch.empty_like(tensors[0])
    jobs: dict[str, Callable[[], object]] = {"copy": lambda: room.copy_(tensors[0])}
    for name, stream in streams.items():
        jobs |= {f"{name} encode": stream.encode, f"{name} decode": stream.decode}
    took, gigabytes = medians(alternate(jobs, rounds)), tensors[0].nbytes / 1e9
    rows: list[list[object]] = [["copy", gigabytes / took["copy"], "", "", 1.0, ""]]
    for name, stream in streams.items():
        there, back = took[f"{name} encode"], took[f"{name} decode"]
        bits = 8 * stream.last.byte_count / tensors[0].numel()
        share = 1.0 if stream.last.kept is None else len(stream.last.kept) / tensors[0].numel()
        rows.append([name, gigabytes / there, gigabytes / back, gigabytes / (there + back), bits / 32, f"{share:.2%}"])
    return table(["codec", "encode GB/s", "decode GB/s", "both GB/s", "bytes / fp32", "kept"], rows)


def position_table(elements: int, rounds: int) -> str:
    """Positions there and back, and what one of them takes."""
    rows: list[list[object]] = []
    for share in (0.0001, 0.001, 0.01, 0.05, 0.2):
        kept = np.flatnonzero(np.random.default_rng(0).random(elements) < share)
        frame = pack(kept, elements)
        jobs = {"pack": lambda kept=kept: pack(kept, elements), "unpack": lambda frame=frame: unpack(frame, elements)}
        took = medians(alternate(jobs, rounds))
        form = f"gaps of {int(frame[0])} bits" if int(frame[0]) else "mask"
        entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share
        bits = 8 * len(frame) / len(kept)
        rows.append([f"{share:.2%}", form, bits, float(entropy), 1e3 * took["pack"], 1e3 * took["unpack"]])
    return table(["kept", "form", "bits / position", "entropy", "pack ms", "unpack ms"], rows)


def selection_table(tensor: Tensor, keep: float, rounds: int) -> str:
    """What choosing elements costs in a step, the exact selection spread over the steps that it serves.

    A comparison yields a mask; to send positions they have to be found in it. `topk` yields positions, out of order.
    """
    flat, count = tensor.numpy(), round(keep * tensor.numel())
    floors, place = exact_floors(flat, keep), tensor.numel() - count + 1
    jobs: dict[str, Callable[[], object]] = {
        "torch.topk": lambda: torch.topk(tensor.abs(), count, sorted=False),
        "torch.kthvalue": lambda: torch.kthvalue(tensor.abs(), place),
        "exact selection (numpy)": lambda: exact_floors(flat, keep),
        "comparison": lambda: mask_of(flat, floors),
        "comparison, with positions": lambda: reach(flat, floors),
    }
    took = medians(alternate(jobs, rounds))
    for name in ("comparison", "comparison, with positions"):
        took[f"a step: {name}, refresh every {STEPS:,}"] = took[name] + took["exact selection (numpy)"] / STEPS
    rows = [[name, 1e3 * seconds, took["torch.topk"] / seconds] for name, seconds in took.items()]
    return table(["choosing elements", "ms", "topk / it"], rows)


def speed(arguments: argparse.Namespace) -> None:
    """Prints the tables."""
    torch.set_num_threads(1)
    keep_freed_memory()  # as a job does
    tensors = gradients(arguments.elements // WIDTH * WIDTH)
    print("\n".join(describe()))
    print(f"{arguments.elements:,} elements, {arguments.keep:.2%} asked, one thread, {arguments.rounds} rounds\n")
    print(codec_table(tensors, arguments.keep, arguments.rounds), end="\n\n")
    print(position_table(len(tensors[0]), arguments.rounds), end="\n\n")
    print(selection_table(tensors[0], arguments.keep, arguments.rounds))


def main() -> None:
    """Reads the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("speed", help="GB/s on one core")
    command.add_argument("--elements", type=int, default=1 << 22)
    command.add_argument("--rounds", type=int, default=15)
    command.add_argument("--keep", type=float, default=0.01)
    command.set_defaults(run=speed)
    lossy.add_arguments(commands.add_parser("quality", help="AUC over bytes"))
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
