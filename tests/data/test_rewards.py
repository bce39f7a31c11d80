"""Rewards by rows: what each of ours gives, what ``prepare`` refuses, and what a reward of one's own may not do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertune.data import prepare as conversations
from clustertune.data import rewards as rewards_module
from clustertune.data.rewards import Rewards, lacking
from clustertune.data.sequences import find_blind, read_prompts
from clustertune.manifest import read_manifest
from clustertune.recipe.sections import Data, Reward
from clustertune.resolve.resolve import resolve
from tests.command import REPO, run
from tests.refusal import problems
from tests.slurm import wait_for

NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
TWO = {
    "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
    "kwargs": '[{}, {"relation": "at least", "num_words": 3}]',
}
BETWEEN = {"function": "length", "min": 2, "max": 4}
OBJECT = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
ENDLESS = {"function": "regex", "pattern": r"(a|a)*$"}


@pytest.fixture(scope="module")
def ours() -> Iterator[Rewards]:
    with Rewards([Reward(function="ifeval")], {}) as found:
        yield found


def judged(reward: Any, answer: str, row: dict[str, Any]) -> float | None:
    with Rewards([Reward.model_validate(reward)], {}) as found:
        return found.judge([[{"role": "user", "content": "q"}]], [answer], [row])[0][0]


@pytest.mark.parametrize(
    ("row", "answer", "worth"),
    [(NO_COMMA, "one two", 1.0), (NO_COMMA, "one, two", 0.0), (NO_COMMA, " ", 0.0), (TWO, "one two three", 1.0),
     (TWO, "one two", 0.5), (TWO, "one, two", 0.0)],
)  # fmt: skip
def test_ifeval_is_the_share_of_instructions_followed(ours: Rewards, row: dict[str, Any], answer: str, worth: float) -> None:
    assert ours.judge([[{"role": "user", "content": "q"}]], [answer], [row]) == [[worth]]


@pytest.mark.parametrize(
    ("reward", "row", "answer", "worth"),
    [
        ("exact_match", {"answer": "42"}, " 42\n", 1.0),
        ("exact_match", {"answer": 42}, "it is 42", 0.0),
        ({"function": "exact_match", "extract": r"#### (\d+)"}, {"answer": "7"}, "#### 5, no: #### 7", 1.0),
        ({"function": "exact_match", "extract": r"\d+"}, {"answer": "7"}, "none", 0.0),
        ({"function": "exact_match", "column": "solution"}, {"solution": "x"}, "x", 1.0),
        ({"function": "regex", "pattern": "^Dear "}, {}, "Dear reader", 1.0),
        ("regex", {"pattern": r"\bcat\b"}, "category", 0.0),
        ("json_schema", {"schema": OBJECT}, '{"a": 1}', 1.0),
        ("json_schema", {"schema": json.dumps(OBJECT)}, '```json\n{"a": 1}\n```', 1.0),
        ({"function": "json_schema", "schema": OBJECT}, {}, '{"a": "1"}', 0.0),
        ("json_schema", {"schema": OBJECT}, "{", 0.0),
        (BETWEEN, {}, "one", 0.5),
        (BETWEEN, {}, "one two three", 1.0),
        (BETWEEN, {}, "one two three four five six seven eight", 0.5),
        ({"function": "length", "max": 4, "unit": "characters"}, {}, "one two three"[:8], 0.5),
    ],
)  # fmt: skip
def test_what_an_answer_is_worth(reward: Any, row: dict[str, Any], answer: str, worth: float) -> None:
    assert judged(reward, answer, row) == worth


def test_a_pattern_without_an_end_costs_its_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards_module, "SECONDS", 0.2)
    with Rewards([Reward.model_validate(ENDLESS)], {}) as found:
        prompt = [[{"role": "user", "content": "q"}]] * 2
        assert found.judge(prompt, ["a" * 60 + "b", "aaa"], [{}, {}]) == [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("reward", "row", "column"),
    [
        ("ifeval", {}, "instruction_id_list"),
        ("ifeval", {"instruction_id_list": ["punctuation:no_comma"]}, "kwargs"),
        ("ifeval", {"instruction_id_list": ["punctuation:no_commas"], "kwargs": [{}]}, "instruction_id_list"),
        ("ifeval", {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": []}]}, "kwargs"),
        ("ifeval", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"num_words": 3}]}, "kwargs"),
        ("ifeval", {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}, "kwargs"),
        ("exact_match", {"solution": "x"}, "answer"),
        ("regex", {"pattern": "("}, "pattern"),
        ("json_schema", {"schema": {"type": "number of things"}}, "schema"),
        ("mine:own", {"completions": 1}, "completions"),
    ],
)
def test_a_row_that_could_not_be_judged_is_named_with_its_column(reward: str, row: dict[str, Any], column: str) -> None:
    assert [name for name, _, _ in lacking(Reward(function=reward), row)] == [column]


def test_rows_that_can_be_judged_lack_nothing() -> None:
    for row in map(json.loads, (REPO / "recipes/tiny-grpo/prompts.jsonl").read_text().splitlines()):
        assert list(lacking(Reward(function="ifeval"), row)) == []
    assert list(lacking(Reward(function="ifeval"), TWO)) == []


OWN = """
def fair(completions, level, scale=1, **_):
    return [scale * len(text[-1]["content"]) if want else None for text, want in zip(completions, level)]
def late(completions, **_):
    raise KeyError("nothing here")
def short(completions, **_):
    return [1.0]
def words(completions, **_):
    return ["much"] * len(completions)
def endless(completions, **_):
    return [float("inf")] * len(completions)
"""


def test_a_reward_of_ones_own_is_called_as_trl_calls_it() -> None:
    reward = Reward.model_validate({"function": "mine:fair", "scale": 2})
    with Rewards([reward], {"mine": OWN}) as found:
        assert found.judge([[], []], ["four", "x"], [{"level": 1}, {"other": 0}]) == [[8.0, None]]
        assert [judge.__name__ for judge in found.judges] == ["fair"]


@pytest.mark.parametrize("name", ["late", "short", "words", "endless"])
def test_a_reward_that_gives_no_numbers_is_named(name: str) -> None:
    with Rewards([Reward(function=f"mine:{name}")], {"mine": OWN}) as found:
        (problem,) = problems(found.judge, [[], []], ["a", "b"], [{}, {}])
    assert name in problem.message and problem.file == "mine.py"


def test_code_that_does_not_run_is_named_with_its_line() -> None:
    (problem,) = problems(Rewards, [Reward(function="mine:f")], {"mine": "x = 1\ny = 1 / 0\n"})
    assert "line 2" in problem.message


WAITS = """
import asyncio
lock = asyncio.Lock()
async def f(completions, **_):
    async with lock:  # belongs to the loop of the first call
        await asyncio.sleep(0)
    return [float(len(text[-1]["content"])) for text in completions]
async def g(completions, **_):
    await asyncio.sleep(0)
    raise KeyError("nothing here")
"""


def test_a_reward_that_waits_is_awaited_as_trl_does() -> None:
    with Rewards([Reward(function="mine:f")], {"mine": WAITS}) as found:
        for _ in range(2):
            assert found.judge([[], []], ["a", "four"], [{}, {}]) == [[1.0, 4.0]]
    with Rewards([Reward(function="mine:g")], {"mine": WAITS}) as found:
        (problem,) = problems(found.judge, [[]], ["a"], [{}])
    assert "KeyError" in problem.message and "line 10" in problem.message


def test_a_reward_imports_what_lies_beside_it(tmp_path: Path) -> None:
    """Its text is the run's as the reward's own is: another text is another run. What nothing imports is none of it."""
    for name in ("_base", "tiny-grpo", "tiny-oasst2"):
        shutil.copytree(REPO / "recipes" / name, tmp_path / name)
    folder = tmp_path / "tiny-grpo"
    texts = {
        "rewards": "import near\nasync def letters(completions, **_):\n    return [near.size('abc')] * len(completions)\n",
        "near": "from far import size\nimport rewards\n",
        "far": "def size(text):\n    return float(len(text))\n",
        "other": "def (",
    }
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    made = resolve(str(folder), ["reward=['rewards:letters']"])
    assert made.reward_code == {name: texts[name] for name in ("rewards", "near", "far")}
    with Rewards(made.recipe.reward or (), made.reward_code) as found:
        assert found.judge([[]], ["a"], [{}]) == [[3.0]]
    (folder / "far.py").write_text(texts["far"] + "MORE = 1\n")
    assert resolve(str(folder), ["reward=['rewards:letters']"]).fingerprint() != made.fingerprint()
    (folder / "far.py").chmod(0o646)
    (problem,) = problems(resolve, str(folder), ["reward=['rewards:letters']"])
    assert str(problem.file).endswith("far.py") and "write" in problem.message


BAD = {
    "exits": "def f(**_):\n    import sys\n    sys.exit(0)",
    "exits-at-once": "def f(**_):\n    import os\n    os._exit(0)",
    "kills": "def f(**_):\n    import os\n    os.kill(os.getpid(), 9)",
    "interrupt": "def f(**_):\n    raise KeyboardInterrupt",
    "base": "class Mine(BaseException):\n    pass\ndef f(**_):\n    raise Mine",
    "silent": "class Mine(Exception):\n    def __str__(self):\n        raise SystemExit(0)\ndef f(**_):\n    raise Mine",
    "recursion": "def f(**_):\n    return f()",
    "float": "class F:\n    def __float__(self):\n        raise SystemExit(0)\ndef f(completions, **_):\n    return [F()] * 2",
    "iter": "class L:\n    def __iter__(self):\n        raise GeneratorExit\ndef f(**_):\n    return L()",
    "endless": "import itertools\ndef f(**_):\n    return itertools.count()",
    "huge": "def f(completions, **_):\n    return [10**400, 0]",
    "nan": "def f(completions, **_):\n    return [float('nan'), 0]",
    "text": "def f(completions, **_):\n    return '12'",
    "longer": "def f(completions, **_):\n    return [1.0] * 3",
    "none": "def f(completions, **_):\n    pass",
    "clears": "def f(completions, **_):\n    completions.clear()\n    return [1.0, 2.0]",
    "rewrites": "def f(completions, level, **_):\n    level[0] = completions[0][0]['content'] = 'x'\n    return [1.0, 2.0]",
    "sleeps": "import time\ndef f(**_):\n    time.sleep(1e6)",
    "computes": "def f(**_):\n    while True:\n        pass",
    "waits": "def f(**_):\n    while True:\n        try:\n            input()\n        except BaseException:\n            pass",
}


@pytest.mark.parametrize("form", BAD)
def test_whatever_a_reward_does_is_one_message_that_names_it(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards_module, "CALL_SECONDS", 2.0)
    monkeypatch.setattr(rewards_module, "SECONDS", 0.1)
    with Rewards([Reward(function="mine:f")], {"mine": BAD[form]}) as found:
        (problem,) = problems(found.judge, [[], []], ["a", "b"], [{"level": 1}, {"level": 2}])
    assert problem.file == "mine.py" and "reward f" in problem.message
    if form not in ("exits-at-once", "kills", "sleeps", "computes", "waits"):  # of these nobody knows a line
        assert "line " in problem.message


@pytest.mark.parametrize(
    "code", ["import sys\nsys.exit(0)", "import os\nos._exit(0)", "raise KeyboardInterrupt", "while True: pass"]
)
def test_a_file_of_rewards_that_does_not_load_is_named(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards_module, "LOAD_SECONDS", 2.0)
    (problem,) = problems(Rewards, [Reward(function="mine:f")], {"mine": f"{code}\ndef f(**_):\n    return [1.0]\n"})
    assert problem.file == "mine.py"


def test_a_reward_has_no_token_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["HF_TOKEN", "WANDB_API_KEY", "VLLM_API_KEY", "HUGGING_FACE_HUB_TOKEN"]
    for name in names:
        monkeypatch.setenv(name, "hf_secret")
    code = "import os\ndef f(completions, **_):\n    return [float('hf_secret' in os.environ.values())]"
    with Rewards([Reward(function="mine:f")], {"mine": code}) as found:
        assert found.judge([[]], ["a"], [{}]) == [[0.0]]


DAEMON = """
import os, subprocess, sys
def f(completions, mark, **_):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", mark[0]])
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", mark[0]])
        os._exit(0)
    return [1.0]
"""


def marked(mark: str) -> list[int]:
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if mark.encode() in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_what_a_reward_starts_ends_with_the_rewards(tmp_path: Path) -> None:
    """A daemon in a session of its own, too."""
    mark = f"mark-of-{tmp_path.name}"
    with Rewards([Reward(function="mine:f")], {"mine": DAEMON}) as found:
        assert found.judge([[]], ["a"], [{"mark": mark}]) == [[1.0]]
        wait_for(lambda: len(marked(mark)) == 2, "both", 20)
    wait_for(lambda: not marked(mark), "the end of both", 20)


def test_what_a_reward_starts_ends_with_a_killed_run(tmp_path: Path) -> None:
    mark, folder = f"mark-of-{tmp_path.name}", tmp_path / "code.py"
    folder.write_text(DAEMON)
    code = (
        "import sys, time; from pathlib import Path; from clustertune.data.rewards import Rewards\n"
        "from clustertune.recipe.sections import Reward\n"
        "found = Rewards([Reward(function='mine:f')], {'mine': Path(sys.argv[1]).read_text()}).__enter__()\n"
        f"found.judge([[]], ['a'], [{{'mark': {mark!r}}}]); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)]) as child:
        try:
            wait_for(lambda: len(marked(mark)) > 2, "both, beside the run itself", 60)
        finally:
            child.kill()
    wait_for(lambda: not marked(mark), "the end of all", 20)


def test_a_file_of_rewards_that_others_could_have_written_is_not_run(tmp_path: Path) -> None:
    recipe = shutil.copytree(REPO / "recipes" / "tiny-grpo", tmp_path / "recipe")
    own = recipe / "rewards.py"
    assert resolve(str(recipe), []).reward_code
    own.chmod(0o646)
    assert "write" in str(problems(resolve, str(recipe), []))
    own.chmod(0o644)
    own.rename(tmp_path / "elsewhere.py")
    own.symlink_to(tmp_path / "elsewhere.py")
    assert "link" in str(problems(resolve, str(recipe), []))
    if os.geteuid() == 0:
        own.unlink()
        shutil.copy(tmp_path / "elsewhere.py", own)
        os.chown(own, 12345, 12345)
        monkey = os.stat(own).st_uid  # noqa: PTH116
        assert str(monkey) in str(problems(resolve, str(recipe), []))


def test_metrics_that_a_reward_logs_reach_the_trainer() -> None:
    code = (
        "def f(completions, log_metric, log_extra, **_):\n    log_metric('m', 2.0)\n    log_extra('c', ['x'])\n    return [1.0]"
    )
    seen = list[Any]()
    with Rewards([Reward(function="mine:f")], {"mine": code}) as found:
        more = {name: lambda *args, name=name: seen.append((name, *args)) for name in ("log_metric", "log_extra")}
        found.judges[0](prompts=[[]], completions=[[]], columns=[{}], **more)
    assert seen == [("log_metric", "m", 2.0), ("log_extra", "c", ["x"])]


# --- prepare --------------------------------------------------------------------------------------------------------------


def made(tmp_path: Path, rows: list[dict[str, Any]], **more: Any) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = Data(name="d", input="rows.jsonl", format="prompt", **more)
    conversations.prepare(data, recipe_folder=tmp_path, seed=1, out=tmp_path / "data")
    return tmp_path / "data"


def test_columns_of_rewards_are_kept_as_they_are(tmp_path: Path) -> None:
    """Arrow would give each mapping the keys of all others, and lists one type."""
    rows = [{"prompt": "a", "kwargs": [{"x": 1}, {"y": "z"}], "source": "mine", "text": [1, "b"]}, {"prompt": "b", "level": 2}]
    out = made(tmp_path, rows, eval_fraction=0.5)
    found = {row["prompt"][-1]["content"]: row["columns"] for split in ("train", "eval") for row in read_prompts(out, split)}
    assert found == {row["prompt"]: {key: row[key] for key in row if key != "prompt"} for row in rows}
    assert read_manifest(out).meta["unused"] == []


def test_every_kind_of_instruction_is_held_out_alike(tmp_path: Path) -> None:
    rows = [{"prompt": f"{kind} {n}", "instruction_id_list": [kind], "kwargs": [{}]} for kind in "abcd" for n in range(10)]
    held = [row["columns"]["instruction_id_list"][0] for row in read_prompts(made(tmp_path, rows, eval_fraction=0.2), "eval")]
    assert sorted(held) == ["a", "a", "b", "b", "c", "c", "d", "d"]


def test_a_reward_that_tells_nothing_apart_is_refused(tmp_path: Path) -> None:
    """The good answers of these rows are no better by it than nothing at all."""
    rows = [{"prompt": f"q{n}", "columns": {"reference": f"good answer {n}", "answer": "yes"}} for n in range(6)]
    for reward, blind in [
        ({"function": "regex", "pattern": ".*"}, True),
        ({"function": "regex", "pattern": "good"}, False),
        ("exact_match", False),
        ({"function": "length", "min": 3}, False),
        ({"function": "length", "max": 3}, True),
    ]:
        with Rewards([Reward.model_validate(reward)], {}) as found:
            assert bool(list(find_blind(rows, found))) == blind, reward


def test_all_of_it_is_refused_at_once_with_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": f"Say {n}. " + "word " * (400 if n == 2 else 1)} | (NO_COMMA if n else {})) + "\n"
                for n in range(6))
    )  # fmt: skip
    done = run(
        "prepare", "recipes/tiny-grpo", f"data.input={tmp_path / 'prompts.jsonl'}", "--out", tmp_path / "out",
        "reward=[ifeval]", "data.limit=null", "train.max_prompt_length=64", "train.global_batch_size=32", stack=True,
    )  # fmt: skip
    assert done.code != 0
    rows = ("prompts.jsonl:1", "instruction_id_list", "prompts.jsonl:3")
    for text in (*rows, "train.max_prompt_length=", "train.num_generations"):
        assert text in done.err, done.err


def test_the_schema_takes_names_and_sections() -> None:
    with pytest.raises(ValueError, match="takes"):
        Reward.model_validate({"function": "regex", "max": 3})
    with pytest.raises(ValueError, match="module:function"):
        Reward.model_validate("ifevals")
    assert Reward.model_validate("ifeval").weight == 1.0


ORDINARY = """
from __future__ import annotations
import logging
from dataclasses import dataclass
import numpy as np
logger = logging.getLogger(__name__)

@dataclass
class Scored:
    value: float

def reward(completions, log_metric=None, log_extra=None, **kwargs):
    print("asked")
    logger.warning("asked")
    scores = np.array([len(one[-1]["content"]) for one in completions], dtype=np.float32)
    log_metric("mean", scores.mean())
    log_extra("scores", scores)
    log_extra("each", list(scores))
    return [Scored(score).value if score > 1 else None for score in scores]
"""


def test_what_rewards_are_written_with_works() -> None:
    """numpy's numbers in what is returned and logged, a dataclass, a log, rows that do not apply, columns that are not read."""
    logged = list[Any]()
    with Rewards([Reward(function="mine:reward")], {"mine": ORDINARY}) as found:
        returned = found.judges[0](
            prompts=["q", "q"],
            completions=[[{"role": "assistant", "content": text}] for text in ("abc", "d")],
            columns=[{"answer": float("nan")}, {"answer": 1}],
            completion_ids=[[1], [2]],
            log_metric=lambda *given: logged.append(given),
            log_extra=lambda *given: logged.append(given),
        )
    assert returned == [3.0, None]
    assert logged == [("mean", 2.0), ("scores", [3.0, 1.0]), ("each", [3.0, 1.0])]
