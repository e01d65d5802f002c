"""The first program of a sandbox: carries 127.0.0.1:PORT to the proxy's unix socket, runs the harness, and ends with its exit code.

Stand-alone (standard library only):  python relay.py PORT SOCKET -- PROGRAM ARGUMENT…

The sandbox has no network; the socket, mounted into it, is the only way out. As process 1 of the sandbox it reaps orphans, and on
SIGTERM passes the signal to every process of the sandbox, so that a harness can write down what it has before it is killed.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys

CHUNK = 65536
NOT_FOUND = 127


class Stream:
    """One direction of one connection: bytes read from `source`, waiting to be written to `target`."""

    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.waiting = b""
        self.ended = False
        self.closed = False


class Relay:
    """Forwards connections until the program ends."""

    def __init__(self, listener: socket.socket, upstream: str) -> None:
        self.listener, self.upstream = listener, upstream
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ)
        self.streams: dict[socket.socket, tuple[Stream, Stream]] = {}

    def step(self) -> None:
        """Wait for one round of events and serve them."""
        for key, events in self.selector.select():
            if key.fileobj is self.listener:
                self._accept()
            elif isinstance(key.fileobj, socket.socket) and key.fileobj in self.streams:
                self._serve(key.fileobj, events)
            elif isinstance(key.fileobj, int):
                os.read(key.fileobj, CHUNK)

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            server.connect(self.upstream)
        except OSError:
            server.close()
            client.close()
            return
        there, back = Stream(client, server), Stream(server, client)
        for end, outgoing, incoming in ((client, there, back), (server, back, there)):
            end.setblocking(False)
            self.streams[end] = (outgoing, incoming)
            self.selector.register(end, selectors.EVENT_READ)

    def _serve(self, end: socket.socket, events: int) -> None:
        outgoing, incoming = self.streams[end]
        try:
            if events & selectors.EVENT_READ and not outgoing.waiting and not outgoing.ended:
                data = end.recv(CHUNK)
                outgoing.waiting, outgoing.ended = data, not data
                self._flush(outgoing)
            if events & selectors.EVENT_WRITE:
                self._flush(incoming)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._drop(outgoing, incoming)
            return
        if outgoing.closed and incoming.closed:
            self._drop(outgoing, incoming)
            return
        for one in (outgoing.source, outgoing.target):
            self._watch(one)

    def _flush(self, stream: Stream) -> None:
        if stream.waiting:
            try:
                sent = stream.target.send(stream.waiting)
            except BlockingIOError:
                sent = 0
            stream.waiting = stream.waiting[sent:]
        if stream.ended and not stream.waiting and not stream.closed:
            stream.closed = True
            stream.target.shutdown(socket.SHUT_WR)

    def _watch(self, end: socket.socket) -> None:
        outgoing, incoming = self.streams[end]
        wanted = 0
        if not outgoing.ended and not outgoing.waiting:
            wanted |= selectors.EVENT_READ
        if incoming.waiting:
            wanted |= selectors.EVENT_WRITE
        registered = end in self.selector.get_map()
        if wanted and registered:
            self.selector.modify(end, wanted)
        elif wanted:
            self.selector.register(end, wanted)
        elif registered:
            self.selector.unregister(end)

    def _drop(self, *streams: Stream) -> None:
        for stream in streams:
            self.streams.pop(stream.source, None)
            if stream.source in self.selector.get_map():
                self.selector.unregister(stream.source)
            stream.source.close()


def main(arguments: list[str]) -> int:
    port, upstream, separator, *command = arguments
    if separator != "--" or not command:
        print(__doc__, file=sys.stderr)
        return 2
    listener = socket.create_server(("127.0.0.1", int(port)), backlog=64)
    relay = Relay(listener, upstream)
    wake, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    relay.selector.register(wake, selectors.EVENT_READ)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        program = os.posix_spawnp(command[0], command, os.environ)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_FOUND
    terminated: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: terminated.append(_terminate(program)))
    code: int | None = None
    while True:
        ended, code = _reap(program, code)
        # Asked to end, the others get their grace too: this process's end would kill them.
        if ended or (code is not None and not terminated):
            return NOT_FOUND if code is None else code
        relay.step()


def _terminate(program: int) -> bool:
    """SIGTERM to everything in the sandbox when this is its process 1; outside of one, to the program alone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1 if os.getpid() == 1 else program, signal.SIGTERM)
    return True


def _reap(program: int, code: int | None) -> tuple[bool, int | None]:
    """Collect ended processes: (none is left, the program's exit code, 128 + signal when killed, once it has ended)."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return True, code
        if pid == 0:
            return False, code
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            code = code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
