"""Workers are called directly, whatever the environment says of proxies."""

from tests.proxies import environment_proxy
from tests.rollout.remote.wires import PROMPT, SCRIPT, serving
from tests.rollout.worker_suite import collect, tokens
from venusrl.rollout.worker import Request


async def test_a_worker_and_its_key_are_kept_from_the_environment_s_proxy(monkeypatch):
    """The key went to the proxy with every call; where that was dead, the run waited for its workers for ever."""
    async with serving() as served, environment_proxy(monkeypatch) as seen:
        client = served.client(key="a key of sixteen")
        await client.start()
        made = tokens(await collect(client, Request("g0/0", list(PROMPT), 64, seed=1)))
        assert made[-1] == SCRIPT.tokenizer.im_end
        await client.update_weights({}, 6)
        await client.preempt("nobody")
        await client.close()
    assert seen == []
