"""Runs a command and prints its wall time and the peak memory of all its processes together.

    python benchmarks/measure_tree.py anechain bake MODEL -o DIR

Memory is the sum of the processes' proportional set sizes (pages that several share count once), read twenty times a
second from /proc; Linux only. Also printed: the share of the machine that other processes used meanwhile, a measure of
noise.
"""

import os
import subprocess
import sys
import time
from pathlib import Path


def tree(root: int) -> list[int]:
    """`root` and all its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, todo = [], [root]
    while todo:
        found.append(pid := todo.pop())
        todo += children.get(pid, [])
    return found


def pss_bytes(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def busy_ticks() -> int:
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return user + nice + system + irq + softirq


def main() -> None:
    before, started = busy_ticks(), time.perf_counter()
    process = subprocess.Popen(sys.argv[1:])
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(pss_bytes, tree(process.pid))))
        time.sleep(0.05)
    wall_s = time.perf_counter() - started
    own = os.times()
    all_s = (busy_ticks() - before) / os.sysconf("SC_CLK_TCK")
    own_s = own.children_user + own.children_system + own.user + own.system
    others = max(0.0, all_s - own_s) / (wall_s * (os.cpu_count() or 1))
    print(f"wall {wall_s:.1f} s, cpu {own_s:.1f} s, peak memory {peak / 1e6:.0f} MB, others used {others:.0%}")
    sys.exit(process.returncode)


if __name__ == "__main__":
    main()
