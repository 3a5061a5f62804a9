"""The engine behind `--engine cpu`: the native one where it can run, else OpenVINO. Its name says which one it is."""

from typing import Literal

from anechain.errors import EngineError
from anechain.run.engine import Engine


def cpu_engine(mode: Literal["exact", "fast"], native: bool = True) -> Engine:
    """`native` False asks for OpenVINO. Raises EngineError where neither is there."""
    if native:
        from anechain.run.tape import TapeEngine

        try:
            return TapeEngine(mode)
        except EngineError:
            pass  # it was not built, or the processor lacks what it needs: doctor says which
    from anechain.run.openvino import CpuEngine

    return CpuEngine(mode)
