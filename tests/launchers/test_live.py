"""Live cells of the figures: the trajectories of the simulator, made short, on real engines."""

from launchers.figures import live
from launchers.figures.live import LiveCell, Small, run_live


def test_trajectories_fit_a_row_and_differ():
    workload = Small(0)
    specs = [workload.trajectory(prompt, 0, index) for prompt in range(40) for index in range(2)]
    assert all(s.length < live.LENGTH * 0.75 for s in specs)  # the chat's own tokens come on top
    assert all(1 <= n <= live.MAX_TOKENS for s in specs for n in s.outputs)
    assert len({s.outputs for s in specs}) == len(specs)
    assert 50 < workload.mean_context() < live.LENGTH


def test_a_turn_generates_what_its_trajectory_says_and_hits_are_told(monkeypatch):
    specs, runs = {}, []

    class Env(live.TimedEnv):
        def __init__(self, name, spec, plan):
            super().__init__(name, spec, plan)
            specs[name] = spec

    class Run(live._Run):
        def __init__(self, cell):
            super().__init__(cell)
            runs.append(self)

    for name, value in dict(GROUP=2, BATCH=1, TOOL_SCALE=1000, TimedEnv=Env, _Run=Run).items():
        monkeypatch.setattr(live, name, value)
    outcome = run_live(LiveCell("venus", load=0.1, updates=1))
    finished = [t for t in runs[0].started if t.reward is not None]
    assert len(finished) >= 2
    for t in finished:
        assert [turn.end - turn.begin for turn in t.turns] == list(specs[t.id].outputs)
    assert outcome.hit > 0.98 and outcome.kept > 0.98 and outcome.retracted == 0
