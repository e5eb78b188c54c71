"""RowTable against a plain model of it, over random schedules."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from venusrl.rollout.engine.rows import RowTable

ROWS = 3
NAMES = st.sampled_from("abcdef")


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.table = RowTable(ROWS)
        self.busy: dict[str, int] = {}
        self.idle: dict[str, int] = {}  # in order of last use
        self.history: dict[int, list[int]] = {}  # by row: what its KV is of
        self.evictions = 0

    @rule(name=NAMES, data=st.data())
    def acquire(self, name, data):
        if name in self.busy:
            return  # one request of a trajectory at a time, by contract
        known = self.idle.get(name)
        kept = self.history[known] if known is not None else []
        more = data.draw(st.lists(st.integers(0, 3), max_size=3))
        context = data.draw(st.sampled_from([kept + more, kept[:1] + more, more])) or [0]
        victim = next(iter(self.idle), None)
        row = self.table.acquire(name, context)
        if known is None and len(self.busy) + len(self.idle) == ROWS:
            if victim is None:
                assert row is None
                return
            assert row == self.idle.pop(victim)  # the one used longest ago
            self.evictions += 1
            kept = []
        elif known is not None:
            assert row == self.idle.pop(name)
        else:
            assert row not in {*self.busy.values(), *self.idle.values()}
        entry = self.table.rows[row]
        agrees = context[: len(kept)] == kept
        assert entry.cached == (min(len(kept), len(context) - 1) if agrees else 0)
        assert entry.tokens == context and entry.busy and entry.trajectory == name
        self.busy[name] = row
        self.history[row] = []

    @rule(name=NAMES, new=st.lists(st.integers(0, 3), max_size=3))
    def end(self, name, new):
        """A request ends with `new` generated; the KV of all but its last token is there."""
        if name not in self.busy:
            return
        row = self.busy.pop(name)
        entry = self.table.rows[row]
        entry.tokens.extend(new)
        entry.cached = len(entry.tokens) - 1
        self.history[row] = entry.tokens[:-1]
        self.idle[name] = row
        self.table.idle(row)

    @rule(name=NAMES)
    def release(self, name):
        self.table.release(name)
        if name in self.idle:
            del self.history[self.idle.pop(name)]

    @rule()
    def invalidate(self):
        self.table.invalidate()
        self.history = {row: [] for row in self.history}
        assert all(row.cached == 0 for row in self.table.rows)

    @invariant()
    def rows_add_up(self):
        rows = self.table.rows
        held = {r.trajectory: i for i, r in enumerate(rows) if r.trajectory is not None}
        assert held == self.busy | self.idle  # each trajectory in one row, and no other row is taken
        assert len(held) == sum(r.trajectory is not None for r in rows)
        assert {i for i, r in enumerate(rows) if r.busy} == set(self.busy.values())
        assert self.table.available == ROWS - len(self.busy)
        assert self.table.evictions == self.evictions
        assert all(r.cached <= len(r.tokens) for r in rows)


TestRowTable = Machine.TestCase
TestRowTable.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
