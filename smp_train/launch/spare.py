"""A warm process: it has done a rank's imports, and becomes a rank when its supervisor sends an environment.

``python -m smp_train.launch.spare``, with one end of a socket pair as its stdin. Until it becomes a rank it starts no
thread and does not use CUDA. It takes about as much host memory as a rank that has not built its model.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from smp_train.launch.command import replace_rank


class Spare:
    """The supervisor's handle to a warm process."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Start the process, with a rank's environment: libraries read some variables when they are imported."""
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "smp_train.launch.spare"], env=dict(environ), stdin=theirs.fileno(),
                start_new_session=True, preexec_fn=replace_rank,
            )  # fmt: skip

    def imported(self) -> bool:
        """Return whether the process has done its imports."""
        try:
            return self.socket.recv(1, socket.MSG_DONTWAIT) == b"" and self.process.poll() is None
        except OSError:  # not yet, or it has become a rank
            return False

    def become(
        self, arguments: Sequence[str], environ: Mapping[str, str], outputs: Sequence[int | None]
    ) -> subprocess.Popen[bytes] | None:
        """Turn the process into a rank that runs a module with arguments; return None if the process has ended."""
        streams = [0, *(number if output is None else output for number, output in enumerate(outputs, 1))]
        message = json.dumps({"arguments": arguments, "environ": dict(environ)}).encode()
        with suppress(OSError):  # it has ended
            socket.send_fds(self.socket, [b"\0"], streams)
            self.socket.sendall(message)
            self.socket.close()
            return self.process
        self.end()
        return None

    def end(self) -> None:
        """Kill the process."""
        self.socket.close()
        self.process.kill()
        self.process.wait()


def main() -> None:
    """Import what a rank needs, wait, and become a rank; exit if the supervisor closes the socket."""
    from smp_train import cli

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    cli.import_verb("train")
    with socket.socket(fileno=os.dup(0)) as channel:
        with suppress(OSError):  # it becomes a rank already
            channel.shutdown(socket.SHUT_WR)  # `Spare.imported` sees that
        streams = socket.recv_fds(channel, 1, 3)[1]
        text = b"".join(iter(lambda: channel.recv(1 << 16), b""))
    if len(streams) < 3:
        sys.exit(0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    message = json.loads(text)
    os.environ.clear()
    os.environ.update(message["environ"])
    module, *sys.argv[1:] = message["arguments"]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
