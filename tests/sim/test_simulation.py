"""Whole simulated runs: nothing is lost, nothing is trained that is too old, and a seed fixes everything."""

import math

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.sim.fixtures import Listed, cluster
from venusrl.coordinator.coordinator import CoordinatorOptions
from venusrl.core.errors import ConfigError, VenusError
from venusrl.sim import bounds
from venusrl.sim.prediction import Noisy, make_prediction
from venusrl.sim.simulation import Simulation
from venusrl.sim.systems import SYSTEMS, System, system
from venusrl.sim.workload import Generated, TrajectorySpec

OPTIONS = CoordinatorOptions(group_size=3, batch_groups=2, async_factor=2.0, updates=6, max_refills=10**9)


def small(seed: int = 0, **options) -> Generated:
    return Generated(seed, num_tasks=500, max_tokens=4000, max_turns=6, **options)


def simulate(
    name: str, options: CoordinatorOptions = OPTIONS, seed: int = 0, prediction: str = "", **where
) -> Simulation:
    run = Simulation(system(name), cluster(**where), small(seed), options, make_prediction(prediction, seed))
    run.run(max_events=300_000)
    return run


@pytest.mark.parametrize("name", sorted(SYSTEMS))
@pytest.mark.parametrize("async_factor", [1.0, 1.5, 2.0, 3.0])
def test_every_system_trains_every_batch_and_tokens_add_up(name, async_factor):
    options = CoordinatorOptions(3, 2, async_factor, max_refills=10**9, updates=6)
    run = simulate(name, options)
    r = run.report
    assert len(r.batches_s) == 6 and r.batches_s == sorted(r.batches_s)
    assert sum(r.stale.values()) == 6 * 2 * 3
    unfinished = sum(live.generated for live in run.live.values())
    ready = sum(t.info["tokens"] for g in run.coordinator.ready_groups for t in g.trajectories)
    done = sum(
        t.info["tokens"]
        for g in run.coordinator.open_groups
        for t in g.trajectories
        if t.finished and "tokens" in t.info
    )
    assert r.generated == r.trained + r.wasted + unfinished + ready + done
    for worker in run.workers.values():
        assert worker.cache.used <= worker.cache.capacity
        assert len(worker.requests) <= worker.slots


@settings(max_examples=12, deadline=None, phases=[Phase.generate])
@given(
    seed=st.integers(0, 10**6),
    async_factor=st.sampled_from([1.0, 1.5, 2.0, 3.0]),
    kv=st.sampled_from([6000, 10_000, 30_000]),
    prediction=st.sampled_from(["", "oracle", "noisy:0.5"]),
)
def test_venus_never_starves_and_never_discards(seed, async_factor, kv, prediction):
    options = CoordinatorOptions(3, 2, async_factor, updates=6, seed=seed)
    run = simulate("venus", options, seed, prediction, kv_tokens=kv)
    assert max(run.report.stale) <= options.eta
    assert run.report.wasted == 0 and run.report.discard_rate == 0.0
    assert run.coordinator.counters.discarded == run.coordinator.counters.failed == 0


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_a_seed_fixes_everything(name):
    one, other = simulate(name).report, simulate(name).report
    for field in ("batches_s", "generated", "prefilled", "stale", "events", "preempted", "migrated"):
        assert getattr(one, field) == getattr(other, field)
    assert simulate(name, seed=1).report.batches_s != one.batches_s


@pytest.mark.parametrize("name", sorted(SYSTEMS))
@pytest.mark.parametrize("async_factor", [1.0, 2.0])
def test_no_system_beats_the_bound(name, async_factor):
    options = CoordinatorOptions(3, 2, async_factor, max_refills=10**9, updates=5)
    report = simulate(name, options).report
    bound = bounds.batch_times(cluster(), small(), options)
    if name.startswith(("slime", "thunderagent", "rollflash", "areal")) and async_factor > 1:
        # These do not count the batch in training against their bound on open groups, so they may open groups earlier.
        bound = bounds.batch_times(cluster(), small(), CoordinatorOptions(3, 2, 4.0, updates=5))
    assert bound == sorted(bound)
    assert all(b <= t + 1e-6 for b, t in zip(bound, report.batches_s, strict=True))


@pytest.mark.parametrize("name", ["venus", "slime", "rollflash", "thunderagent", "areal", "fcfs_action"])
def test_a_lost_worker_and_one_that_joins(name):
    run = Simulation(system(name), cluster(3), small(), OPTIONS)
    run._open_groups()
    for at, act in ((300, lambda: run.worker_down("w0000")), (600, lambda: run.worker_up("w0009"))):
        while run.report.events < at:
            run.step()
        act()
    run.run(max_events=300_000)
    assert run.coordinator.version == OPTIONS.updates
    assert run.workers["w0009"].decoded > 0


def test_all_workers_gone_is_an_error_and_no_endless_loop():
    run = Simulation(system("venus"), cluster(1), small(), OPTIONS)
    run._open_groups()
    run.worker_down("w0000")
    with pytest.raises(VenusError, match="nothing is under way; 12 trajectories are open"):
        run.run()


@pytest.mark.parametrize("answer", [math.nan, -5.0, math.inf, None])
def test_predictions_that_are_none_or_never_come_change_nothing(answer):
    class Broken:
        def remaining(self, trajectory, true):
            return answer

    plain = simulate("venus").report
    run = Simulation(system("venus"), cluster(), small(), OPTIONS, Broken())
    assert run.run().batches_s == plain.batches_s


def test_a_trajectory_that_never_ends_is_told():
    endless = Listed(lambda p, i: TrajectorySpec(10, (1,) * 100, (1,) * 100, (1e9,) * 100))
    run = Simulation(system("venus"), cluster(), endless, OPTIONS)
    with pytest.raises(VenusError, match="does a trajectory never end"):
        run.run(max_events=500)


def test_what_cannot_work_is_refused():
    with pytest.raises(ConfigError, match=r"async_factor=0.5 is below 1.0"):
        CoordinatorOptions(3, 2, 0.5)
    with pytest.raises(ConfigError, match=r"batch_groups=2 is larger than env.train_tasks=1"):
        Simulation(system("venus"), cluster(), Listed(None, num_tasks=1), OPTIONS)
    with pytest.raises(ConfigError, match="a trajectory may have 4000 tokens"):
        Simulation(system("venus"), cluster(kv_tokens=3000), small(), OPTIONS)
    with pytest.raises(ConfigError, match="system='slim' is unknown; one of venus, venus_lru"):
        system("slim")
    with pytest.raises(ConfigError, match="scheduler='lifo' is unknown"):
        System("lifo")
    with pytest.raises(ConfigError, match=r"switch='residence' is unknown; one of demotion, migration"):
        System("venus", switches=(("residence", False),))
    with pytest.raises(ConfigError, match=r"prediction='noisy:2' is unknown|rank correlation 2.0"):
        make_prediction("noisy:2", 0)
    with pytest.raises(ConfigError, match="prediction='gut' is unknown"):
        make_prediction("gut", 0)


def test_a_limit_on_sandboxes_is_kept():
    run = Simulation(system("venus"), cluster(sandboxes=4), small(), OPTIONS)
    run._open_groups()
    most = 0
    while run.coordinator.version < OPTIONS.updates:
        run.step()
        most = max(most, len(run.live))
    assert most == 4


def test_slower_tools_take_longer_and_a_larger_cluster_does_not():
    slow = Simulation(system("venus"), cluster(), small(tool_scale=10.0), OPTIONS).run()
    fast = simulate("venus").report
    assert slow.batches_s[-1] > fast.batches_s[-1]
    assert simulate("venus", workers=6).report.batches_s[-1] <= fast.batches_s[-1]


def test_the_noise_has_the_rank_correlation_that_was_asked_for():
    for wanted in (0.0, 0.6, 0.9):
        noisy = Noisy(wanted, 0)
        workload = Generated(0)
        for prompt in range(150):
            left = (spec := workload.trajectory(prompt, 0, 0, 0)).generated
            for tokens in spec.outputs:
                noisy.remaining(f"t{prompt}", left)
                left -= tokens
        assert noisy.measured == pytest.approx(wanted, abs=0.1)


def test_rollflash_wastes_what_it_discards_and_slime_what_it_restarts():
    assert simulate("rollflash").report.wasted > 0
    assert simulate("slime", CoordinatorOptions(3, 2, 3.0, max_refills=10**9, updates=6)).report.wasted > 0
    assert simulate("slime_resume").report.wasted == 0
