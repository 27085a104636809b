"""Messages between processes as frames: an 8-byte little-endian length, then the body."""

import json
import pickle
import selectors
import socket
import struct
import time
from collections.abc import Collection, Iterable
from typing import Any, BinaryIO

HEADER = struct.Struct("<Q")


class FrameError(EOFError):
    """The other end wrote something that is not an answer; what follows cannot be read."""


def frame(body: bytes) -> bytes:
    """Return a frame with this body."""
    return HEADER.pack(len(body)) + body


def read_frame(file: BinaryIO) -> bytes:
    """Return the body of the next frame of a file that waits.

    Raises:
        EOFError: the other end is closed.
    """
    header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError
    return file.read(HEADER.unpack(header)[0])


def pickled(message: object) -> bytes:
    """Return a message for a process that trusts us."""
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def parsed_json(body: bytes) -> Any:
    """Return the JSON document in a body, or None: the other end may run code that writes anything."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


class FrameStream:
    """Our end of a socket: sends and receives frames in part, and never waits.

    Args:
        channel: the socket, which is made non-blocking: a process that does not read must not stop us.
        largest: most bytes of a received body.
    """

    def __init__(self, channel: socket.socket, largest: int) -> None:
        channel.setblocking(False)
        self.channel, self.largest = channel, largest
        self.unsent = memoryview(b"")
        self.received = bytearray()
        self.sent_at = 0.0
        """Monotonic time at which something was last sent."""

    def send(self, body: bytes) -> bool:
        """Begin to send a frame. Return False if the other end is closed."""
        self.unsent = memoryview(frame(body))
        return self.push()

    def push(self) -> bool:
        """Send as much as fits now. Return False if the other end is closed."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.channel.send(self.unsent) :]
                self.sent_at = time.monotonic()
        except BlockingIOError:
            pass
        except OSError:
            self.unsent = memoryview(b"")
            return False
        return True

    def receive(self) -> bytes | None:
        """Read what there is and return the next complete body, if any.

        Raises:
            FrameError: the frame is too large.
            EOFError: the other end is closed.
        """
        try:
            chunk = self.channel.recv(1 << 20)
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""
        if not chunk:
            raise EOFError
        self.received += chunk
        return self.next()

    def next(self) -> bytes | None:
        """Return the next complete body among the bytes already read, if any.

        Raises:
            FrameError: the frame is too large.
        """
        if len(self.received) < HEADER.size:
            return None
        size = HEADER.unpack_from(self.received)[0]
        if size > self.largest:
            raise FrameError(f"it sent an answer of {size} bytes; at most {self.largest} are read")
        end = HEADER.size + size
        if len(self.received) < end:
            return None
        body = bytes(self.received[HEADER.size : end])
        del self.received[:end]
        return body


def wait(streams: Iterable[FrameStream], until: float, also: Collection[int] = ()) -> set[FrameStream | int]:
    """Wait until a stream can be sent on or read, at most until a monotonic time. Send what fits.

    Returns:
        The streams that can be read, and those of the descriptors `also` that can.
    """
    readable: set[FrameStream | int] = set()
    with selectors.DefaultSelector() as selector:
        for stream in streams:
            writing = selectors.EVENT_WRITE if stream.unsent else 0
            selector.register(stream.channel, selectors.EVENT_READ | writing, stream)
        for descriptor in also:
            selector.register(descriptor, selectors.EVENT_READ, descriptor)
        for key, events in selector.select(max(0.0, until - time.monotonic())):
            if events & selectors.EVENT_WRITE:
                key.data.push()
            if events & selectors.EVENT_READ:
                readable.add(key.data)
    return readable
