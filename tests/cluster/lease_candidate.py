"""A candidate for a Lease as a process of its own, which says what it holds.

One JSON object a line on standard output: `{"held": true}` when it takes the Lease; at its end
`{"held": false, "error": ...}`. SIGTERM releases it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time

from lmcache_operator.cluster import Cluster
from lmcache_operator.errors import LeaseLost
from lmcache_operator.lease import Lease, LeaseTimes


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201  # how it speaks


async def _say_when_held(lease: Lease) -> None:
    await lease.held.wait()
    _say(held=True)


async def _until_stopped(lease: Lease) -> int:
    running = asyncio.create_task(lease.run())
    saying = asyncio.create_task(_say_when_held(lease))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    try:
        await running
    except LeaseLost as error:
        _say(held=False, error=str(error))
        return 1
    except asyncio.CancelledError:
        await lease.release()
        _say(held=False, error="")
    finally:
        saying.cancel()
    return 0


async def _run(options: argparse.Namespace) -> int:
    async with await Cluster.connect(options.kubeconfig) as cluster:
        lease = Lease(
            cluster,
            namespace=options.namespace,
            name="candidates",
            identity=options.identity,
            times=LeaseTimes(*options.times),
            wall_now=lambda: time.time() + options.skew,
        )
        return await _until_stopped(lease)


def main() -> int:
    """Run until the Lease is lost or SIGTERM comes."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--identity", required=True)
    parser.add_argument("--skew", type=float, default=0.0, help="of its clock, in seconds")
    parser.add_argument("--times", type=float, nargs=3, help="duration, deadline, retry")
    return asyncio.run(_run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
