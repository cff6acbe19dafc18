"""What a job can do about codecs that are chosen while it runs, and what it tells of them."""

from collections.abc import Collection, Iterator

from shadowsync.assembly import prefetch
from shadowsync.choices import Choices
from shadowsync.compression.codec import Codec
from shadowsync.config import Config
from shadowsync.runtime.codec_choice import Situation, unmeasured


def situation(config: Config, choices: Choices) -> Situation:
    """What a trainer has to know of the job to choose."""
    merged = choices.aggregation is None
    return Situation(
        workers=config.train.workers,
        overlapped=prefetch(config, choices) > 0,
        elastic=merged and not choices.schedule.foreground,
        collective=merged and choices.method.collective,
    )


def remarks(config: Config, choices: Choices) -> Iterator[str]:
    """Of each kind of traffic with `auto` for which nothing can be chosen: what it is then, and why."""
    for kind, codec in choices.codecs.items():
        if len(codec.ladder) == 1:
            continue
        if config.cluster.runtime == "inprocess":
            yield unmeasured(kind, codec, "in one process nothing is sent")
        elif kind == "dense" and situation(config, choices).collective:
            why = f"all trainers have to send alike to be averaged by sync.method={choices.method.name}"
            yield unmeasured(kind, codec, why)


def in_order(codec: Codec, names: Collection[str]) -> str:
    """These codecs of the ladder, the weakest first; its first one where there are none."""
    chosen = [rung.name for rung in codec.ladder if rung.name in names]
    return ", ".join(chosen) or codec.ladder[0].name
