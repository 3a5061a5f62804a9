"""The command line, whose worker stops for good in the middle of the job that STALL names: weights, and no program."""

import os
import time
from pathlib import Path
from typing import Any

from anechain.bake import jobs

run_job = jobs.run_job


def stalling(plan: jobs.Plan, job: str, out: Path) -> Any:
    from anechain.bake import package

    export = package.export

    def export_and_stall(*args: Any, weights_dir: str, **kwargs: Any) -> Any:
        model = export(*args, weights_dir=weights_dir, **kwargs)
        if job == os.environ["STALL"]:
            (Path(weights_dir).parent / "stalled").touch()
            time.sleep(60)
        return model

    package.export = export_and_stall
    return run_job(plan, job, out)


jobs.run_job = stalling

if __name__ == "__main__":
    from anechain.cli import main

    main()
