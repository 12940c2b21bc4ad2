"""API keys of clients. Only hashes of keys are stored.

A file of keys has one key a line, ``NAME sha256:HEX``. A name may have several keys, so that one
can be replaced while both work. ``priority=LOW..HIGH`` at the end allows these priorities to its
requests. ``python -m gateway.access.api_keys NAME >> FILE`` makes a key and shows it.
"""

import argparse
import hashlib
import hmac
import re
import secrets
import sys
from dataclasses import dataclass

from gateway.access.priorities import ANY_PRIORITY, ONLY_DEFAULT, PriorityRange
from shared.errors import SettingsError

_LINE = re.compile(r"([\w.-]{1,64})\s+sha256:([0-9a-f]{64})(?:\s+priority=(\S{1,40}))?")
_SHORTEST_CHARS = 16
_NAME_OF_PLAIN = "default"
_NAME = re.compile(r"[\w.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key that clients may use.

    Attributes:
        tenant: the key's name.
        digest: SHA-256 of the key, 32 bytes.
        priorities: that its requests may have.
    """

    tenant: str
    digest: bytes
    priorities: PriorityRange


class ApiKeys:
    """The keys that clients may use; without any key, all clients are accepted.

    Args:
        file: path of a file of keys.
        plain: one more key, in plain text.
        variable: name of the environment variable that held ``plain``.
        priorities: allowed for keys without a range of their own, and for all clients where no
            key is required. By default, keys allow only the default priority, and without keys
            all priorities are allowed.

    Attributes:
        open_priorities: allowed for all clients where no key is required.

    Raises:
        SettingsError: a key or the file cannot be used. It never shows a key.
    """

    def __init__(
        self,
        file: str | None = None,
        plain: str | None = None,
        variable: str = "PAGESTREAM_API_KEY",
        priorities: PriorityRange | None = None,
    ) -> None:
        self._file = file
        self._priorities = ONLY_DEFAULT if priorities is None else priorities
        self.open_priorities = ANY_PRIORITY if priorities is None else priorities
        self._plain: ApiKey | None = None
        if plain is not None:
            self._plain = ApiKey(_NAME_OF_PLAIN, _digest(plain), self._priorities)
        if plain is not None and len(plain) < _SHORTEST_CHARS:
            reason = f"a key has at least {_SHORTEST_CHARS} characters"
            raise SettingsError(variable, "...", reason)
        self._keys: tuple[ApiKey, ...] = ()
        self._num_tenants = 0
        self.reload()

    @property
    def are_required(self) -> bool:
        """Whether clients need a key."""
        return bool(self._keys)

    @property
    def num_tenants(self) -> int:
        """Names that have keys."""
        return self._num_tenants

    def reload(self) -> int:
        """Read the file again, and return the number of keys.

        Raises:
            SettingsError: the file cannot be used. The old keys stay.
        """
        plain = () if self._plain is None else (self._plain,)
        self._keys = plain + (() if self._file is None else _read(self._file, self._priorities))
        self._num_tenants = len({key.tenant for key in self._keys})
        return len(self._keys)

    def key_of(self, authorization: str) -> ApiKey | None:
        """The key in an ``Authorization`` header, None if it has no valid key."""
        scheme, _, given = authorization.strip().partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest, found = _digest(given.strip()), None
        # Every key is compared, so that the time does not depend on which one matches.
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def tenant_of(self, authorization: str) -> str | None:
        """Name of the key in an ``Authorization`` header, None if it has no valid key."""
        key = self.key_of(authorization)
        return None if key is None else key.tenant


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _read(path: str, priorities: PriorityRange) -> tuple[ApiKey, ...]:
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError("--api-keys", path, f"cannot be read: {error}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:  # it may hold a key in plain text, so it is not shown
            reason = f"line {number}: expected NAME sha256:HEX, or this and priority=LOW..HIGH"
            raise SettingsError("--api-keys", path, reason)
        own = priorities
        if match[3] is not None:
            try:
                own = PriorityRange.parse(match[3])
            except ValueError as error:
                reason = f"line {number}: priority={match[3]}: {error}"
                raise SettingsError("--api-keys", path, reason) from None
        keys.append(ApiKey(match[1], bytes.fromhex(match[2]), own))
    if not keys:
        raise SettingsError("--api-keys", path, "there is no key in it")
    return tuple(keys)


def main() -> int:
    """Make a key: the line for the file goes to standard output, the key to standard error."""
    parser = argparse.ArgumentParser(
        prog="python -m gateway.access.api_keys",
        usage="%(prog)s NAME >> FILE",
        description="Make an API key. Its line for the file that --api-keys names goes to standard "
        "output and holds a hash; the key itself is shown once, on standard error.",
    )
    parser.add_argument("name", metavar="NAME", help="of the client: letters, digits and . _ -")
    name = parser.parse_args().name
    if _NAME.fullmatch(name) is None:
        parser.error(f"{name!r} is no name: expected at most 64 letters, digits and . _ -")
    key = f"ps-{secrets.token_urlsafe(32)}"
    print(f"{name} sha256:{_digest(key).hex()}")
    print(f"the key, which is shown only now: {key}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
