"""Numbers as a person reads them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

MISSING = "—"
_PROPORTION = 1e6
_MANY = 0.1  # of the rows left out as bad


def _undefined(value: float | None) -> bool:
    return value is None or not math.isfinite(value)


def count(value: float | None) -> str:
    """`1,234,567`."""
    return MISSING if _undefined(value) else f"{value:,.0f}"


def decimal(value: float | None, digits: int = 4) -> str:
    """`0.9312`; `4.5e+12` of what is out of all proportion."""
    if value is None or _undefined(value):
        return MISSING
    return f"{value:,.{digits}f}" if abs(value) < _PROPORTION else f"{value:.2g}"


def percent(share: float | None, digits: int = 0) -> str:
    """`93 %` of a share of 0.93."""
    return MISSING if share is None or _undefined(share) else f"{100 * share:.{digits}f} %"


def setting(value: Any) -> str:
    """A value of the configuration as it is written in YAML and on the command line: `null`, `true`, `[a, b]`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {setting(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(setting, value)) + "]"
    return str(value)


def pls(portion: float) -> str:
    """`PLS 0.0123`, the portion of lost samples."""
    return f"PLS {portion:.3g}"


def _scaled(value: float | None, units: Sequence[tuple[float, str]], digits: int, otherwise: str) -> str:
    """In the largest of the units that is not larger than the value; `otherwise` is the format of smaller ones."""
    if value is None or _undefined(value):
        return MISSING
    for limit, unit in units:
        if abs(value) >= limit:
            return f"{value / limit:.{digits}g}{unit}"
    return otherwise.format(value)


def short(value: float | None) -> str:
    """`1.2M`, `850k`, `12`: for axes."""
    return _scaled(value, ((1e9, "G"), (1e6, "M"), (1e3, "k")), 4, "{:.4g}")


def data_size(amount: float | None) -> str:
    """`12.3 MB`, in powers of ten."""
    return _scaled(amount, ((1e12, " TB"), (1e9, " GB"), (1e6, " MB"), (1e3, " kB")), 3, "{:.0f} bytes")


def duration(seconds: float | None) -> str:
    """`45.2 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds is None or _undefined(seconds):
        return MISSING
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def step_time(milliseconds: float) -> str:
    """`20 ms`, `0.5 ms`."""
    return f"{milliseconds:g} ms"


def brief(value: float) -> str:
    """`850`, `12.1k`, `1.2M`: where many figures share a line."""
    if value >= 999_950:
        return f"{value / 1e6:.1f}M"
    return f"{value / 1e3:.1f}k" if value >= 999.5 else f"{value:.0f}"


def clock(seconds: float | None) -> str:
    """`0:45`, `12:03`, `2:07:30`: for a line that changes every second."""
    if seconds is None or _undefined(seconds):
        return MISSING
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def left_out(bad: int, all_rows: int, rows: str, example: str | None = None) -> str | None:
    """On `bad` of `all_rows` rows that were skipped, where those are many."""
    if bad <= _MANY * all_rows:
        return None
    shown = f", for instance {example}" if example else ""
    return f"{bad:,} of {all_rows:,} {rows} ({percent(bad / all_rows)}) were left out by data.on_bad_row=skip{shown}"


def shortened(text: str, length: int) -> str:
    """Its begin and end, which tell names apart, with an ellipsis between them where it is longer."""
    return text if len(text) <= length else f"{text[: length // 2]}…{text[1 - length // 2 :]}"


def plural(number: int, noun: str, several: str | None = None) -> str:
    """`1 trainer`, `2 trainers`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {several or noun + 's'}"
