"""The tables of measures hold every figure of a frame once, and read those of a result from where they are."""

from collections import Counter
from typing import Any, cast

import msgspec
from fake_runs import make_frames, make_gradient_result, make_recovery_result, make_result

from shadowsync.metrics.history import Frame
from shadowsync.report.measures import KEY_NUMBERS, LIVE, OF_AGGREGATION, OF_RECOVERY, figures, key_numbers, scalars
from shadowsync.report.result import ComputingSection, EndedSection


class Watched:
    """A frame that writes down what is asked of it."""

    def __init__(self, frame: Frame) -> None:
        self._frame, self.asked = frame, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked.add(name)
        return getattr(self._frame, name)


def test_every_field_of_a_frame_is_shown_somewhere() -> None:
    watched = Watched(make_frames(1)[0])
    for measure in LIVE:
        list(measure.values(cast("Frame", watched)))
    assert watched.asked == {field.name for field in msgspec.structs.fields(Frame)}


def test_every_measure_of_a_result_is_read_from_where_it_is() -> None:
    for result in (
        make_gradient_result(recovery=make_recovery_result()),
        make_result(computing=ComputingSection("bf16", "torch"), ended=EndedSection(why="epochs", detail="all of it")),
    ):
        for table in (KEY_NUMBERS, OF_AGGREGATION, OF_RECOVERY):
            for measure in table:
                measure.value(result)
            assert all(row.name and row.value for row in key_numbers(result, table))


def test_no_name_or_tag_stands_twice() -> None:
    tables = [
        [m.key for m in LIVE if m.key],
        [m.tag for m in LIVE if m.tag],
        [m.column for m in KEY_NUMBERS if m.column],
    ]
    for names in tables:
        assert max(Counter(names).values()) == 1
    tags = [tag for frame in make_frames(3) for tag, _ in scalars(frame)]
    assert tags
    assert all("{}" not in tag for tag in tags)


def test_the_progress_line_has_nothing_empty() -> None:
    assert all(part for frame in make_frames(3) for part, _ in figures(frame))
