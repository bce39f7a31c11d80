"""``stage --verify``: the checksums of an offline bundle, then the chain up to its first step with the network off.

The rehearsal is a process of its own: ``python -m clustertune.staging.verify``, an order as JSON on stdin, without a
network and with empty caches. It answers with one JSON object a line, for each step what it found or what is wrong.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from clustertune import manifest
from clustertune.errors import Problem, UserError, raise_if
from clustertune.manifest import SHA256
from clustertune.process import captured
from clustertune.recipe.tasks import PUNKT
from clustertune.resolve.resolved import Resolved
from clustertune.staging import bundle, netwatch, worker
from clustertune.staging.worker import Bounds

STEP_SECONDS = 900.0
"""How long one step may take: loading some gigabytes from a slow disk."""
_SHOWN_FRAMES = 8
_NO_NETWORK = ("unshare", "--user", "--map-root-user", "--net")
"""A network namespace of its own: nothing but loopback, whatever the program is and whether Python sees it or not."""
_LOOPBACK = ("sh", "-c", 'ip link set lo up 2> /dev/null; exec "$@"', "sh")
_INHERITED = (
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "OMP_NUM_THREADS", "VIRTUAL_ENV", "TZ", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""What a rehearsal takes over from the environment: no cache, no token, no address of a hub."""


@dataclass
class Verification:
    """What a verification found."""

    files: int = 0
    bytes: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    """Each thing that was asked of the network: host, port, library, stack, step."""
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """For ``--json``, without the problems."""
        found = {"files": self.files, "bytes": self.bytes, "steps": self.steps, "attempts": self.attempts, "notes": self.notes}
        return {"ok": not self.problems, **found}


def verify(
    folder: Path, recipe: str | None, overrides: Sequence[str], *, tiny: bool, bounds: Bounds, tell: Callable[[str], None]
) -> Verification:
    """Check an offline bundle. Problems are in the verdict; raises UserError where the folder is none.

    ``recipe``: another one than the copy in the bundle.
    """
    folder = folder.absolute()
    verdict = Verification()
    found = bundle.read(folder)
    _check_sums(folder, found, verdict, bounds)
    if verdict.problems:
        return verdict
    tell(f"{verdict.files} files, {worker.amount(verdict.bytes)}: sums are right")
    meta = found.meta
    order = {
        "folder": str(folder),
        "recipe": recipe or str(folder / bundle.RECIPES / str(meta["recipe"])),
        "overrides": list(overrides) or list(meta["overrides"]),
        "tiny": tiny or (recipe is None and bool(meta["tiny"])),
    }
    with tempfile.TemporaryDirectory(prefix="clustertune-verify-") as scratch:
        _rehearse(order, Path(scratch), verdict, tell)
    return verdict


def _check_sums(folder: Path, found: manifest.Manifest, verdict: Verification, bounds: Bounds) -> None:
    """Every file by its SHA-256, several at once, and nothing beside them that a library would read."""
    names = sorted(found.files)
    total = sum(record.size for record in found.files.values())
    with worker.shown("sums", total) as advance:
        answers = worker.hash_files([(folder / name, SHA256) for name in names], bounds, advance)
    fix = "copy it again from where it was staged, or stage it again"
    for name, answer in zip(names, answers, strict=True):
        record, file = found.files[name], str(folder / name)
        if isinstance(answer, str):
            verdict.problems.append(Problem(f"cannot be read: {answer}", file=file, fix=fix))
        elif answer[0] != record.size:
            verdict.problems.append(Problem(f"{answer[0]} bytes, the manifest says {record.size}", file=file, fix=fix))
        elif answer[1] != record.sha256:
            verdict.problems.append(Problem("its content differs from the manifest's SHA-256", file=file, fix=fix))
    for name in sorted(set(manifest.list_files(folder)) - found.files.keys()):
        fix = "remove it: a library may read it in place of what was staged"
        verdict.problems.append(Problem("is not named by the manifest", file=str(folder / name), fix=fix))
    verdict.files, verdict.bytes = len(names), total


def no_namespace() -> str | None:
    """Why this machine gives a process no network of its own; None where it does."""
    try:
        done = captured([*_NO_NETWORK, "true"], 20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or "unshare failed"


def _rehearse(order: Mapping[str, Any], scratch: Path, verdict: Verification, tell: Callable[[str], None]) -> None:
    log, errors = scratch / "netwatch.jsonl", scratch / "stderr.txt"
    environment = _environment(Path(order["folder"]), scratch, log)
    command = [sys.executable, "-m", "clustertune.staging.verify"]
    refused = no_namespace()
    if refused is None:
        command = [*_NO_NETWORK, *_LOOPBACK, *command]
    else:
        text = f"no network namespace here ({refused}): native code could connect unseen, Python cannot"
        verdict.notes.append(text)
        tell(f"warning: {text}")
    with errors.open("wb") as error_log:
        pipe = subprocess.PIPE
        child = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=error_log, env=environment, cwd=scratch, start_new_session=True
        )
    try:
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps({**order, "scratch": str(scratch / "work")}).encode() + b"\n")
            child.stdin.close()
        text = f"a step of the rehearsal took more than {STEP_SECONDS:.0f} s"
        for line in worker.lines(child, STEP_SECONDS, UserError(text, fix="is the storage slow?")):
            verdict.steps.append(line)
            summary = line["found"] or "; ".join(problem["message"] for problem in line["problems"])
            tell(f"{line['step']}: {summary}")
            verdict.problems += [Problem(**problem) for problem in line["problems"]]
        code = child.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, 9)
        child.wait()
    verdict.attempts = _attempts(log)
    verdict.problems += [_name(attempt) for attempt in verdict.attempts]
    if code or not verdict.steps:
        last = errors.read_text(errors="replace").strip().splitlines()[-1:] or ["no word"]
        verdict.problems.append(Problem(f"the rehearsal ended with code {code}: {last[0]}", file=str(order["folder"])))


def _environment(folder: Path, scratch: Path, log: Path) -> dict[str, str]:
    """What a fresh account on a machine without network has: empty caches, and the hook in every Python process."""
    site, home = scratch / "site", scratch / "home"
    for path in (site, home, scratch / "work", scratch / "tmp"):
        path.mkdir()
    netwatch.write_site(site)
    inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    package = str(Path(__file__).resolve().parents[2])
    search = os.pathsep.join(filter(None, [str(site), package, inherited.get("PYTHONPATH", "")]))
    return {
        **inherited,
        **bundle.variables(folder),
        "HOME": str(home),
        "TMPDIR": str(scratch / "tmp"),
        "PYTHONPATH": search,
        netwatch.LOG: str(log),
        netwatch.STEP: "start",
        "PYTHONNOUSERSITE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _attempts(log: Path) -> list[dict[str, Any]]:
    """What Python processes asked of the network, each thing once."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for text in log.read_text(errors="replace").splitlines() if log.exists() else []:
        with contextlib.suppress(ValueError):
            line = json.loads(text)
            known = found.setdefault((line["library"], line["host"], line["step"]), {**line, "times": 0})
            known["times"] += 1
            known["port"] = known["port"] or line["port"]
    return list(found.values())


def _shown(attempt: Mapping[str, Any]) -> list[str]:
    """The frames for a reader: who asked comes first, no frames of the import system, and of each path its end."""
    frames = [frame for frame in map(str, attempt["stack"]) if not frame.startswith("<frozen")]
    library_frames = [number for number, frame in enumerate(frames) if str(attempt["library"]) in frame]
    return [
        "/".join(frame.split("/")[-3:]) if "/" in frame.split(":")[0] else frame
        for frame in frames[min(library_frames, default=0) :]
    ][:_SHOWN_FRAMES]


def _name(attempt: Mapping[str, Any]) -> Problem:
    """Who tried to reach what, and by which way."""
    port = f":{attempt['port']}" if attempt["port"] not in (None, 0) else ""
    times = f", {attempt['times']} times" if attempt["times"] > 1 else ""
    text = f"{attempt['library']} asked for {attempt['host']}{port} during step {attempt['step']}{times}"
    stack = " < ".join(_shown(attempt))
    fix = f"stage what it wanted, or keep it from asking; it came from: {stack}"
    return Problem(text, file="network", key=str(attempt["event"]), fix=fix)


# --- the rehearsal: the chain up to its first step from a bundle alone -----------------------------------------------


FORWARD_BYTES = 4e9
"""Weights up to this size are loaded, and take one step; of larger ones only the headers are read."""
_SIZES = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
REHEARSED = ("recipe", "libraries", "data", "model", "tokenizer", "training", "forward", "benchmark")
"""Methods of :class:`Rehearsal`, in order."""
MADE_PARAMETERS = 200e6
"""A model that the run makes itself is made up to this size."""


class MissingInput(Exception):
    """A step that has nothing to work on, for one before it has failed: that one is reported, and once is enough."""


class Rehearsal:
    """The steps, each on what those before it left."""

    def __init__(self, order: Mapping[str, Any], out: TextIO) -> None:
        self._order, self._out = order, out
        self._folder, self._scratch = Path(order["folder"]), Path(order["scratch"])
        self._resolved: Resolved | None = None
        self._example: dict[str, Any] = {}
        self._model: Path | None = None
        self._tokenizer: Any = None

    @property
    def resolved(self) -> Resolved:
        if self._resolved is None:
            raise MissingInput("not checked: there is no usable recipe")
        return self._resolved

    def go(self) -> None:
        """All steps; one that fails is reported, and the others continue with what there is."""
        for name in REHEARSED:
            os.environ[netwatch.STEP] = name
            began = time.time()
            problems: list[dict[str, Any]] = []
            found = ""
            try:
                found = getattr(self, name)()
            except MissingInput as error:
                found = str(error)
            except UserError as error:
                problems = [asdict(problem) for problem in error.problems]
            except Exception as error:  # whatever a library raises is what the run would meet
                traceback.print_exc()
                text = (str(error).splitlines() or [""])[0]
                problems = [asdict(Problem(f"{type(error).__name__}: {text}", file=str(self._folder)))]
            line = {"step": name, "found": found, "problems": problems, "began": began, "ended": time.time()}
            self._out.write(json.dumps(line) + "\n")
            self._out.flush()

    def recipe(self) -> str:
        """Resolved, and the bundle belongs to it."""
        from clustertune.resolve.resolve import resolve

        overrides = [*self._order["overrides"], f"{bundle.STAGED}={self._folder}"]
        self._resolved = resolve(self._order["recipe"], overrides, tiny=self._order["tiny"])
        bundle.enter(self._resolved)
        return f"{self._resolved.name}, {self._resolved.world_size} ranks"

    def libraries(self) -> str:
        """Everything that a rank and the evaluation import."""
        wanted = ["accelerate.commands.launch", "clustertune.training.session", "lm_eval.evaluator"]
        trackers = self._resolved.train_args.get("report_to") if self._resolved else None
        wanted += [name for name in ([trackers] if isinstance(trackers, str) else trackers or []) if find_spec(name)]
        for name in wanted:
            import_module(name)
        return ", ".join(name.split(".")[0] for name in wanted)

    def data(self) -> str:
        """The conversations, prepared from the bundle."""
        from clustertune.data.prepare import prepare

        recipe = self.resolved.recipe
        out = self._scratch / "data"
        result = prepare(
            recipe.data,
            recipe_folder=Path(self.resolved.folder),
            seed=int(self.resolved.train_args["seed"]),
            out=out,
            input_path=bundle.data_input(self.resolved),
        )
        with (out / "train.jsonl").open(encoding="utf-8") as lines:
            self._example = json.loads(next(lines))
        return ", ".join(f"{split}: {result[split]['conversations']} conversations" for split in ("train", "eval"))

    def model(self) -> str:
        """Configuration and the header of every shard; a model that the run makes is made."""
        from transformers import AutoConfig

        if self.resolved.recipe.model.weights == "random":
            return self._make_model()
        folder = bundle.model_folder(self._folder)
        if folder is None:
            raise UserError("contains no model", file=str(self._folder), fix="stage the recipe again")
        from clustertune.errors import raise_if
        from clustertune.evaluate.model import check_weights

        self._model = folder
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        raise_if([*check_weights(folder), *self._differences(config.to_dict(), folder / "config.json")])
        if self.resolved.recipe.lora is None:
            return f"{config.model_type}, weights are whole"
        from clustertune.merge.base import read_base

        base = read_base(folder)
        return f"{config.model_type}, {len(base.tensors)} tensors in {len(base.headers)} files"

    def _differences(self, config: Mapping[str, Any], path: Path) -> list[Problem]:
        """Where the model is another than the recipe says: its adapter would be refused after the training."""
        fix = "name the model that the recipe's model.json describes, or correct that file"
        return [
            Problem(f"{config[key]}, the recipe's model.json says {wanted}", file=str(path), key=key, fix=fix)
            for key, wanted in self.resolved.architecture.items()
            if key in _SIZES and key in config and config[key] != wanted
        ]

    def _make_model(self) -> str:
        from clustertune.data.local_model import conversation_texts, make_local_model
        from clustertune.recipe.parameters import parameter_count

        count = parameter_count(self.resolved.architecture)
        if count is None or count > MADE_PARAMETERS:
            return "the run makes it itself; too large to make here"
        name = self.resolved.recipe.model.name.rsplit("/", 1)[-1]
        texts = conversation_texts(self._scratch / "data")
        seed = int(self.resolved.train_args["seed"])
        self._model = make_local_model(self.resolved.architecture, texts, self._scratch / "model" / name, seed)
        return f"made here, {count:,} parameters"

    def tokenizer(self) -> str:
        """Loaded, and the chat template renders a conversation of the data."""
        if self._model is None:
            raise MissingInput("not checked: there is no usable model")
        from clustertune.data import tokens
        from clustertune.data.chats import messages_of
        from clustertune.data.tokenizer import load_tokenizer

        args = self.resolved.train_args
        self._tokenizer = load_tokenizer(
            str(self._model), None, self.resolved.chat_template, args, chats=self.resolved.recipe.data.has_chats
        )
        if not self._example:
            return "loaded"
        count, labelled = tokens.look(self._example, self._tokenizer, args)
        return f"an example of {len(messages_of(self._example)) or 1} messages is {count} tokens, {labelled} of them trained"

    def training(self) -> str:
        """The trainer's arguments."""
        from peft import LoraConfig

        from clustertune.training import build

        build.check_packages(self.resolved.train_args)
        fitted = build.fit_to_device(self.resolved.train_args, cuda=False).values
        values = {key: value for key, value in fitted.items() if key != "pad_token"}
        build.configuration(self.resolved)(output_dir=str(self._scratch / "run"), **values)
        if self.resolved.recipe.lora is not None:
            LoraConfig(**self.resolved.recipe.lora)
        return f"{len(values)} arguments"

    def forward(self) -> str:
        """One step of a model that is small enough."""
        if self._model is None or self._tokenizer is None:
            return "no model here"
        size = sum(path.stat().st_size for path in self._model.glob("*.safetensors"))
        if not 0 < size <= FORWARD_BYTES:
            return f"left out: {size / 1e9:.1f} GB of weights"
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(str(self._model), trust_remote_code=False)
        ids = self._tokenizer("A batch job asks for nodes.", return_tensors="pt")["input_ids"][:, :32]
        with torch.no_grad():
            logits = model(input_ids=ids).logits
        if not bool(torch.isfinite(logits).all()):
            raise UserError("its logits are not finite", file=str(self._model), fix="copy the model again")
        return f"{tuple(logits.shape)} logits, finite"

    def benchmark(self) -> str:
        """lm-eval's tasks on the prompts that the chain will score, with the sentence splitter."""
        from clustertune.evaluate import inputs, punkt, run, tasks

        wanted, published = self.resolved.recipe.eval, self.resolved.recipe.model.weights == "hub"
        given = bundle.prompts(self.resolved)
        found = []
        with run.quiet(), inputs.opened(wanted.tasks, given, published, self._scratch) as own:
            splitter = own.splitter
            if splitter and splitter.source != punkt.TRAINED and not splitter.path.is_relative_to(self._folder):
                text = f"the sentence splitter came from {splitter.path}, not from the folder"
                raise UserError(text, fix="stage the recipe where NLTK_DATA names the data")
            loaded, _ = tasks.load(wanted.tasks, own.write_tasks(wanted, self._scratch / "task"), wanted)
            raise_if(own.find_differences(loaded["tasks"]))
            for rows in own.rows.values():
                hub, source = rows.task.hub, rows.called
                lacks = f" (the folder has no {hub.name})" if published and hub and given is None and source != hub.name else ""
                words = f", sentence splitter: {splitter.source}" if splitter and PUNKT in rows.task.needs else ""
                found.append(f"{len(rows.rows)} prompts of {source}{words}{lacks}")
            others = {name: len(task.eval_docs) for name, task in loaded["tasks"].items() if name not in own.rows}
        others_text = ", ".join(f"{count} documents of {name}" for name, count in others.items())
        return "; ".join([*found, *([others_text] if others else [])])


def main() -> int:
    """Read the order, rehearse; whatever libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with contextlib.redirect_stdout(sys.stderr):
        Rehearsal(json.loads(sys.stdin.readline()), out).go()
    return 0


if __name__ == "__main__":
    sys.exit(main())
