from collections.abc import Callable

from sim.core.columns import Floats, Ints
from sim.engine.link_rates import Flow

def run_columns(
    seconds: Floats,
    sort: Ints,
    waited_for: Ints,
    waiting: Ints,
    launcher: Ints,
    launched: Ints,
    lag_s: Floats,
    start_s: Floats,
    end_s: Floats,
    sorts: int,
    by_sort: dict[int, Flow],
    capacity: dict[int, float],
    over: float,
    fair: Callable[[bytes], bytes],
    fsum: Callable[[bytes], float],
    /,
) -> int: ...
