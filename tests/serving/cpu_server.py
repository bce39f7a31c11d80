"""``cpu_server.py serve MODEL ... --port N``: generates with transformers on the CPU and speaks vLLM's endpoints.

No stand-in for answers: the model and the adapters that it is given make them. One request at a time, each with its own seed.
"""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

words = sys.argv
if "--version" in words:
    sys.exit(not sys.stdout.write("0.0\n"))
value = {word: words[i + 1] for i, word in enumerate(words[:-1])}
key = os.environ.get("VLLM_API_KEY")
if "CPU_SERVER_PIDS" in os.environ:
    Path(os.environ["CPU_SERVER_PIDS"], f"{value['--port']}-{os.getpid()}").touch()

import torch  # noqa: E402
from peft import PeftModel  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

torch.set_num_threads(1)
base = AutoModelForCausalLM.from_pretrained(words[2], dtype=value["--dtype"]).eval()
models, one = {"model": base}, threading.Lock()


def load(body):
    """As vLLM's, which refuses a name that it has."""
    name = body["lora_name"]
    if name in models:
        return 400, {"error": f"The lora adapter '{name}' has already been loaded."}
    tuned = next((model for model in models.values() if isinstance(model, PeftModel)), None)
    if tuned is None:
        tuned = PeftModel.from_pretrained(base, body["lora_path"], adapter_name=name)
    else:
        tuned.load_adapter(body["lora_path"], adapter_name=name)
    models[name] = tuned.eval()
    return 200, {}


def unload(body):
    tuned = models.pop(body["lora_name"], None)
    if tuned is None:
        return 404, {"error": "no such adapter"}
    if len(tuned.peft_config) > 1:
        tuned.delete_adapter(body["lora_name"])
    return 200, {}


def complete(body):
    if body["model"] not in models:
        return 404, {"error": f"The model {body['model']} does not exist."}
    model = models[body["model"]]
    if isinstance(model, PeftModel):
        model.set_adapter(body["model"])
    ids = torch.tensor(body["prompt"])
    torch.manual_seed(body["seed"])
    with torch.no_grad():
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            max_new_tokens=body["max_tokens"],
            temperature=body["temperature"],
            top_p=body["top_p"],
            top_k=max(0, body["top_k"]),
            eos_token_id=body["stop_token_ids"],
            pad_token_id=body["stop_token_ids"][0],
            return_dict_in_generate=True,
            output_scores=True,
        )
    answer = made.sequences[0, ids.shape[1] :]
    values = [scores[0].log_softmax(-1)[token].item() for scores, token in zip(made.scores, answer, strict=True)]
    ended = "stop" if answer[-1].item() in body["stop_token_ids"] else "length"
    choice = {
        "index": 0,
        "text": "",
        "token_ids": answer.tolist(),
        "finish_reason": ended,
        "logprobs": {"token_logprobs": values},
    }
    return 200, {"choices": [choice]}


POSTS = {"/v1/load_lora_adapter": load, "/v1/unload_lora_adapter": unload, "/v1/completions": complete}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def reply(self, code, body):
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def allowed(self):
        return not key or not self.path.startswith("/v1") or self.headers.get("Authorization") == f"Bearer {key}"

    def do_GET(self):
        answers = {"/health": {}, "/v1/models": {"data": [{"id": "model", "root": words[2]}]}}
        self.reply(401 if not self.allowed() else 200 if self.path in answers else 404, answers.get(self.path))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return self.reply(401, {"error": "Unauthorized"})
        with one:
            return self.reply(*POSTS[self.path](body))


ThreadingHTTPServer.request_queue_size = 1024
ThreadingHTTPServer((value["--host"], int(value["--port"])), Handler).serve_forever()
