"""Parts of roles for the tests of runtimes."""

from functools import partial
from typing import Any

from shadowsync.errors import ConfigError
from shadowsync.rpc.served import Served, served
from shadowsync.runtime.runtime import Builder, ProcessContext

CLOSED: list[str] = []


class Greeter:
    """Says what it was built with."""

    def __init__(self, text: str) -> None:
        self.text = text

    @served()
    def greet(self) -> str:
        return self.text

    def close(self) -> None:
        CLOSED.append(self.text)


def greeter(text: Any) -> Builder:
    return partial(_greeter, text)


def _greeter(text: str, context: ProcessContext) -> Served:
    return Served(Greeter(f"{text} from {context.role}"))


def refuses(text: str, context: ProcessContext) -> Served:
    raise ConfigError(f"{context.role} cannot be built from {text}")


class Panic(BaseException):
    """As libraries written in Rust raise it."""


def panics(context: ProcessContext) -> Served:
    raise Panic(f"{context.role} met sand")
