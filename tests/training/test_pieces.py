"""A flat tensor whose parameters are encoded one by one: thresholds and residuals do not meet."""

import pytest
import torch
from torch import Tensor, nn

from shadowsync.compression.codec import NotFinite
from shadowsync.compression.plain import Plain
from shadowsync.compression.threshold import Threshold
from shadowsync.errors import ConfigError
from shadowsync.training.optimizers import Adagrad
from shadowsync.training.pieces import MOST, Pieces, by_parameter
from shadowsync.training.replica import Replica

TENTH = Threshold(keep=0.1, feedback=True)
WIDTHS = (2048, 100, 2048)
CODEC = Pieces(TENTH, ("first", "bias", "second"), WIDTHS)


def drawn(seed: int) -> Tensor:
    parts = [torch.randn(width, generator=torch.Generator().manual_seed(seed + width)) for width in WIDTHS]
    parts[2] = torch.randn(WIDTHS[2], generator=torch.Generator().manual_seed(seed)) * 1e-3
    return torch.cat(parts)


def test_each_parameter_has_its_share_and_small_ones_cross_whole() -> None:
    encoded = CODEC.encode(drawn(0))
    arrived = CODEC.decode(encoded.frames, encoded.shape)
    shares = [float((part != 0).float().mean()) for part in arrived.split(list(WIDTHS))]
    assert shares == pytest.approx([0.1, 1.0, 0.1], abs=1e-3)
    assert encoded.kept is not None
    assert torch.equal(encoded.kept, arrived.nonzero().flatten())
    assert encoded.refreshes == 2
    again = CODEC.decode_kept(encoded.frames, encoded.shape)
    assert again.kept is not None
    assert torch.equal(again.kept, encoded.kept)


def test_sent_and_left_make_the_sum_for_each_parameter() -> None:
    state, given, arrived = None, torch.zeros(sum(WIDTHS)), torch.zeros(sum(WIDTHS))
    for step in range(6):
        encoded = CODEC.encode(drawn(step), state)
        state = encoded.state
        given += drawn(step)
        arrived += CODEC.decode(encoded.frames, encoded.shape)
    left = [
        one.residual if one.residual is not None else torch.zeros(w)
        for one, w in zip(state.states, WIDTHS, strict=True)
    ]
    torch.testing.assert_close(arrived + torch.cat(left), given, rtol=0, atol=1e-5)


def test_what_is_remembered_can_be_stored_and_goes_on_bit_for_bit() -> None:
    state = CODEC.encode(drawn(0)).state
    stored = CODEC.restored(state.tensors())
    assert stored is not None
    for ours, theirs in zip(CODEC.encode(drawn(1), stored).frames, CODEC.encode(drawn(1), state).frames, strict=True):
        assert torch.equal(ours, theirs)
    assert CODEC.restored({}) is None
    for wrong in ({"3.age": torch.tensor(1)}, {"draws": torch.tensor(1)}, state.tensors() | {"0.residual": drawn(0)}):
        with pytest.raises(ValueError, match=r"belongs to none|elements, not 2048"):
            CODEC.restored(wrong)


def test_the_parameter_that_is_not_finite_is_named() -> None:
    for index, name in ((3, "first"), (2050, "bias"), (4000, "second")):
        bad = drawn(0).index_fill(0, torch.tensor([index]), float("nan"))
        if name == "bias":
            bad[2049] = float("inf")
        with pytest.raises(NotFinite, match=f"elements of {name} are NaN or infinite"):
            CODEC.encode(bad)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frames: frames[:-1],
        lambda frames: (frames[0][:2], *frames[1:]),
        lambda frames: (frames[0].float(), *frames[1:]),
        lambda frames: (frames[0], *frames[2:], frames[1]),
        lambda frames: (),
    ],
)
def test_frames_of_something_else_are_errors(spoil) -> None:
    encoded = CODEC.encode(drawn(0))
    with pytest.raises((ValueError, TypeError, IndexError, RuntimeError)):
        CODEC.decode(spoil(encoded.frames), encoded.shape)


def test_a_replica_is_cut_at_its_parameters() -> None:
    replica = Replica(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), Adagrad(), {})
    codec = by_parameter(TENTH, replica.slots, len(replica.flat))
    assert isinstance(codec, Pieces)
    assert codec.names == ("0.weight", "0.bias", "1.weight", "1.bias")
    assert codec.widths == (16, 16, 16, 16)
    assert (codec.name, codec.sparse, codec.everything) == ("threshold", True, False)
    differences = codec.of_differences()
    assert isinstance(differences, Pieces)
    assert differences.codec == TENTH.of_differences()
    flat = torch.randn(64)
    encoded = codec.encode(flat)
    assert torch.equal(codec.decode(encoded.frames, (64,)), flat)
    assert by_parameter(Plain(), replica.slots, 64) == Plain()
    with pytest.raises(ConfigError, match=f"at most {MOST} parameters, and this one has 304"):
        by_parameter(TENTH, replica.slots * 76, 64)
