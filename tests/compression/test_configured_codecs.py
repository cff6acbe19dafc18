"""A codec is a name, or a name with options, in a file, on the command line and in a checkpoint."""

import pytest

from shadowsync.choices import choose_all, without_foreign_options
from shadowsync.compression.int8 import Int8
from shadowsync.compression.plain import Plain
from shadowsync.compression.threshold import Threshold
from shadowsync.config import load, merge, parse
from shadowsync.errors import ConfigError

SPARSE = Threshold(keep=0.02, feedback=False)


def codecs(*overrides, base=None):
    return choose_all(load(None, overrides, base), own_model=False).codecs


@pytest.mark.parametrize(
    "overrides",
    [
        ["compression.push=threshold", "compression.push.keep=0.02"],
        ["compression.push.keep=0.02", "compression.push=threshold"],
        ["compression.push.name=threshold", "compression.push.keep=0.02"],
        ["compression.push={name: threshold, keep: 0.02}"],
        ["compression={push: {name: threshold, keep: 0.02}}"],
    ],
)
def test_all_notations_mean_the_same(overrides):
    assert codecs(*overrides) == {"pull": Plain(), "push": SPARSE, "dense": Plain()}


@pytest.mark.parametrize(
    ("overrides", "keep"),
    [
        (["sync.method=easgd"], 0.1),
        (["sync.method=easgd", "compression.dense.keep=0.01"], 0.01),
        (["sync.method=ma"], 0.01),
        (["aggregation.method=gba"], 0.01),
    ],
)
def test_more_of_elastic_differences_crosses_unless_somebody_says_how_much(overrides, keep):
    assert codecs("compression.dense=threshold", *overrides)["dense"].keep == keep


def test_a_name_alone_takes_options_from_the_command_line(tmp_path):
    (tmp_path / "job.yaml").write_text("compression: {push: threshold, pull: int8}")
    config = load(tmp_path / "job.yaml", ["compression.push.keep=0.02", "compression.pull.block=64"])
    chosen = choose_all(config, own_model=False).codecs
    assert (chosen["push"], chosen["pull"]) == (SPARSE, Int8(block=64))
    assert parse(config.model_dump(mode="json", exclude_unset=True)) == config


def test_a_map_without_a_name_is_plain_and_has_no_options():
    assert codecs("compression.push={}")["push"] == Plain()
    with pytest.raises(ConfigError, match=r"compression\.push\.keep is not an option of compression\.push=plain"):
        codecs("compression.push={keep: 0.1}")


@pytest.mark.parametrize("given", ["3", "[bf16]", "null", "{name: 3}"])
def test_what_is_no_codec_is_an_error_of_one_sentence(given):
    with pytest.raises(ConfigError, match=r"^compression\.push"):
        codecs(f"compression.push={given}")


def test_unknown_kinds_are_told_of_the_known_ones():
    with pytest.raises(ConfigError, match="did you mean push"):
        codecs("compression.psh=bf16")


@pytest.mark.parametrize("stored", ["bf16", {"name": "threshold", "keep": 0.3, "values": "int4"}, {"name": "plain"}])
@pytest.mark.parametrize("now", ["int8", "threshold", "bf16"])
def test_another_codec_may_be_chosen_at_a_resume(stored, now):
    saved = {"compression": {"push": stored, "pull": "bf16"}}
    changed = merge({}, {}, [f"compression.push={now}"])
    config = parse(merge(without_foreign_options(merge(saved, changed, [])), changed, []))
    push = choose_all(config, own_model=False).codecs["push"]
    assert push.name == now
    if isinstance(stored, dict) and now == stored["name"]:
        assert push == Threshold(keep=0.3, values="int4", feedback=False)


def test_feedback_belongs_to_positions_that_keep_their_meaning():
    assert Threshold().resolved("compression.dense").feedback is True
    assert Threshold(feedback=False).resolved("compression.dense").feedback is False
    assert codecs("compression.pull=threshold")["pull"] == Threshold(feedback=False)
    with pytest.raises(ConfigError, match="another sample"):
        codecs("compression.pull=threshold", "compression.pull.feedback=true")


def test_the_dense_part_has_no_features_to_group():
    with pytest.raises(ConfigError, match=r"compression\.dense\.scope=group has no meaning"):
        Threshold(scope="group").resolved("compression.dense")


def test_a_mask_of_the_pull_leaves_a_push_nothing_to_select():
    found = codecs("compression.pull=threshold", "compression.push=threshold", "compression.push.values=int8")
    assert found["push"] == Threshold(values="int8", feedback=False)
    with pytest.raises(ConfigError, match=r"^compression\.push\.keep has no effect beside compression\.pull=threshold"):
        codecs("compression.pull=threshold", "compression.push=threshold", "compression.push.keep=0.1")


def test_neither_does_it_to_auto():
    found = codecs("compression.pull=threshold", "compression.push=auto", "compression.push.weakest=bf16")
    assert [rung.name for rung in found["push"].ladder] == ["bf16", "int8", "int4"]
    with pytest.raises(
        ConfigError, match=r"^compression\.push\.strongest=threshold has no effect beside compression\.pull"
    ):
        codecs("compression.pull=threshold", "compression.push=auto", "compression.push.strongest=threshold")
