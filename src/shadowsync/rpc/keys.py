"""The keys of one job: whoever has them may read and write its parameters, and nobody else."""

import importlib

import msgspec

from shadowsync.errors import MissingExtra


class JobKeys(msgspec.Struct, frozen=True):
    """CURVE keys in Z85 (40 characters each), made for one job and handed out to its roles only."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @classmethod
    def make(cls) -> "JobKeys":
        """New keys.

        Raises:
            MissingExtra: ZeroMQ is not installed.
        """
        try:
            zmq = importlib.import_module("zmq")
        except ModuleNotFoundError as error:
            raise MissingExtra("pyzmq", "ray") from error
        return cls(*(key.decode() for _ in range(2) for key in zmq.curve_keypair()))

    def __repr__(self) -> str:
        """Without the secrets: a log must not give them away."""
        return f"JobKeys(server_public={self.server_public!r}, client_public={self.client_public!r})"
