"""Parts of roles for the tests of runtimes."""

from collections.abc import Mapping

from shadowsync.errors import ConfigError
from shadowsync.rpc.service import Meta, Method, Payload
from shadowsync.runtime.runtime import ProcessContext, RoleService

CLOSED: list[str] = []


class Said(Meta, frozen=True):
    text: str


class Greeter:
    """Says what it was built with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.methods: Mapping[str, Method] = {"greet": Method(self._greet)}

    def _greet(self, request: Payload) -> Payload:
        return Payload.of(Said(self.text))

    def client_gone(self, client: str) -> None:
        """Keeps nothing."""

    def close(self) -> None:
        CLOSED.append(self.text)


def greeter(spec: str, context: ProcessContext) -> RoleService:
    return Greeter(f"{spec} from {context.role}")


def refuses(spec: str, context: ProcessContext) -> RoleService:
    raise ConfigError(f"{context.role} cannot be built from {spec}")


class Panic(BaseException):
    """As libraries written in Rust raise it."""


def panics(spec: str, context: ProcessContext) -> RoleService:
    raise Panic(f"{context.role} met {spec}")
