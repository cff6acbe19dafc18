"""Which feature each behaviour sequence is attended with."""

from collections.abc import Mapping

from shadowsync.errors import ConfigError
from shadowsync.models.model import SequenceInput
from shadowsync.registry import nearest


def find_targets(
    model: str, chosen: Mapping[str, str], dims: Mapping[str, int], sequences: Mapping[str, SequenceInput]
) -> dict[str, str]:
    """The target of each sequence, in the order of the sequences.

    Args:
        model: the model's name, for messages.
        chosen: targets by sequence, as configured; any other sequence takes the one feature with one id per sample
            that shares its table.
        dims: the width of each pooled feature's vector.
        sequences: all of them.

    Raises:
        ConfigError: there is no sequence; a name is unknown; a sequence has no such feature, or several; or target
            and sequence differ in width.
    """
    if not sequences:
        raise ConfigError(
            f"model.name={model} attends over a behaviour sequence, and no feature has pooling=none: let a feature "
            "with several ids per sample share the table of the feature that it is attended with, or name both: "
            f"model.targets={{recent_items: item}}{_none_chosen(chosen)}"
        )
    for feature in chosen:
        if feature not in sequences:
            raise ConfigError(
                f"model.targets: feature {feature} is no sequence{nearest(feature, sequences)}; sequences, with "
                f"pooling=none, are {', '.join(sequences)}"
            )
    found = {name: chosen.get(name) or _partner(name, sequences[name]) for name in sequences}
    for name, target in found.items():
        _check_target(name, target, dims, sequences[name])
    return found


def _none_chosen(chosen: Mapping[str, str]) -> str:
    return f" (model.targets names {', '.join(chosen)}, which embedding.pooling pools)" if chosen else ""


def _partner(name: str, sequence: SequenceInput) -> str:
    if len(sequence.partners) == 1:
        return sequence.partners[0]
    several = f"several features with one id per sample share its table: {', '.join(sequence.partners)}"
    raise ConfigError(
        f"sequence {name}: {several if sequence.partners else 'no feature with one id per sample shares its table'}; "
        f"name the one it is attended with: model.targets={{{name}: {(*sequence.partners, 'FEATURE')[0]}}}"
    )


def _check_target(name: str, target: str, dims: Mapping[str, int], sequence: SequenceInput) -> None:
    if target not in dims:
        raise ConfigError(
            f"model.targets: {name} is attended with {target}, which is no pooled feature{nearest(target, dims)}; "
            f"there are {', '.join(dims) or 'none'}"
        )
    if dims[target] != sequence.dim:
        raise ConfigError(
            f"model.targets: vectors of {name} have {sequence.dim} columns and those of its target {target} "
            f"{dims[target]}: let them share a table, or give their tables the same dim"
        )
