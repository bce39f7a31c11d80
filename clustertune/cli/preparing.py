"""``clustertune prepare``: conversations and tokens outside of a run, and samples of what is trained."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clustertune import secrets
from clustertune.console import escape, say
from clustertune.data import prepare as conversations
from clustertune.errors import UserError
from clustertune.resolve.resolved import Resolved

MARKS = ("[[", "]]")
"""Around the trained tokens of a sample."""


def prepare(resolved: Resolved, out: Path, input_path: Path | None, samples: int) -> dict[str, Any]:
    """Make a recipe's data in ``out``. Returns the ``--json`` document.

    ``{"dir", "train", "eval", "rejected", "unused", "tokens", "sequences", "labelled_share", "tokens_per_s"}``, the last four
    null where the tokenizer is not available here; of a mixture also ``sources``, with ``samples`` also ``samples``.
    Raises UserError.
    """
    from clustertune.data import sequences, tokens
    from clustertune.staging import bundle

    bundle.enter(resolved)
    input_path = input_path or bundle.data_input(resolved)
    seed = int(resolved.train_args["seed"])
    with secrets.lent(secrets.of_the_hub()), contextlib.redirect_stdout(sys.stderr):
        found = conversations.prepare(
            resolved.recipe.data, recipe_folder=Path(resolved.folder), seed=seed, out=out, input_path=input_path
        )
        keys = ("dir", "train", "eval", "rejected", "unused", "sources")
        document = {key: found[key] for key in keys if key in found} | dict.fromkeys(tokens.SUMMARY)
        try:
            with _tokenizer(resolved, out) as tokenizer:
                made = tokens.make(out, tokenizer, resolved.train_args)
                if resolved.is_grpo:
                    sequences.check_prompts(out, resolved)
                document |= {key: made[key] for key in tokens.SUMMARY}
                for split in conversations.SPLITS:
                    document[split] = {**document[split], **made["splits"][split]}
                if samples:
                    document["samples"] = sequences.shown(out / tokens.FOLDER, tokenizer, samples, MARKS)
        except _TokenizerUnavailable as error:
            if samples:
                raise UserError(error.problems) from None
            say(f"warning: conversations only, without tokens: {error.problems[0]}")
    return document


class _TokenizerUnavailable(UserError):
    """The tokenizer is not available here; the conversations are prepared all the same."""


@contextlib.contextmanager
def _tokenizer(resolved: Resolved, dataset: Path) -> Iterator[Any]:
    """The tokenizer that a run of the recipe has. Raises _TokenizerUnavailable, UserError."""
    from clustertune.data.tokenizer import load_tokenizer
    from clustertune.staging import needs

    recipe = resolved.recipe
    if recipe.megatron is not None:
        raise _TokenizerUnavailable("Megatron-Bridge tokenises by itself", file=resolved.name)
    if recipe.model.weights == "random":
        from clustertune.data.local_model import conversation_texts, local_tokenizer

        with tempfile.TemporaryDirectory() as folder:  # as the run saves and loads it
            texts, own = conversation_texts(dataset), resolved.chat_template is None
            local_tokenizer(resolved.architecture, texts, template=own).save_pretrained(folder)
            yield load_tokenizer(folder, None, resolved.chat_template, resolved.train_args, chats=recipe.data.has_chats)
        return
    source = needs.base_of(resolved, None).source
    try:
        tokenizer = load_tokenizer(*source, resolved.chat_template, resolved.train_args, chats=recipe.data.has_chats)
    except UserError as error:
        if error.problems[0].key == "model.name":
            raise _TokenizerUnavailable(error.problems) from None
        raise
    yield tokenizer


def print_summary(document: dict[str, Any]) -> None:
    """The same for a person; samples go to stdout."""
    for split in conversations.SPLITS:
        one = document[split]
        text = f"{split}: {one['conversations']:,} conversations, {one['messages']:,} messages"
        if "tokens" in one:
            text += f", {one['tokens']:,} tokens, {one['labelled']:,} of them trained, in {one['sequences']:,} sequences"
            text += f"; {one['cut']:,} cut at max_length, which leaves out {one['cut_tokens']:,} tokens" if one["cut"] else ""
            text += f", {one['dropped']:,} left out without a label in it" if one["dropped"] else ""
        say(text)
    for part in document.get("sources", ()):
        say(f"{part['name']}: {part['conversations']:,} conversations of {part['rows']:,} rows")
    if document["tokens_per_s"] is not None:
        say(f"tokenised at {document['tokens_per_s']:,} tokens/s")
    say(f"in {document['dir']}")
    for number, sample in enumerate(document.get("samples", ()), start=1):
        sys.stdout.write(f"--- sample {number}, trained tokens between {MARKS[0]} and {MARKS[1]}\n{escape(sample)}\n")
