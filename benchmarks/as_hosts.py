"""Start a script as torchrun would on several hosts, all of which are this one and share its GPUs.

    python benchmarks/as_hosts.py HOSTS GPUS PORT SCRIPT [ARGUMENT ...]

NCCL refuses two ranks of one host on one GPU, so each group of GPUS ranks is told to be a host of its own
(NCCL_HOSTID): their traffic goes through sockets. Slow, and good for nothing but the numbers that come out: more
ranks than there are GPUs. The exit code is the first group's that is not zero.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence


def main(hosts: int, gpus: int, port: str, *script: str) -> int:
    """Run all groups and wait for them."""
    rendezvous = ["--nnodes", str(hosts), "--nproc-per-node", str(gpus), "--master-addr", "127.0.0.1"]
    groups = []
    for host in range(hosts):
        command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", *rendezvous, "--master-port", port]
        own = {"NCCL_HOSTID": f"host-{host}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        groups.append(subprocess.Popen([*command, "--node-rank", str(host), *script], env={**os.environ, **own}))
    signal.signal(signal.SIGTERM, lambda *_: _terminate(groups))
    while any(group.poll() is None for group in groups):
        if any(group.poll() for group in groups):
            _terminate(groups)
            break
        time.sleep(0.2)
    return next(filter(None, [group.wait() for group in groups]), 0)


def _terminate(groups: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let each torchrun end its ranks."""
    for group in groups:
        group.terminate()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
