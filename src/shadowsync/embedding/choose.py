"""Which storage a job uses."""

from shadowsync.embedding.fbgemm_storage import FbgemmStorage, load_operators
from shadowsync.embedding.storage import Storage
from shadowsync.embedding.torch_storage import TorchStorage
from shadowsync.errors import ConfigError, UserError
from shadowsync.registry import members, nearest

AUTO = "auto"


def storage_class(name: str) -> type[Storage]:
    """The storage called `name`; `auto` takes `fbgemm` where it can be loaded, else `torch`.

    Raises:
        ConfigError: there is none of that name. Whether a storage can be used is checked when one is made.
    """
    known = members("shadowsync.embedding", Storage)
    if name == AUTO:
        return FbgemmStorage if _fbgemm_loads() else TorchStorage
    if name not in known:
        allowed = (AUTO, *known)
        raise ConfigError(
            f"embedding.storage={name} is not known{nearest(name, allowed)}; allowed: {', '.join(allowed)}"
        )
    return known[name]


def _fbgemm_loads() -> bool:
    try:
        load_operators()
    except UserError:
        return False
    return True
