from collections.abc import Callable

from sim.graph.sharing import Flow
from sim.graph.taskgraph import Launched

def run(
    seconds: list[float],
    waits: list[list[int]],
    launched: dict[int, list[Launched]],
    sort: list[int],
    sorts: int,
    by_sort: dict[int, Flow],
    capacity: dict[int, float],
    over: float,
    fair: Callable[[bytes], bytes],
    fsum: Callable[[bytes], float],
    /,
) -> tuple[list[float], list[float], int]: ...
