"""A file of one's own prompts as a task of lm-eval: each row is answered, and a held-out answer is given to the model to
score its loss. Judged are exact match or the row's rules; what was answered is written side by side with the base's answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.task import Task

from clustertune.data.prompts import Judge, OwnPrompt, OwnPrompts
from clustertune.errors import Problem
from clustertune.evaluate.scores import pair
from clustertune.launch.serving import OWN_LONGEST
from clustertune.recipe.sections import OWN_PROMPTS

SHOWN = 20
"""Rows that a result holds for the report."""
LOSS = "loss"
_CUT = 1000
"""Characters of a prompt's end and of an answer that a result holds for the report."""


class OwnTask(Task):  # type: ignore[misc]
    """The rows of a file. A metric is over the rows that have what it needs."""

    VERSION, OUTPUT_TYPE, DATASET_PATH = 1.0, "generate_until", "file"

    def __init__(self, prompts: OwnPrompts) -> None:
        self.prompts = prompts
        self.encode: Callable[[str, str], tuple[list[int], list[int]]] | None = None
        """The loaded model's: the tokens of a prompt, and those of its answer."""
        self.endless: list[int] = []
        """Lines of rows whose pattern did not come to an end on the answer."""
        self._judge = Judge()
        decoding = {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": OWN_LONGEST}
        super().__init__(config={"task": OWN_PROMPTS, "num_fewshot": 0, "generation_kwargs": decoding})

    def download(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing: the rows are here."""

    def has_training_docs(self) -> bool:
        return False

    def has_validation_docs(self) -> bool:
        return False

    def has_test_docs(self) -> bool:
        return True

    def test_docs(self) -> list[dict[str, Any]]:
        return [{"row": at, "messages": row.messages} for at, row in enumerate(self.prompts.rows)]

    def _row(self, doc: Mapping[str, Any]) -> OwnPrompt:
        row: OwnPrompt = self.prompts.rows[doc["row"]]
        return row

    def doc_to_text(self, doc: Mapping[str, Any]) -> str:
        return "\n\n".join(str(message["content"]) for message in doc["messages"])

    def doc_to_target(self, doc: Mapping[str, Any]) -> str:
        return self._row(doc).answer or ""

    def fewshot_context(self, doc: Mapping[str, Any], *_args: Any, chat_template: Any = None, **_kwargs: Any) -> str:
        """The conversation as the chat template has it, else its texts with an empty line between."""
        return str(chat_template(doc["messages"])) if chat_template else self.doc_to_text(doc)

    def construct_requests(self, doc: Mapping[str, Any], ctx: str, **kwargs: Any) -> list[Any]:
        """The answer, and the log-likelihood of the one that is held out."""
        task = (OWN_PROMPTS, *kwargs["metadata"][1:])  # lm-eval's Task takes its whole configuration for its name
        decoding = dict(self.get_config("generation_kwargs"))
        asked = [Instance("generate_until", doc, (ctx, decoding), 0, metadata=task)]
        answer = self._row(doc).answer
        return asked if answer is None else [*asked, Instance("loglikelihood", doc, (ctx, answer), 1, metadata=task)]

    def process_results(self, doc: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
        """By metric, what this row adds. ``loss``: nats, and over how many tokens."""
        row, (answer, *scored) = self._row(doc), results
        row_scores: dict[str, Any] = {}
        for rule, expected in row.judged_by.items():
            keeps = self._judge(rule, expected, answer)
            if keeps is None:
                self.endless.append(row.line)
            row_scores[rule] = float(bool(keeps))
        for log_likelihood, _ in scored:
            assert self.encode is not None
            prompt = next(one for one in self.instances if one.doc["row"] == doc["row"]).args[0]
            row_scores[LOSS] = {"sum": -float(log_likelihood), "of": len(self.encode(prompt, row.answer or "")[1])}
        return row_scores

    def aggregation(self) -> dict[str, Callable[[list[Any]], float]]:
        def ratio(values: list[Any]) -> float:
            pairs = [fraction for value in values if (fraction := pair(value))]
            return sum(total for total, _ in pairs) / sum(count for _, count in pairs)

        return dict.fromkeys(self.higher_is_better(), ratio)

    def higher_is_better(self) -> dict[str, bool]:
        rules = dict.fromkeys((rule for row in self.prompts.rows for rule in row.judged_by), True)
        return rules | ({LOSS: False} if any(row.answer is not None for row in self.prompts.rows) else {})

    def find_problems(self, room: int, encode: Callable[[str], Sequence[int]]) -> list[Problem]:
        """Rows whose prompt and held-out answer the model cannot read at once. Call after the requests are built.

        ``room``: tokens that the model reads. ``encode``: its tokenizer's.
        """
        problems = []
        for one in self.instances:
            if one.request_type == "loglikelihood" and (count := len(encode("".join(one.args)))) > room:
                line = self.prompts.rows[one.doc["row"]].line
                text = f"prompt and answer are {count} tokens, the model reads {room}"
                problems.append(Problem(text, f"{self.prompts.file}:{line}", "completion", "shorten the row, or leave it out"))
        return problems

    def notes(self) -> list[str]:
        """What a reader must know of the rows."""
        texts, rows = [], self.prompts.rows
        counts = {rule: sum(rule in row.judged_by for row in rows) for rule in self.higher_is_better() if rule != LOSS}
        if any(count < len(rows) for count in counts.values()):
            texts.append(f"Of {len(rows)} own prompts: {', '.join(f'{n} judged by {rule}' for rule, n in counts.items())}.")
        if not counts:
            texts.append("The own prompts have neither answers nor rules: they are answered, and nothing is scored.")
        if self.prompts.unused:
            texts.append(f"Columns of {self.prompts.file.name} that are not read: {', '.join(self.prompts.unused)}.")
        if lines := sorted(set(self.endless)):
            texts.append(f"No verdict in time, counted as not kept: {self.prompts.file.name} {', '.join(map(str, lines))}.")
        return texts

    def close(self) -> None:
        """End what judges."""
        self._judge.__exit__()


def side_by_side(
    prompts: OwnPrompts, tuned: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """A row for each prompt: line, messages, answer and rules, and what base and tuned answered and reached.

    ``tuned`` and ``base``: samples of the task; ``base`` is empty where there is none.
    """
    before = {int(sample["doc_id"]): sample for sample in base}
    lines = []
    for sample in sorted(tuned, key=lambda one: int(one["doc_id"])):
        row = prompts.rows[int(sample["doc_id"])]
        line: dict[str, Any] = {"line": row.line, "messages": row.messages}
        line |= {} if row.answer is None else {"answer": row.answer}
        line |= row.rules
        for name, one in (("base", before.get(int(sample["doc_id"]))), ("tuned", sample)):
            if one is not None:
                scores = {metric: _plain(one[metric]) for metric in one["metrics"]}
                line |= {name: one["resps"][0][0], **({f"{name}_scores": scores} if scores else {})}
        lines.append(line)
    return lines


def for_report(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The first rows, their texts cut."""
    kept = ("line", "answer", "base", "tuned", "base_scores", "tuned_scores")
    cuts = []
    for row in rows[:SHOWN]:
        cut = {name: row[name][:_CUT] if isinstance(row[name], str) else row[name] for name in kept if name in row}
        cuts.append({**cut, "prompt": str(row["messages"][-1]["content"])[-_CUT:]})
    return cuts


def _plain(value: Any) -> float | None:
    fraction = pair(value)
    return fraction and fraction[0] / fraction[1]
