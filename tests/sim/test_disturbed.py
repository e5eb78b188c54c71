"""Every simulated system under random events reaches its steps, trains whole batches, and ends its evaluations."""

import random

import pytest

from tests.sim.disturbed import Disturbed, disturb
from tests.sim.fixtures import cluster
from venusrl.coordinator.coordinator import CoordinatorOptions
from venusrl.sim.systems import SYSTEMS, system
from venusrl.sim.workload import Generated


@pytest.mark.parametrize("name", sorted(SYSTEMS))
@pytest.mark.parametrize("async_factor", [1.0, 2.0])
def test_losses_failures_and_evaluations_keep_no_system_from_its_end(name, async_factor):
    failed = evaluated = 0
    for seed in range(6):
        options = CoordinatorOptions(2, 2, async_factor, max_refills=seed % 3, updates=5)
        workload = Generated(seed, num_tasks=500, max_tokens=4000, max_turns=4)
        run = Disturbed(system(name), cluster(3), workload, options)
        disturb(run, random.Random(seed), 4000)
        report = run.run(max_events=300_000)
        assert run.coordinator.version == 5 and run.coordinator.counters.consumed == 10
        assert sum(report.stale.values()) == 5 * 2 * 2
        while run.evaluating:  # beside training that has ended
            run.step()
        run.coordinator.check()
        failed, evaluated = failed + run.coordinator.counters.failed, evaluated + run.evaluated
        groups = getattr(run.policy, "_groups", None)
        if groups is not None:
            ready = len(run.coordinator.ready_groups)
            assert groups._cut._capacity == 2 - ready % 2 and not groups._evaluations
    assert failed and evaluated
