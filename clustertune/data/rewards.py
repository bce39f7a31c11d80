"""Rewards of a model's answers: ours, from 0 to 1, and those that a recipe brings as Python functions; and the rules of ours.

Ours run what others wrote (patterns and schemas of a data set, lm-eval's checkers with a row's keywords) on what a model
wrote. They do so in a child with a limit of time for each answer: a pattern that goes back again and again would hold up all
ranks. Own prompts are evaluated by the same rules.

IFEval's rules count sentences. NLTK's English sentence splitter is shipped in ``nltk_data/``: the official parameters, so that
scores are the official ones. lm-eval downloads ``punkt_tab`` when its scorer is imported; without a network it continues and
fails after the last prompt (EleutherAI/lm-evaluation-harness#2266). Here the data is there before the import.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import re
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from clustertune.bounded import StandingChild, allow
from clustertune.console import say
from clustertune.data import reward_process
from clustertune.data.rendering import NO_THOUGHT, Thought, special_marks
from clustertune.data.tokenizer import thought_of
from clustertune.errors import ExitCode, Problem, UserError
from clustertune.recipe.layers import did_you_mean
from clustertune.recipe.sections import Reward
from clustertune.rundir import ROLLOUT_SERVERS
from clustertune.secrets import ACCOUNT_KEYS, KNOWN

NLTK_DATA = Path(__file__).with_name("nltk_data")
"""Its NOTICE says where the parameters are from."""
SECONDS = 5.0
"""Of CPU for one answer. It is then worth 0."""
TRIES = 3
"""Of an answer whose child was killed before its time was over: by the kernel for memory, or by hand."""
CALL_SECONDS = 60.0
"""For one call of a recipe's own reward, and as many as :data:`SECONDS` more for each answer."""
LOAD_SECONDS = 180.0
"""Until a recipe's own file has been imported: it may import torch from slow storage."""
END_SECONDS = 15.0
"""Until a recipe's own rewards and all that they have started have ended."""
REPLY_BYTES = 64 << 20
_WITHHELD = {*KNOWN, *ACCOUNT_KEYS, "VLLM_API_KEY", ROLLOUT_SERVERS}
"""Variables that a recipe's own rewards do not get."""
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What TRL gives a reward function beside the columns of the data."""
PACKAGES = {"ifeval": "lm_eval", "json_schema": "jsonschema"}
"""What some of ours need that not every training has."""
Judge = Callable[..., list[float | None]]
"""A reward function of TRL's form: ``prompts``, ``completions`` and columns as keyword arguments, a reward for each answer."""


# --- rules that an answer keeps or not -------------------------------------------------------------------------------------


def is_equal(answer: str, expected: Any) -> bool:
    """Whether both have the same words, white space aside."""
    return answer.split() == str(expected).split()


def fits_schema(answer: str, schema: Any) -> bool:
    """Whether the answer is JSON, with or without a Markdown fence around it, and valid by the schema.

    Nothing is fetched for a ``$ref``. Answer and schema are foreign: to be called in a child with a limit of time. Raises an
    error of jsonschema or referencing where the schema refers to nothing.
    """
    import jsonschema
    import referencing

    parsed = as_value(schema)
    fenced = re.fullmatch(r"\s*```(?:json)?\n(.*)\n```\s*", answer, re.DOTALL)
    try:
        value = json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError):
        return False
    kind = jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator)
    return bool(kind(parsed, registry=referencing.Registry()).is_valid(value))


def wrong_pattern(pattern: Any) -> str | None:
    """What is wrong with a regular expression; None: nothing."""
    try:
        re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        return f"is not a regular expression of Python's re: {error}"
    return None


def wrong_schema(schema: Any) -> str | None:
    """What is wrong with a JSON schema, or a text that holds one; None: nothing."""
    import jsonschema

    try:
        parsed = as_value(schema)
        jsonschema.validators.validator_for(parsed, default=jsonschema.Draft202012Validator).check_schema(parsed)
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {error}"
    except (jsonschema.SchemaError, AttributeError, TypeError) as error:
        return f"is no JSON schema: {str(error).partition(chr(10))[0]}"
    return None


def as_value(value: Any) -> Any:
    """A value of JSON, or a text that holds one, as tables have it."""
    return json.loads(value) if isinstance(value, str) else value


def use_shipped_punkt() -> None:
    """Make NLTK find the shipped parameters before any others, in this process and those that it forks."""
    import nltk

    if str(NLTK_DATA) not in nltk.data.path[:1]:
        nltk.data.path.insert(0, str(NLTK_DATA))


# --- ours: of one answer --------------------------------------------------------------------------------------------------


def _ifeval(text: str, row: Mapping[str, Any], prompt: str, _told: Mapping[str, Any]) -> float:
    """Share of the prompt's instructions that the answer follows, by lm-eval's strict checkers."""
    from lm_eval.tasks.ifeval.utils import InputExample, test_instruction_following_strict

    names, arguments = as_value(row["instruction_id_list"]), as_value(row["kwargs"])
    followed = test_instruction_following_strict(InputExample(0, names, prompt, arguments), text).follow_instruction_list
    return float(sum(followed) / len(followed))


def _exact_match(text: str, row: Mapping[str, Any], _prompt: str, told: Mapping[str, Any]) -> float:
    """Whether the answer is the row's, white space aside; with ``extract``, the last thing in it that the pattern finds."""
    if (pattern := told.get("extract")) is not None:
        places = list(re.finditer(pattern, text))
        if not places:
            return 0.0
        text = places[-1][places[-1].re.groups and 1] or ""
    return float(is_equal(text, row[told.get("column", "answer")]))


def _regex(text: str, row: Mapping[str, Any], _prompt: str, told: Mapping[str, Any]) -> float:
    """Whether the pattern is found in the answer (``re.search``)."""
    pattern = told["pattern"] if "pattern" in told else row[told.get("column", "pattern")]
    return float(re.search(pattern, text) is not None)


def _json_schema(text: str, row: Mapping[str, Any], _prompt: str, told: Mapping[str, Any]) -> float:
    """Whether the answer is JSON and valid by the schema."""
    return float(fits_schema(text, told["schema"] if "schema" in told else row[told.get("column", "schema")]))


def _length(text: str, _row: Mapping[str, Any], _prompt: str, told: Mapping[str, Any]) -> float:
    """1 between ``min`` and ``max`` words (``unit: characters``); outside, the quotient of length and limit."""
    size = len(text) if told.get("unit") == "characters" else len(text.split())
    least, most = told.get("min", 0), told.get("max", math.inf)
    return size / least if size < least else most / size if size > most else 1.0


_OURS: dict[str, Callable[[str, Mapping[str, Any], str, Mapping[str, Any]], float]] = {
    "ifeval": _ifeval,
    "exact_match": _exact_match,
    "regex": _regex,
    "json_schema": _json_schema,
    "length": _length,
}


# --- what a row must have -------------------------------------------------------------------------------------------------


@cache
def _instructions() -> Mapping[str, Any]:
    """lm-eval's checkers by the names of their instructions."""
    from lm_eval.tasks.ifeval.instructions_registry import INSTRUCTION_DICT

    checkers: Mapping[str, Any] = INSTRUCTION_DICT
    return checkers


def lacking(reward: Reward, row: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """What a row's columns lack for a reward: the column, what is wrong with it, and what to do."""
    told = reward.options
    if reward.module is not None:
        for name in sorted(set(RESERVED) & row.keys()):
            yield name, f"TRL gives {reward.name} something else by this name", "data.columns gives the column another name"
    elif reward.function == "ifeval":
        yield from _lacking_instructions(row)
    elif reward.function in ("exact_match", "regex", "json_schema"):
        own = {"exact_match": "answer", "regex": "pattern", "json_schema": "schema"}[reward.function]
        if reward.function != "exact_match" and own in told:
            return
        column = str(told.get("column", own))
        if row.get(column) in (None, ""):
            fix = f"write it in the row, or name another column: {{function: {reward.function}, column: NAME}}"
            yield column, f"missing, and {reward.function} reads it", fix
        elif reward.function == "regex":
            if (fault := wrong_pattern(str(row[column]))) is not None:
                yield column, fault, None
        elif reward.function == "json_schema" and (fault := wrong_schema(row[column])) is not None:
            yield column, fault, "json-schema.org says what one is"


def _lacking_instructions(row: Mapping[str, Any]) -> Iterator[tuple[str, str, str | None]]:
    """What lm-eval's checkers would make up themselves, at random, where a row does not say it."""
    values = {}
    for column in ("instruction_id_list", "kwargs"):
        try:
            values[column] = as_value(row.get(column))
        except ValueError:
            values[column] = None
        if not isinstance(values[column], list) or not values[column]:
            fix = 'write "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], as the data set google/IFEval has it'
            yield column, "is no list, and ifeval reads it" if row.get(column) else "missing, and ifeval reads it", fix
            return
    names, arguments = values["instruction_id_list"], values["kwargs"]
    if len(names) != len(arguments) or not all(isinstance(one, dict) for one in arguments):
        text = f"{len(arguments)} entries for {len(names)} instructions"
        yield "kwargs", text, "one mapping for each instruction, {} where it needs nothing"
        return
    for name, options in zip(names, arguments, strict=True):
        if (checker := _instructions().get(str(name))) is None:
            yield "instruction_id_list", f"{name!r} is no instruction of lm-eval's", did_you_mean(str(name), _instructions())
            continue
        told = {key: value for key, value in options.items() if value}  # lm-eval takes what is 0 or empty for not given
        needed = checker(name).get_instruction_args_keys()
        if missing := [key for key in needed if key not in told]:
            text = f"{name} needs {', '.join(missing)}: a checker that is not told draws one at random"
            yield "kwargs", text, f'write {{"{missing[0]}": ...}} in its entry'
        if other := sorted(told.keys() - set(needed)):
            yield "kwargs", f"{name} takes no {', '.join(other)}", f"it takes {', '.join(needed) or 'nothing'}"


# --- all of a recipe ------------------------------------------------------------------------------------------------------


class Rewards:
    """The rewards of a recipe, ready to judge. A context: inside, ours run in one child, and the recipe's own in another.

    ``code``: the texts of the recipe's own files, by name without ``.py``. Raises UserError where one fails.
    """

    def __init__(self, rewards: Sequence[Reward], code: Mapping[str, str]) -> None:
        self.rewards = list(rewards)
        self._stack = contextlib.ExitStack()
        self._child: StandingChild | None = None
        self._late = 0
        self.beat: Callable[[], None] = lambda: None
        """Called before each answer that ours judge: a sign of life."""
        for reward in rewards:
            if (package := PACKAGES.get(reward.function)) and importlib.util.find_spec(package) is None:
                text = f"needs the Python package {package}, which is not installed"
                fix = f"install {package} in the image, or leave the reward out"
                raise UserError(Problem(text, key=f"reward.{reward.name}", fix=fix))
        self._thought: Thought = NO_THOUGHT
        self._special: re.Pattern[str] | None = None
        self._tokenizer: Any = None
        named = dict.fromkeys(reward.module for reward in rewards if reward.module is not None)
        own = OwnRewards(code, list(named), self._beat) if named else None
        if own is not None:
            self._stack.callback(own.close)
        self.judges: list[Judge] = []
        """In TRL's form, each called by the reward's name."""
        for reward in self.rewards:
            judge = self._own(reward) if own is None or reward.module is None else _theirs(reward, own)
            judge.__name__ = reward.name
            self.judges.append(judge)

    def asked_of(self, tokenizer: Any) -> None:
        """Have ours judge what follows the thought of an answer with this tokenizer, as an evaluation does; theirs get all."""
        self._thought = thought_of(tokenizer)
        self._special, self._tokenizer = special_marks(tokenizer, self._thought), tokenizer

    def _beat(self) -> None:
        self.beat()

    def __enter__(self) -> Rewards:
        if any(reward.function == "ifeval" for reward in self.rewards):
            import langdetect

            langdetect.DetectorFactory.seed = 0  # else the language of one answer is another every time
            use_shipped_punkt()
            _instructions()  # the import looks for the splitter
        if any(reward.module is None for reward in self.rewards):
            self._child = StandingChild(judge_one)
        self._stack.callback(self._end)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _end(self) -> None:
        if self._child is not None:
            self._child.close()

    def _own(self, reward: Reward) -> Judge:
        def judge(
            prompts: Sequence[Any],
            completions: Sequence[Any],
            columns: Sequence[Mapping[str, Any]],
            completion_ids: Sequence[Any] = (),
            **_: Any,
        ) -> list[float | None]:
            answers = self._judged(completions, completion_ids)
            triples = zip(prompts, answers, columns, strict=True)
            return [self._ask(reward, text_of(prompt), answer, row) for prompt, answer, row in triples]

        return judge

    def _judged(self, completions: Sequence[Any], ids: Sequence[Any]) -> list[str]:
        """The texts of completions behind their thoughts. TRL decodes without special tokens: where such mark a thought, as in
        gpt-oss, the tokens are read again."""
        if self._special is None or len(ids) != len(completions):
            return [self._thought.split("", text_of(answer))[1] for answer in completions]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=False)
        return [self._special.sub("", self._thought.split("", text)[1]) for text in texts]

    def _ask(self, reward: Reward, prompt: str, answer: str, row: Mapping[str, Any]) -> float:
        """What one answer is worth. Raises UserError where a row that ``prepare`` let through cannot be judged."""
        self.beat()
        reply = None
        for _ in range(TRIES):
            assert self._child is not None
            if self._child.ended:
                self._child = StandingChild(judge_one)
            began = time.monotonic()
            reply = self._child.ask([reward.function, reward.options, prompt, answer, dict(row)]).found
            if reply is not None or time.monotonic() - began >= SECONDS:
                break  # else it was killed from outside: no answer has had its time yet
        if reply is None:  # the kernel ended the child
            self._late += 1
            if self._late == 1:
                say(f"warning: {reward.name} took more than {SECONDS:g} s of one answer, which is then worth 0; said once")
            return 0.0
        if "raised" in reply:
            text = f"the reward {reward.name} cannot judge an answer: {reply['raised']}"
            raise UserError(Problem(text, key="reward", fix="run prepare again: it looks at every row"), ExitCode.STOP)
        return float(reply["reward"])

    def judge(
        self, prompts: Sequence[Any], answers: Sequence[str], rows: Sequence[Mapping[str, Any]]
    ) -> list[list[float | None]]:
        """What each reward says of answers that no model gave, as TRL would ask it: by reward, then by answer."""
        completions = [[{"role": "assistant", "content": answer}] for answer in answers]
        arguments: dict[str, Any] = {"prompts": prompts, "completions": completions, "columns": rows}
        return [judge(**arguments, completion_ids=[[] for _ in answers]) for judge in self.judges]


def judge_one(request: Sequence[Any]) -> Mapping[str, Any]:
    """In the child: one answer, with the time that it may take."""
    function, told, prompt, answer, row = request
    allow(SECONDS)
    try:
        return {"reward": _OURS[function](answer, row, prompt, told)}
    except Exception as error:  # whatever a checker raises of a row: the rank says so
        return {"raised": f"{type(error).__name__}: {error}"}
    finally:
        allow(0)


def text_of(messages: Any) -> str:
    """The text of a completion, or the last message of a prompt."""
    return str(messages[-1]["content"]) if isinstance(messages, list) else str(messages)


class OwnRewards:
    """The process of a recipe's own rewards (:mod:`clustertune.data.reward_process`), with a limit of time for each call.

    ``code``: the texts of the recipe's own files, by name without ``.py``; ``modules``: those of them that have a reward.
    Raises UserError where one fails.
    """

    def __init__(self, code: Mapping[str, str], modules: Sequence[str], beat: Callable[[], None]) -> None:
        self._beat, pipes = beat, [os.pipe() for _ in range(3)]
        (requests, self._requests), (self._replies, replies), (lifeline, self._lifeline) = pipes
        inner = (requests, replies, lifeline)
        environment = {name: value for name, value in os.environ.items() if name not in _WITHHELD}
        self._process = subprocess.Popen(
            [sys.executable, "-P", reward_process.__file__, *map(str, inner)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=inner,
        )
        for fd in inner:
            os.close(fd)
        self._left = b""
        self._end = weakref.finalize(self, _end_process, self._process, (self._requests, self._replies, self._lifeline))
        try:
            for name in modules:
                reply = self._ask({"module": name, "texts": dict(code)}, LOAD_SECONDS)
                if "wrong" in reply:
                    raise UserError(Problem(reply["wrong"], file=f"{name}.py", key="reward"), ExitCode.STOP)
        except BaseException:
            self.close()
            raise

    def call(self, reward: Reward, given: Mapping[str, Any], count: int) -> dict[str, Any]:
        """``{"scores": ..., "calls": ...}`` of one call, or ``{"wrong": text}``."""
        asked = {"module": reward.module, "name": reward.name, "given": dict(given), "count": count}
        return self._ask(asked, CALL_SECONDS + SECONDS * count)

    def close(self) -> None:
        """End the process, and all that it has started."""
        self._end()

    def _ask(self, asked: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        until, data = time.monotonic() + seconds, json.dumps(asked, default=str).encode()
        left = memoryview(reward_process.HEAD.pack(len(data)) + data)
        os.set_blocking(self._requests, False)
        while b"\n" not in self._left:
            if time.monotonic() > until:
                self.close()
                return {"wrong": f"did not come to an end within {seconds:g} s"}
            readable, writable, _ = select.select([self._replies], [self._requests] if left else [], [], 1.0)
            self._beat()
            with contextlib.suppress(BrokenPipeError):  # what it has left behind is read
                left = left[os.write(self._requests, left) :] if writable else left
            if readable:
                part = os.read(self._replies, 1 << 16)
                if not part or len(self._left) > REPLY_BYTES:
                    code = self._process.wait()
                    self.close()
                    return {"wrong": f"ended its process (exit code {code})" if not part else "gave back far too much"}
                self._left += part
        line, _, self._left = self._left.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply


def _end_process(process: subprocess.Popen[bytes], pipes: Sequence[int]) -> None:
    for fd in pipes:
        with contextlib.suppress(OSError):
            os.close(fd)
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _theirs(reward: Reward, own: OwnRewards) -> Judge:
    """A function of the recipe, whose columns are given as TRL gives them, and whose answer is looked at."""

    def judge(columns: Sequence[Mapping[str, Any]], **others: Any) -> list[float | None]:
        names = dict.fromkeys(name for row in columns for name in row if name not in RESERVED)
        of_rows = {name: [row.get(name) for row in columns] for name in names}
        given = {key: others[key] for key in others if key in RESERVED and key not in ("log_extra", "log_metric")}
        if (state := given.get("trainer_state")) is not None:
            given["trainer_state"] = {name: value for name, value in vars(state).items() if name != "stateful_callbacks"}
        count = len(others["completions"])
        reply = own.call(reward, {**of_rows, **given, **reward.options}, count)
        if "wrong" in reply:
            raise _refused(reward, reply["wrong"])
        try:
            values = [None if value is None else float(value) for value in reply["scores"]]
            if len(values) != count or not all(value is None or math.isfinite(value) for value in values):
                raise ValueError("another length, or no finite numbers")
            for name, *arguments in reply["calls"]:
                if (hook := others.get(name)) is not None:
                    hook(*arguments)
        except (KeyError, TypeError, ValueError, OverflowError) as error:  # the process is foreign
            raise _refused(reward, f"gave back what is no reward: {error}") from None
        return values

    return judge


def _refused(reward: Reward, what: str) -> UserError:
    fix = "it returns a list with a number, or None, for each of completions"
    return UserError(Problem(f"the reward {reward.name} {what}", file=f"{reward.module}.py", fix=fix), ExitCode.STOP)
