"""`lmcache-operator`: reads the configuration, acts until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import sys

from lmcache_operator.app import App
from lmcache_operator.config import parse_config
from lmcache_operator.errors import ConfigError
from lmcache_operator.logs import configure_logging

EXIT_USAGE = 2


def main() -> int:
    """Run an operator; return the exit status: 0 after a stop, 2 for wrong flags, else 1."""
    try:
        config = parse_config()
    except ConfigError as error:
        for problem in error.problems:
            print(f"lmcache-operator: {problem}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    configure_logging(config.log_level, config.log_format)
    return asyncio.run(_run(App(config)))


async def _run(app: App) -> int:
    return await app.run()


if __name__ == "__main__":
    sys.exit(main())
