"""A thousand random configurations and command lines: no traceback, and none that means nothing is accepted."""

import json
import math
import random
import re

import pytest

from configs import base, limits, quickstart, warmstart
from launchers.configuration import check_config
from venusrl.core.errors import ConfigError

from .forked import ACCEPTED

TRAIN = "launchers.train"
WITH_CONFIG = [TRAIN, "launchers.serve", "launchers.worker", "launchers.warmstart"]
OTHERS = {
    "launchers.evaluate": ["tasks", "temperature", "baseline", "workdir"],
    "launchers.export": ["out", "dtype", "shard_gb", "workdir"],
    "launchers.sandboxd": [
        "port",
        "host",
        "socket",
        "max_sandboxes",
        "backend",
        "wait_s",
        "key_file",
        "peers",
        "lowers",
    ],
    "launchers.template": ["store"],
    "launchers.install": ["mirror"],
    "launchers.check_gpu": ["repeats", "dtype"],
    "launchers.figures.all": ["seeds", "workdir", "jobs"],
    "launchers.figures.fig02_motivation": ["trace", "seeds", "workdir"],
    "launchers.figures.fig10_end_to_end": ["seeds", "workdir", "jobs"],
    "launchers.figures.fig12_discards": ["seeds", "jobs"],
    "launchers.figures.fig15_scheduler_ablation": ["live", "seeds"],
    "launchers.figures.fig17_cache": ["quick", "jobs"],
    "launchers.figures.sensitivity": ["quick", "workdir"],
    "launchers.bench.engine": ["slots", "lanes", "dtype", "repeats"],
    "launchers.bench.learner": ["rows", "length", "repeats"],
    "launchers.bench.sandbox": ["alive", "repeats", "think_s", "clones"],
    "launchers.bench.scheduler": ["sizes", "events", "policy"],
    "launchers.bench.soak": ["minutes", "seed"],
}
VALUES = [
    *("", " ", "0", "1", "-1", "2", "nan", "inf", "-inf", "1e400", "1e-400", "0.5", "True", "None", "[]", "()", "(1,)"),
    *(
        "(0,)",
        "(-1,)",
        "(3, 2)",
        "(1, 'a')",
        "(1, None)",
        "(nan,)",
        "{}",
        "x",
        "a b",
        "é",
        "\udc80",
        "../..",
        "/dev/null",
    ),
    *(
        str(2**31),
        str(2**63),
        str(10**30),
        "9" * 5000,
        "/etc/passwd",
        "http://",
        "http://[",
        "http://a:99999",
        "'",
        "(",
        "x" * 300,
    ),
]
ANYTHING = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    10**400,
    0.5,
    -0.5,
    math.nan,
    math.inf,
    "",
    "x",
    [],
    [1],
    [0],
    ["x"],
]
ANYTHING += [[1, None], [[1]], [2, 1], [math.nan], {}, {"x": 1}, [True], 1e-9, "tiny", "hf", "repair", "\ud800", "a\0b"]

# What an accepted configuration is, said once more in other words than configs/limits.py has.
MEANT = {
    "seed": lambda v: v >= 0,
    "steps": lambda v: v >= 1,
    "max_minutes": lambda v: v >= 0,
    "group_size": lambda v: v >= 2,
    "batch_groups": lambda v: v >= 1,
    "async_factor": lambda v: v >= 1,
    "max_refills": lambda v: v >= 0,
    "max_failed_groups": lambda v: v >= 0,
    "model.checkpoint": lambda v: bool(v.strip()),
    "env.name": lambda v: v in ("repair", "bash"),
    "env.train_tasks": lambda v: v >= 1,
    "env.heldout_tasks": lambda v: v >= 1,
    "env.seed": lambda v: v >= 0,
    "env.max_turns": lambda v: v >= 1,
    "env.command_s": lambda v: v > 0,
    "sandbox.max_sandboxes": lambda v: v >= 1,
    "scheduler.name": lambda v: v.replace("_", "").isalpha(),
    "rollout.temperature": lambda v: v > 0,
    "rollout.max_tokens": lambda v: v >= 1,
    "rollout.env_s": lambda v: v > 0,
    "rollout.workers": lambda v: v >= 1,
    "rollout.addresses": lambda v: all(re.match(r"https?://\S", address) for address in v),
    "rollout.slots": lambda v: v >= 1,
    "rollout.decode_rows": lambda v: v == sorted(set(v)) and all(n > 0 for n in v),
    "rollout.prefill_rows": lambda v: v and v == sorted(set(v)) and all(n > 0 for n in v),
    "rollout.prefill_tokens": lambda v: v and v == sorted(set(v)) and all(n > 0 for n in v),
    "rollout.read_lengths": lambda v: v == sorted(set(v)) and all(n > 0 for n in v),
    "rollout.page": lambda v: v >= 1,
    "rollout.stall_s": lambda v: v > 0,
    "learner.objective": lambda v: v == "grpo",
    "learner.clip_low": lambda v: 0 <= v <= 1,
    "learner.clip_high": lambda v: v >= 0,
    "learner.learning_rate": lambda v: 0 <= v <= 10,
    "learner.weight_decay": lambda v: v >= 0,
    "learner.b1": lambda v: 0 <= v < 1,
    "learner.b2": lambda v: 0 <= v < 1,
    "learner.clip_norm": lambda v: v > 0,
    "learner.final_fraction": lambda v: 0 <= v <= 1,
    "learner.mesh": lambda v: len(v) == 3 and all(n == -1 or n >= 1 for n in v),
    "eval.every": lambda v: v >= 0,
    "eval.tasks": lambda v: v >= 1,
    "eval.temperature": lambda v: v >= 0,
    "checkpoint.every": lambda v: v >= 0,
    "checkpoint.keep": lambda v: v >= 0,
}


def fields(config, where="") -> dict[str, object]:
    """Value by dotted name."""
    found = {}
    for name, value in config.items():
        if hasattr(value, "items"):
            found |= fields(value, f"{where}{name}.")
        else:
            found[f"{where}{name}"] = value
    return found


FIELDS = fields(base.get_config())
NUMBERS = [name for name, value in FIELDS.items() if isinstance(value, (int, float)) and not isinstance(value, bool)]


def no_constant(name: str):
    raise AssertionError(f"{name} in an accepted configuration")


def check_meant(text: str) -> None:
    """An accepted configuration means something."""
    accepted = fields(json.loads(text, parse_constant=no_constant))
    assert set(accepted) == set(FIELDS)
    defaults = fields(quickstart.get_config())
    for name, value in accepted.items():
        kind = type(defaults[name]) if name in defaults else type(value)
        assert isinstance(value, {tuple: list, float: (int, float)}.get(kind, kind)), f"{name}={value!r}"
        assert kind is bool or not isinstance(value, bool), f"{name}={value!r}"
        assert name not in MEANT or MEANT[name](value), f"{name}={value!r}"
        assert isinstance(value, (str, list)) or abs(value) <= 2**40, f"{name}={value!r}"
    assert accepted["learner.row_length"] >= accepted["rollout.max_length"] > accepted["rollout.max_tokens"]
    assert accepted["eval.tasks"] <= accepted["env.heldout_tasks"]
    assert accepted["batch_groups"] <= accepted["env.train_tasks"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files that configurations can be: good, damaged and of another kind."""
    path = tmp_path_factory.mktemp("fuzz")
    files = {
        "any.py": (
            "import json\nfrom configs import quickstart\n"
            "def get_config(arg='{}'):\n"
            "    c = quickstart.get_config()\n"
            "    with c.unlocked(), c.ignore_type():\n"
            "        for name, value in json.loads(arg).items():\n"
            "            *groups, last = name.split('.')\n"
            "            inner = c\n"
            "            for group in groups:\n"
            "                inner = inner[group]\n"
            "            with inner.unlocked(), inner.ignore_type():\n"
            "                inner[last] = tuple(value) if isinstance(value, list) else value\n"
            "    return c\n"
        ),
        "syntax.py": "def get_config(:\n",
        "none.py": "def get_config():\n    pass\n",
        "dict.py": "def get_config():\n    return {'steps': 3}\n",
        "number.py": "def get_config():\n    return 3\n",
        "without.py": "steps = 3\n",
        "raises.py": "def get_config():\n    return {}['learner']\n",
        "types.py": "def get_config():\n    return 1 + 'a'\n",
        "import.py": "import nothing_of_that_name\n",
        "exits.py": "raise RuntimeError('line one\\nline two')\n",
        "removed.py": (
            "from configs import base\ndef get_config():\n    c = base.get_config()\n    c.rollout.keep_kv = True\n"
            "    return c\n"
        ),
        "empty.py": "",
        "half.toml": "name = 'x'\nsetup = [",
        "list.toml": "name = ['x']\nsetup = 3\n",
    }
    for name, text in files.items():
        (path / name).write_text(text)
    (path / "binary.py").write_bytes(bytes(range(256)))
    good = json.dumps(quickstart.get_config("smoke").to_dict(), indent=2).encode()
    rng = random.Random(3)
    for i in range(30):
        (path / f"run{i}").mkdir()
        data = bytearray(good[: rng.randrange(len(good))]) if i % 3 == 0 else bytearray(good)
        if i % 3 == 1:
            data[rng.randrange(len(data))] = rng.randrange(256)
        if i % 3 == 2:
            state = json.loads(good)
            name = rng.choice(list(FIELDS)).split(".")
            inner = state if len(name) == 1 else state[name[0]]
            inner[name[-1]] = rng.choice(ANYTHING)
            data = bytearray(json.dumps(state).encode())
        (path / f"run{i}" / "config.json").write_bytes(bytes(data))
    return path


def config_case(rng: random.Random, folder) -> tuple[str, list[str]]:
    """A program that takes --config, with a wrong or a right configuration."""
    module = rng.choices(WITH_CONFIG, (8, 1, 1, 1))[0]
    kind = rng.random()
    if kind < 0.45:  # overrides on the command line
        config = rng.choice(["configs/quickstart.py", "configs/quickstart.py:smoke", "configs/smollm2_bash.py"])
        names = rng.choices(
            [*FIELDS, "learner", "rollout", "nothing", "learner.nothing", "seed.x", "rollout.keep_kv"],
            k=rng.choice([1, 2]),
        )
        arguments = [f"--config={config}", *(f"--config.{name}={rng.choice(VALUES)}" for name in names)]
    elif kind < 0.85:  # a file of one's own
        chosen = rng.choices([*FIELDS, "nothing", "learner"], k=rng.choice([1, 1, 2]))
        given = json.dumps({name: rng.choice(ANYTHING) for name in chosen})
        arguments = [f"--config={folder}/any.py:{given}"]
    else:
        file = rng.choice(
            [*(str(p) for p in folder.iterdir()), "/nowhere.py", "", "configs/quickstart.py:x", "configs/base.py:"]
        )
        arguments = [f"--config={file}", *rng.choice([[], ["--config.steps=3"], ["--config.learner.x=1"]])]
    if module == TRAIN and rng.random() < 0.3:
        arguments.append(f"--workdir={rng.choice([*VALUES, f'{folder}/any.py', f'{folder}/any.py/run', 'a' * 5000])}")
    if rng.random() < 0.1:
        arguments.insert(
            rng.randrange(len(arguments) + 1),
            rng.choice(["--nothing", "extra", "--config.steps", "--", "-", "--flagfile=/x"]),
        )
    return module, arguments


def other_case(rng: random.Random, folder) -> tuple[str, list[str]]:
    """Another program, with a flag or two that are wrong, most of the time."""
    module = rng.choice(list(OTHERS))
    arguments = [f"--{name}={rng.choice(VALUES)}" for name in rng.choices(OTHERS[module], k=rng.choice([1, 1, 2]))]
    match module:
        case "launchers.evaluate":
            arguments.append(f"--workdir={folder}/run{rng.randrange(30)}")
        case "launchers.export":  # of a flag that is given twice the last one counts
            right = [f"--workdir={folder}/run{rng.randrange(30)}", f"--out={folder}/out"]
            arguments = rng.choice([right, right[1:] + arguments, right + arguments])
        case "launchers.template":
            path = rng.choice([str(p) for p in folder.iterdir()] + ["/nowhere"])
            arguments += rng.choice([["build", path], ["build"], ["inspect", "x"], ["delete", "../x"], ["nothing"], []])
            arguments.append(f"--store={folder}/store")
        case "launchers.install":
            arguments += ["nothing"]
        case _ if rng.random() < 0.2:
            arguments.append(rng.choice(["--nothing=1", "extra", "--" + OTHERS[module][0]]))
    return module, arguments


def describe(case) -> str:
    return f"{case[0]} {[a if len(a) < 200 else a[:200] + '...' for a in case[1]]}"


def named(arguments: list[str], line: str) -> bool:
    """Whether an error names a flag that was given, an argument, or a flag that has to be given."""
    names = {re.match(r"--?([\w.]+)", a)[1] for a in arguments if re.match(r"--?[\w.]", a)}
    rest = {a for a in arguments if not a.startswith("--")}
    if any(re.search(rf"(--|flag '|config\.){re.escape(name)}(?![\w.])", line) for name in names):
        return True
    return any(repr(a) in line for a in rest) or bool(re.search(r"Flag --\w+ must have a value", line))


def wrong(case, code: int, output: str) -> str | None:
    """What is wrong with how a case ended; None where nothing is."""
    if "Traceback" in output:
        return "a traceback"
    if ACCEPTED in output:
        _, _, text = output.partition(ACCEPTED)
        try:
            if text.strip():
                check_meant(text)
        except AssertionError as error:
            return f"accepted: {error}"
        return None if code == 0 else "accepted, and then another exit code"
    if code == 0:  # nothing to list, or a template without a set-up
        return None if case[0] == "launchers.template" else "neither accepted nor refused"
    lines = [line for line in output.splitlines() if line.strip()]
    if code != 1 or len(lines) != 1:
        return "not one line"
    if lines[0].startswith("FlagError: ") and not named(case[1], lines[0]):
        return "names no flag that was given"
    words = "config|--|/|trace|seed|learner|rollout|model|env|scheduler|nothing|usage"
    return None if re.search(rf"^(\w*Error|\w+Unsupported): .*({words})", lines[0]) else "names no field and no file"


@pytest.mark.timeout(300)
def test_a_thousand_random_configurations_and_command_lines(folder, forked):
    rng = random.Random(16)
    cases = [config_case(rng, folder) for _ in range(760)] + [other_case(rng, folder) for _ in range(240)]
    answers = forked.run_all(cases)
    found = [
        f"{what}: {describe(case)}: {code}: {output[-1500:]}"
        for case, (code, output) in zip(cases, answers, strict=True)
        if (what := wrong(case, code, output))
    ]
    assert not found, f"{len(found)} of {len(cases)}:\n" + "\n".join(found[:20])
    assert sum(ACCEPTED in output for _, output in answers) > 30  # it is not that everything is refused


def test_a_number_that_is_none_is_refused_by_name():
    """Also where a configuration's own code puts it past the flags."""
    for field in NUMBERS:
        for value in (math.nan, math.inf, -math.inf, -1.5, -(10**30), 10**400, True, None, "1", [1], (1,), {}):
            if isinstance(FIELDS[field], float) and value in (10**400, True):
                continue  # ml_collections itself cannot hold the one, and makes 1.0 of the other
            config = quickstart.get_config()
            inner = config
            *groups, name = field.split(".")
            for group in groups:
                inner = inner[group]
            with inner.unlocked(), inner.ignore_type():
                inner[name] = value
            with pytest.raises(ConfigError) as refused:
                check_config(config)
                pytest.fail(f"{field}={value!r} was accepted")
            assert re.match(rf"config\.{re.escape(field)}( is|=)", str(refused.value)), f"{field}={value!r}"


def test_every_default_is_within_its_limit_and_every_limit_is_of_a_field():
    for field, default in FIELDS.items():
        limit = limits.RUN.get(field, limits.of_kind(default))
        assert limit.wrong(default) is None, field
    assert set(limits.RUN) <= set(FIELDS)
    made = fields(warmstart.get_config())
    assert set(limits.WARMSTART) <= set(made)
    assert all(limits.WARMSTART.get(field, limits.of_kind(value)).wrong(value) is None for field, value in made.items())
