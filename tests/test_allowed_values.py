"""Each value that a key allows has a record, and each record a value, where a type stands between the two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import pytest

from sim.serve.replicas.router import ROUTERS
from sim.variants.engines.admission import RouterName
from topology.architectures import CollectivesOf
from topology.timing import TIMINGS


@pytest.mark.parametrize(("values", "records"), [(RouterName, ROUTERS), (CollectivesOf, TIMINGS)])
def test_values_are_those_of_the_records(values: Any, records: Mapping[str, object]) -> None:
    assert sorted(get_args(values)) == sorted(records)
