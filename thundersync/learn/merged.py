"""An adapter's weights for engines when no trainer runs: merged into its base once, and kept in shared memory.

A process of its own, because it computes. It writes what a trainer worker would publish, by the same code and so bit
for bit, tells where, and then waits: the arena lives as long as its owner has this process's input open.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import msgspec
import torch

from thundersync.generate.arena import create_arena
from thundersync.generate.child import end_with_parent
from thundersync.learn.lora import adapter_base, load_adapter, published_parameters
from thundersync.learn.policy import load_frozen


def main() -> None:
    """Print the arena's map as one line of JSON, then wait. `--folder` is removed should the parent be killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--adapter", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--parent", type=int, required=True)
    given = parser.parse_args()
    end_with_parent(given.parent, remove=given.folder)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    policy = load_frozen(adapter_base(given.adapter), dtype=given.dtype, device="cpu")
    load_adapter(policy, given.adapter)
    arena = create_arena(given.folder / "weights", published_parameters(policy), dtype=given.dtype)
    del policy
    sys.stdout.buffer.write(msgspec.json.encode(arena) + b"\n")
    sys.stdout.buffer.flush()
    sys.stdin.buffer.read()  # until the owner closes it


if __name__ == "__main__":
    main()
