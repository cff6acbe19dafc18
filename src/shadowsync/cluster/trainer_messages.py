"""What crosses beside the tensors of a trainer's image."""

from shadowsync.rpc.service import Meta


class ImageNames(Meta, frozen=True):
    """What the tensors of a trainer's image are: those of its replica, then those of its method."""

    replica: tuple[str, ...]
    method: tuple[str, ...]
