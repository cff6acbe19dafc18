"""A codec is a name, or a name with options, in a file, on the command line and in a checkpoint."""

import pytest

from shadowsync.choices import choose_all, resumed
from shadowsync.compression.low_bit import Int8
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


def test_a_map_without_a_name_is_plain():
    assert codecs("compression.push={}")["push"] == Plain()


def test_options_may_stand_before_the_name_of_their_codec():
    options_first = ("compression.push.keep=0.02", "compression.push=threshold")
    bf16 = {"compression": {"push": "bf16"}}
    assert codecs(*options_first, base=bf16)["push"] == codecs(*options_first)["push"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("compression.push={keep: 0.1}", r"compression\.push\.keep is not an option of compression\.push=plain"),
        *((f"compression.push={given}", r"^compression\.push") for given in ("3", "[bf16]", "null", "{name: 3}")),
        ("compression.psh=bf16", "did you mean push"),
        (
            "compression.pull={name: auto, weakest: int4, strongest: bf16}",
            r"^compression\.pull: weakest=int4 has to come before strongest=bf16",
        ),
        ("compression.pull={name: threshold, feedback: true}", "another sample"),
        ("compression.dense={name: threshold, scope: group}", r"compression\.dense\.scope=group has no meaning"),
    ],
)
def test_what_is_no_codec_is_an_error_of_one_sentence(override, said):
    with pytest.raises(ConfigError, match=said):
        codecs(override)


def go_on(stored, *overrides):
    """The configuration of a run that goes on with overrides, as the command line makes it."""
    return parse(resumed(stored, merge({}, {}, list(overrides))))


@pytest.mark.parametrize("stored", ["bf16", {"name": "threshold", "keep": 0.3, "values": "int4"}, {"name": "plain"}])
@pytest.mark.parametrize("now", ["int8", "threshold", "bf16", "auto"])
def test_another_codec_may_be_chosen_at_a_resume(stored, now):
    config = go_on({"compression": {"push": stored, "pull": "bf16"}}, f"compression.push={now}")
    push = choose_all(config, own_model=False).codecs["push"]
    if isinstance(stored, dict) and now == stored["name"]:
        assert push == Threshold(keep=0.3, values="int4", feedback=False)
    else:
        assert config.compression.push.options == {}
        assert push.name == now


@pytest.mark.parametrize(
    ("stored", "overrides", "left"),
    [
        (
            {"push": {"name": "threshold", "keep": 0.1, "values": "int8"}},
            ["compression.pull=threshold"],
            {"pull": {}, "push": {"values": "int8"}},
        ),
        ({"pull": {"name": "threshold", "keep": 0.2}}, ["compression.pull=auto"], {"pull": {}}),
        (
            {"pull": {"name": "auto", "strongest": "threshold", "keep": 0.2}},
            ["compression.pull.strongest=int4"],
            {"pull": {"strongest": "int4"}},
        ),
        (
            {"push": {"name": "auto", "strongest": "threshold", "keep": 0.2}},
            ["compression.pull=threshold"],
            {"pull": {}, "push": {}},
        ),
        (
            {"pull": {"name": "threshold", "values": "int8", "rounding": "stochastic", "seed": 3}},
            ["compression.pull.values=bf16"],
            {"pull": {"values": "bf16"}},
        ),
        (
            {"pull": {"name": "threshold", "scope": "group", "keep": 0.3}},
            ["embedding.unique_rows=always"],
            {"pull": {"keep": 0.3}},
        ),
        ({"dense": {"name": "int8", "block": 64}}, ["sync.method=none"], {"dense": {}}),
        ({"dense": {"name": "int8", "block": 64}}, [], {"dense": {"block": 64}}),
    ],
    ids=str,
)
def test_stored_options_that_lost_their_meaning_are_left_out_at_a_resume(stored, overrides, left):
    config = go_on({"compression": stored}, *overrides)
    choose_all(config, own_model=False)
    assert {kind: getattr(config.compression, kind).options for kind in left} == left


def test_what_is_given_in_vain_at_a_resume_is_refused():
    stored = {"compression": {"push": {"name": "threshold", "keep": 0.1}}}
    with pytest.raises(ConfigError, match=r"^compression\.push\.keep=0\.3 has no effect beside compression\.pull"):
        choose_all(go_on(stored, "compression.pull=threshold", "compression.push.keep=0.3"), own_model=False)


def test_another_codec_on_the_command_line_comes_without_the_options_of_the_file(tmp_path):
    (tmp_path / "job.yaml").write_text(
        "compression: {push: {name: threshold, keep: 0.1}, pull: {name: int4, block: 8}}"
    )
    config = load(tmp_path / "job.yaml", ["compression.push=int8", "compression.pull={name: int8}"])
    assert choose_all(config, own_model=False).codecs["push"] == Int8()
    assert choose_all(config, own_model=False).codecs["pull"] == Int8()
    same = load(tmp_path / "job.yaml", ["compression.push=threshold"])
    assert choose_all(same, own_model=False).codecs["push"] == Threshold(keep=0.1, feedback=False)


GBA = ["aggregation.method=gba"]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["compression.pull=threshold", "compression.pull.rounding=stochastic"], "pull.rounding=stochastic"),
        (["compression.pull=threshold", "compression.pull.values=bf16", "compression.pull.block=16"], "pull.block=16"),
        (["compression.pull=threshold", "compression.pull.values=int8", "compression.pull.seed=1"], "pull.seed=1"),
        (["compression.push=int8", "compression.push.seed=1"], "push.seed=1"),
        (["compression.push=auto", "compression.push.seed=1"], "push.seed=1"),
        (["compression.push={name: auto, strongest: bf16, rounding: stochastic}"], "push.rounding=stochastic"),
        (["compression.push={name: auto, strongest: bf16, block: 16}"], "push.block=16"),
        (["compression.push={name: auto, keep: 0.2}"], "push.keep=0.2"),
        (["compression.push={name: threshold, keep: 1, refresh: 7}"], "push.refresh=7"),
        (["compression.push={name: threshold, keep: 1, band: 3}"], "push.band=3"),
        (["compression.push={name: threshold, keep: 1, correction: 0}"], "push.correction=0"),
        (["compression.push={name: threshold, refresh: 1, band: 3}"], "push.band=3"),
        (["compression.push={name: threshold, refresh: 1, correction: 0}"], "push.correction=0"),
        (["compression.pull={name: threshold, scope: group}", "embedding.unique_rows=always"], "pull.scope=group"),
        (["compression.push={name: threshold, scope: group}", "embedding.unique_rows=always"], "push.scope=group"),
        (["compression.dense={name: threshold, feedback: false}"], "dense.feedback=False"),
        (["compression.dense={name: threshold, feedback: true}"], "dense.feedback=True"),
        (["compression.dense={name: threshold, keep: 1, feedback: false}", *GBA], "dense.feedback=False"),
        (["compression.dense={name: threshold, significance: 0.1}"], "dense.significance=0.1"),
        (["compression.dense={name: threshold, select: significant, keep: 0.2}"], "dense.keep=0.2"),
        (["compression.dense={name: threshold, select: significant, refresh: 9}"], "dense.refresh=9"),
        (["compression.dense={name: threshold, select: significant}", *GBA], "dense.select=significant"),
        (["compression.dense=int8", "sync.method=none"], "dense=int8"),
        (["compression.dense=auto", "sync.method=none"], "dense=auto"),
        (["compression.dense=threshold", "sync.method=none"], "dense=threshold"),
    ],
    ids=str,
)
def test_an_option_that_does_nothing_is_refused_with_one_sentence(overrides, told):
    with pytest.raises(ConfigError) as error:
        codecs(*overrides)
    assert str(error.value).startswith(f"compression.{told} has no effect ")
    assert "leave it out" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["compression.pull={name: threshold, values: fp32, rounding: nearest, seed: 0, block: null}"],
        ["compression.push={name: threshold, keep: null, band: 2.0}", "compression.pull=threshold"],
        ["compression.dense={name: threshold, feedback: false}", *GBA],
        ["compression.dense={name: int8, rounding: stochastic, seed: 4}"],
        ["compression.dense=plain", "sync.method=none"],
    ],
    ids=str,
)
def test_defaults_that_are_written_out_do_no_harm(overrides):
    codecs(*overrides)


@pytest.mark.parametrize(
    "option",
    ["refresh=true", "keep=true", "seed=false", "band=.inf", "band=.nan", "keep=.nan", "block=true", "correction=true"],
)
def test_numbers_are_finite_and_no_truth_values(option):
    with pytest.raises(ConfigError, match=rf"^compression\.dense\.{option.partition('=')[0]}=?") as error:
        codecs("compression.dense=threshold", "compression.dense.values=int8", f"compression.dense.{option}", *GBA)
    assert "{" not in str(error.value)


def test_a_share_is_that_of_its_direction():
    chosen = codecs("compression.pull=threshold", "compression.dense=threshold", *GBA)
    assert (chosen["pull"].keep, chosen["dense"].keep) == (0.2, 0.01)
    assert codecs("compression.push=threshold")["push"].keep == 0.2


def test_feedback_belongs_to_positions_that_keep_their_meaning():
    assert Threshold().resolved("compression.dense").feedback is True
    assert Threshold(feedback=False).resolved("compression.dense").feedback is False
    assert codecs("compression.pull=threshold")["pull"] == Threshold(keep=0.2, feedback=False)


def test_a_mask_of_the_pull_leaves_a_push_nothing_to_select():
    found = codecs("compression.pull=threshold", "compression.push=threshold", "compression.push.values=int8")
    assert found["push"] == Threshold(keep=0.2, values="int8", feedback=False)
    with pytest.raises(ConfigError, match=r"^compression\.push\.keep=0\.1 has no effect beside compression\.pull"):
        codecs("compression.pull=threshold", "compression.push=threshold", "compression.push.keep=0.1")


def test_neither_does_it_to_auto():
    found = codecs("compression.pull=threshold", "compression.push=auto", "compression.push.weakest=bf16")
    assert [level.name for level in found["push"].levels] == ["bf16", "int8", "int4"]
    with pytest.raises(ConfigError, match=r"^compression\.push\.strongest=threshold has no effect beside compression"):
        codecs("compression.pull=threshold", "compression.push=auto", "compression.push.strongest=threshold")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["compression.pull={name: threshold, select: significant}"], "pull.select=significant has no meaning"),
        (["compression.push={name: threshold, select: significant}"], "push.select=significant has no meaning"),
    ],
    ids=str,
)
def test_what_changes_is_known_of_replicas_alone(overrides, told):
    with pytest.raises(ConfigError, match=rf"^compression\.{told}.*: .*leave it out$"):
        codecs(*overrides)
