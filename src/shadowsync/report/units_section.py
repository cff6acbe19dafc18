"""The page's card on dead units."""

from functools import partial

from shadowsync.report import words
from shadowsync.report.canvas import Axis
from shadowsync.report.charts import Card
from shadowsync.report.plots import Bar, bar_chart
from shadowsync.report.result import Result
from shadowsync.report.summary import dead_of

DEAD_TERM = (
    "Dead unit",
    "A ReLU's unit that is 0 for every test row looked at: nothing passes through it, and its weights learn nothing.",
)
_LAYERS_DRAWN = 20


def units_cards(result: Result) -> list[Card]:
    """The share of dead units of each layer; nothing where the model has no ReLU or there were no test rows."""
    if (units := result.units) is None:
        return []
    worst = sorted(units.dead, key=lambda layer: units.dead[layer], reverse=True)[:_LAYERS_DRAWN]
    drawn = [layer for layer in units.dead if layer in worst]
    left_out = len(units.dead) - len(drawn)
    bars = [Bar(f"{layer}: {dead_of(units, layer)}", units.dead[layer]) for layer in drawn]
    rest = f" {words.plural(left_out, 'layer')} with fewer of them {'is' if left_out == 1 else 'are'} in result.json."
    return [
        Card(
            "Dead units",
            f"Share of each layer's units (of its ReLU) that were 0 on all {words.count(units.rows)} test rows looked "
            f"at.{rest if left_out else ''}",
            "none or a few; a layer that is wholly dead lets nothing through of what lies in front of it.",
            bar_chart(bars, "dead-units", Axis("share of the layer's units", partial(words.percent, digits=1))),
        )
    ]
