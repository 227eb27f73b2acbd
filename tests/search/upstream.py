"""A search server as a process: `python upstream.py PORT`, for tests that kill it."""

from __future__ import annotations

import sys
from pathlib import Path

from aiohttp import web

from agentic_rollout.server.app import create_app
from agentic_rollout.server.settings import ServerSettings

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from search.backends import Library

if __name__ == "__main__":
    web.run_app(create_app(Library(), ServerSettings()), host="127.0.0.1", port=int(sys.argv[1]), print=None)
