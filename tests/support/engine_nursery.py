"""The nursery's program: imports vLLM, then forks one engine process per connection."""

from __future__ import annotations

import os
import signal
import sys
from multiprocessing.connection import Listener

from support.engine_driver import preload, serve
from support.engine_process import AUTHKEY


def main(address: str) -> None:
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the forks
    with Listener(address, family="AF_UNIX", authkey=AUTHKEY, backlog=16) as listener:
        while True:
            connection = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener._listener._socket.close()  # type: ignore[attr-defined]
                serve(connection)
                os._exit(0)
            connection.close()


if __name__ == "__main__":
    main(sys.argv[1])
