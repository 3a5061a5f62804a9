"""The command line, whose worker stops for good in the middle of the job that STALL names: weights, and no program."""

import os
import time
from pathlib import Path
from typing import Any

from anechain.bake import jobs, mil_file

run_job = jobs.run_job


def stalling(plan: jobs.Plan, job: str, out: Path) -> Any:
    finish = mil_file._Weights.finish

    def finish_and_stall(weights: Any) -> None:
        finish(weights)
        if job == os.environ["STALL"]:
            (Path(weights._file.name).parents[1] / "stalled").touch()
            time.sleep(60)

    mil_file._Weights.finish = finish_and_stall  # type: ignore[method-assign]
    try:
        return run_job(plan, job, out)
    finally:
        mil_file._Weights.finish = finish  # type: ignore[method-assign]


jobs.run_job = stalling

if __name__ == "__main__":
    from anechain.cli import main

    main()
