from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import datetime, json, sys
import torch.distributed as dist
from agentic_rollout.engines.tensor_parallel import TensorParallelLink
from agentic_rollout.errors import EngineError

rank, rendezvous = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", f"file://{rendezvous}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
)
link = TensorParallelLink(dist.group.WORLD)
seen = []
if link.leads:
    link.send(("first", 1))
    link.send(())
    link.finish(["result"])
    link.send(("second", 2))
    link.finish(error=EngineError("out of memory"))
else:
    seen.append(link.follow(seen.append))
    try:
        link.follow(seen.append)
    except EngineError as error:
        seen.append(repr(error))
dist.destroy_process_group()
print(json.dumps({"leads": rank == 0, "seen": seen}))
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_follower_steps_as_the_leader_and_ends_with_its_result_or_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "rendezvous")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=150)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    # gloo prints a line of its own first.
    leader, follower = (json.loads(output.splitlines()[-1]) for output in outputs)
    assert leader == {"leads": True, "seen": []}
    assert follower["seen"] == [["first", 1], [], ["result"], ["second", 2], "EngineError('out of memory')"]
