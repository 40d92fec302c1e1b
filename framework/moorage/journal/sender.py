# SPDX-License-Identifier: Apache-2.0
"""Sends events to webhooks: signed, within a time limit, and only to addresses that are allowed.

The message and its signature are those of https://www.standardwebhooks.com: the headers ``webhook-id``, ``webhook-timestamp`` and
``webhook-signature``, which is the HMAC-SHA256 of ``id.timestamp.body``.

A name is resolved for each delivery, each address is checked, and the connection is made to an address that was checked. So a name
that resolves to another address a moment later (DNS rebinding) leads nowhere else. Redirects are not followed, and proxies are not
used.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import io
import ipaddress
import json
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from typing_extensions import override

from moorage import errors
from moorage.clock import Clock
from moorage.db import RecordedEvent
from moorage.journal.delivery import Selection
from moorage.journal.webhooks import Webhook, read_secret, read_url

__all__ = ["BATCH", "Address", "Network", "Resolve", "WebhookSink", "is_allowed", "sign"]

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
#: Returns the addresses of a host, as :func:`socket.getaddrinfo` does.
Resolve = Callable[[str, int], Sequence[Any]]
#: Events of one message at most.
BATCH = 100
#: Seconds beyond the time limit after which a call counts as hanging: a resolver may take its time.
_RESOLVING = 5.0
#: IPv6 addresses of a translator, which contain the IPv4 address that is meant.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
#: All that IANA has given out for public IPv6 addresses. Beyond it some versions of :mod:`ipaddress` take for public what is not:
#: site-local addresses, translators of the own network, IPv4-compatible addresses.
_PUBLIC_IPV6 = ipaddress.ip_network("2000::/3")


def sign(key: bytes, message_id: str, timestamp: int, body: bytes) -> str:
    """Returns the signature of a message, as the header ``webhook-signature`` has it."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    return "v1," + base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()


def is_allowed(address: Address, networks: Sequence[Network]) -> bool:
    """Returns whether messages may be sent to an address: it is public, or in one of the networks.

    Of an IPv6 address that contains an IPv4 address (mapped, 6to4, Teredo, NAT64) the IPv4 address decides.
    """
    if any(address in network for network in networks if network.version == address.version):
        return True
    inner = _embedded(address)
    if inner is not None:
        return is_allowed(inner, networks)
    if isinstance(address, ipaddress.IPv6Address) and address not in _PUBLIC_IPV6:
        return False
    return address.is_global and not address.is_multicast


def _embedded(address: Address) -> Address | None:
    if not isinstance(address, ipaddress.IPv6Address):
        return None
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]


def _resolve(host: str, port: int) -> Sequence[Any]:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)


class _Deadline:
    """What is left of the time for one message."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._end = clock.monotonic() + seconds

    def left(self) -> float:
        """Seconds.

        :raises TimeoutError: none are left.
        """
        left = self._end - self._clock.monotonic()
        if left <= 0:
            raise TimeoutError(f"it did not answer within {self._seconds:g} seconds")
        return left


class _Incoming(io.RawIOBase):
    """What the receiver answers. Each read has what is left of the time, so that an answer cannot come byte by byte for hours."""

    def __init__(self, connected: socket.socket, deadline: _Deadline) -> None:
        self._connected = connected
        self._deadline = deadline

    @override
    def readable(self) -> bool:
        return True

    @override
    def readinto(self, buffer: Any) -> int:
        self._connected.settimeout(self._deadline.left())
        return self._connected.recv_into(buffer)


class _Socket:
    """The part of a socket that :mod:`http.client` uses, within a deadline."""

    def __init__(self, connected: socket.socket, deadline: _Deadline) -> None:
        self._connected = connected
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            self._connected.settimeout(self._deadline.left())
            rest = rest[self._connected.send(rest) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Incoming(self._connected, self._deadline))

    def close(self) -> None:
        self._connected.close()


class _Connection(http.client.HTTPConnection):
    def __init__(self, host: str, port: int, default_port: int, connect: Callable[[], _Socket]) -> None:
        # Decides whether the header Host contains the port.
        self.default_port = default_port
        super().__init__(host, port)
        self._open = connect

    @override
    def connect(self) -> None:
        self.sock = self._open()


class WebhookSink:
    """Sends events to one webhook.

    :param networks: whose addresses are allowed beside public ones.
    :param timeout: seconds for one message, from the connection to the status of the answer.
    """

    batch = BATCH

    def __init__(
        self,
        webhook: Webhook,
        clock: Clock,
        networks: Sequence[Network],
        timeout: float,
        *,
        resolve: Resolve = _resolve,
    ) -> None:
        self._webhook = webhook
        self._clock = clock
        self._networks = networks
        self._timeout = timeout
        self._resolve = resolve

    @property
    def name(self) -> str:
        """The name of the subscription."""
        return self._webhook.subscription

    @property
    def wanted(self) -> Selection:
        """The events that the webhook wants."""
        return self._webhook.wanted

    @property
    def limit(self) -> float:
        """Seconds after which one call counts as hanging."""
        return self._timeout + _RESOLVING

    def deliver(self, events: Sequence[RecordedEvent], missed: int) -> None:
        """Send one message.

        :raises Unavailable: the receiver could not be reached, or did not accept the message. Says why.
        :raises Forbidden: the receiver's address is not allowed.
        """
        content = {"webhook": self._webhook.name, "missed": missed, "events": [asdict(each) for each in events]}
        body = json.dumps(content, separators=(",", ":")).encode()
        message_id = f"{self._webhook.uuid}-{events[0].number}-{events[-1].number}"
        timestamp = int(self._clock.wall())
        headers = {
            "Content-Type": "application/json",
            "Connection": "close",
            "User-Agent": "moorage",
            "webhook-id": message_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": sign(read_secret(self._webhook.secret), message_id, timestamp, body),
        }
        scheme, host, port, path = read_url(self._webhook.url)
        try:
            status = self._post(scheme, host, port, path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            raise errors.Unavailable(f"{host}:{port}: {_reason(error)}") from error
        if 300 <= status < 400:
            raise errors.Unavailable(
                f"{host}:{port} answered {status}. Redirects are not followed; give the webhook the URL that it leads to."
            )
        if not 200 <= status < 300:
            raise errors.Unavailable(f"{host}:{port} answered {status}; it must answer 2xx once it has the events.")

    def _post(self, scheme: str, host: str, port: int, path: str, body: bytes, headers: dict[str, str]) -> int:
        secure = scheme == "https"
        connection = _Connection(host, port, 443 if secure else 80, lambda: self._connect(host, port, secure))
        try:
            connection.request("POST", path, body, headers)
            return connection.getresponse().status
        finally:
            connection.close()

    def _connect(self, host: str, port: int, secure: bool) -> _Socket:
        found = self._resolve(host, port)
        deadline = _Deadline(self._clock, self._timeout)
        failure: OSError = OSError("the name has no address")
        allowed = self._allowed(host, found)
        for tried, (family, kind, protocol, _, address) in enumerate(allowed):
            connected = socket.socket(family, kind, protocol)
            try:
                # One that does not answer leaves time for the others.
                connected.settimeout(deadline.left() / (len(allowed) - tried))
                connected.connect(address)
                if secure:
                    connected.settimeout(deadline.left())
                    connected = ssl.create_default_context().wrap_socket(connected, server_hostname=host)
            except OSError as error:
                connected.close()
                failure = error
            except BaseException:
                connected.close()
                raise
            else:
                return _Socket(connected, deadline)
        raise failure

    def _allowed(self, host: str, found: Sequence[Any]) -> Sequence[Any]:
        addresses = [(each, ipaddress.ip_address(each[4][0].partition("%")[0])) for each in found]
        allowed = [each for each, address in addresses if is_allowed(address, self._networks)]
        if addresses and not allowed:
            raise errors.Forbidden(
                f"{host} has the address {addresses[0][1]}, which is not public. If it is meant, add its network to [journal] "
                "webhook_allowed_networks."
            )
        return allowed


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError) and not error.args:
        return "no answer in time"
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    return f"{error or type(error).__name__}"
