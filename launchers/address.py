"""The flags of a service: where it listens, and who may call."""

import dataclasses
import socket
from collections.abc import Callable

from absl import flags
from starlette.types import ASGIApp

from venusrl.core.door import Door, check_exposure, read_key
from venusrl.core.listening import listen

flags.disclaim_key_flags()  # they are flags of the program that asks for them, and in its --help


@dataclasses.dataclass(frozen=True)
class Address:
    """Flags; to be asked once they are parsed."""

    host: flags.FlagHolder
    port: flags.FlagHolder
    key_file: flags.FlagHolder
    origins: flags.FlagHolder

    def listen(self) -> tuple[socket.socket, str]:
        """(the socket, its address).

        Raises:
          ConfigError: it cannot be bound.
        """
        return listen(self.host.value, self.port.value)

    def door(self) -> Callable[[ASGIApp], Door]:
        """Puts an application behind its door. To be called before anything that takes long.

        Raises:
          ConfigError: the key cannot be read, or there is none and others can connect.
        """
        host, key = self.host.value, read_key(self.key_file.value) if self.key_file.value else None
        check_exposure(host, key)
        return lambda app: Door(app, host, key, self.origins.value)


def define_address(port: int) -> Address:
    """Args:
    port: where no flag says.
    """
    return Address(
        flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; one that others reach needs --key_file."),
        flags.DEFINE_integer("port", port, "Port to listen on; 0 takes a free one.", 0, 65535),
        flags.DEFINE_string("key_file", "", "File with the key that callers show (Authorization: Bearer KEY)."),
        flags.DEFINE_list("origins", [], "Web pages that may call, as https://host:port. Programs need none."),
    )
