"""``cpu_server.py serve MODEL ... --port N``: generates with transformers on the CPU and speaks vLLM's endpoints.

No stand-in for answers: the model and the adapters that it is given make them. One request at a time, each with its own seed.
"""

import contextlib
import os
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.serving.json_server import JsonHandler, serve

words = sys.argv
if "--version" in words:
    sys.exit(not sys.stdout.write("0.0\n"))
value = {word: words[i + 1] for i, word in enumerate(words[:-1])}
if "CPU_SERVER_PIDS" in os.environ:
    Path(os.environ["CPU_SERVER_PIDS"], f"{value['--port']}-{os.getpid()}").touch()

import torch  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

torch.set_num_threads(1)
base = AutoModelForCausalLM.from_pretrained(words[2], dtype=value["--dtype"]).eval()
words_of = AutoTokenizer.from_pretrained(words[2])
adapters, one = {}, threading.Lock()


def load(body):
    """As vLLM's, which refuses a name that it has."""
    name = body["lora_name"]
    if name in adapters:
        return 400, {"error": f"The lora adapter '{name}' has already been loaded."}
    tuned = next(iter(adapters.values()), None)
    if tuned is None:
        tuned = PeftModel.from_pretrained(base, body["lora_path"], adapter_name=name)
    else:
        tuned.load_adapter(body["lora_path"], adapter_name=name)
    adapters[name] = tuned.eval()
    return 200, {}


def unload(body):
    tuned = adapters.pop(body["lora_name"], None)
    if tuned is None:
        return 404, {"error": "no such adapter"}
    tuned.delete_adapter(body["lora_name"]) if adapters else tuned.unload()
    return 200, {}


def sampling(body):
    """What ``generate`` makes of a request's parameters; temperature 0 takes the likeliest token, as vLLM's."""
    if not body["temperature"]:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    named = {name: body[name] for name in ("temperature", "top_p")}
    return {"do_sample": True, "top_k": max(0, body["top_k"]), **named}


def complete(body):
    if body["model"] != "model" and body["model"] not in adapters:
        return 404, {"error": f"The model {body['model']} does not exist."}
    ids, ends = torch.tensor(body["prompt"]), body.get("stop_token_ids") or [words_of.eos_token_id]
    torch.manual_seed(body["seed"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        model = adapters.get(body["model"]) or next(iter(adapters.values()), base)
        if body["model"] in adapters:
            model.set_adapter(body["model"])
        elif adapters:
            stack.enter_context(model.disable_adapter())
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=body["max_tokens"],
            eos_token_id=ends,
            pad_token_id=ends[0],
            stop_strings=body.get("stop") or None,
            tokenizer=words_of,
            return_dict_in_generate=True,
            output_scores=True,
            **sampling(body),
        )
    answer = made.sequences[0, ids.shape[1] :]
    values = [scores[0].log_softmax(-1)[token].item() for scores, token in zip(made.scores, answer, strict=True)]
    text = words_of.decode(answer, skip_special_tokens=body.get("skip_special_tokens", True))
    stop = next((at for word in body.get("stop") or () if (at := text.find(word)) >= 0), None)
    ended = "stop" if stop is not None or answer[-1].item() in ends else "length"
    choice = {
        "index": 0,
        "text": text[:stop],
        "token_ids": answer.tolist(),
        "finish_reason": ended,
        "logprobs": {"token_logprobs": values},
    }
    return 200, {"choices": [choice], "usage": {"completion_tokens": len(answer)}}


POSTS = {"/v1/load_lora_adapter": load, "/v1/unload_lora_adapter": unload, "/v1/completions": complete}


class Handler(JsonHandler):
    def do_GET(self):
        answers = {"/health": {}, "/v1/models": {"data": [{"id": "model", "root": words[2]}]}}
        self.reply(200 if self.path in answers else 404, answers.get(self.path))

    def do_POST(self):
        body = self.read()
        with one:
            return self.reply(*POSTS[self.path](body))


serve(value["--host"], value["--port"], Handler)
