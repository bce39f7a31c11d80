"""A benchmark's document as two H100 would leave it, made from the functions that make real ones."""

from __future__ import annotations

from typing import Any

from clustertune.bench import result
from clustertune.plan.predict import Work

PROFILE = {
    "steps": 2, "seconds": 1.0, "communication_s": 0.4, "exposed_s": 0.1, "communication_share": 0.4, "exposed_share": 0.1,
    "busy_share": 0.9, "method": "torch.profiler", "top": [{"name": "nccl|AllGather", "seconds": 0.4, "calls": 64.0}],
}  # fmt: skip


def rank(seconds: float, **more: Any) -> dict[str, Any]:
    step = {"seconds": seconds, "tokens": 4000, "computed": 4096, "labelled": 2000}
    peak = {"rss": 5 * 2**30, "allocated": 60 * 2**30, "reserved": 70 * 2**30}
    known = {"steps": [step] * 3, "warmup": [{"seconds": 9.0}], "peak": peak, "to_first_step_s": 30.0, "profile": PROFILE}
    return known | more


def document(seconds: float = 0.5, peer: float | None = 1.0, **more: Any) -> dict[str, Any]:
    ours = result.measured([[rank(seconds)] * 2] * 2, wanted=3, share=1.0, shown="x")
    theirs = None if peer is None else result.measured([[rank(peer)] * 2] * 2, wanted=3, share=1.0, shown="x")
    paired = result.paired([[rank(seconds)] * 2] * 2, [[rank(peer or 1)] * 2] * 2, interleaved=True)
    against = {
        "peer": "trl", "what": "TRL", "failed": None if theirs else "TRL: out of memory", "measured": theirs,
        "ratio": result.ratio(ours, theirs) if theirs else None, "pairs": paired if theirs else None, "same_tokens": True,
    }  # fmt: skip
    used = result.utilisation(Work(5e10, 6e10), ours, "NVIDIA H100 80GB HBM3")
    rows = {"step_s": {"plan": 0.4, "measured": seconds, "ratio": seconds / 0.4}}
    return {
        "schema": "clustertune.bench/3", "recipe": "llama8b", "model": "llama", "dataset": "oasst2", "bf16": True,
        "tiny": False, "synthetic": True, "date": "2026-11-21", "command": ["clustertune", "bench", "a b"],
        "hardware": {"gpu": "NVIDIA H100 80GB HBM3", "gpu_gib": 79.1, "ranks": 2, "nodes": 1, "cpu": "X", "cores": 16,
                     "threads_per_rank": 8, "memory_gib": 128.0},
        "distributed": {"type": "FSDP", "fsdp_version": 2, "mesh": {"dp_shard": 2}},
        "versions": {"python": "3.11.7", "torch": "main+cu129", "lm_eval": "absent"},
        "image": {"image": "train.sif", "sha256": "ab12"}, "commit": {"commit": "0" * 40, "dirty": False},
        "resolved": {"sha256": "f" * 64, "fingerprint": "e" * 64},
        "schedule": {"warmup": 1, "steps": 3, "profiled": 2, "rounds": 2}, "ours": ours,
        "ends": {"evaluation_s": 3.0, "checkpoint_s": 2.0, "checkpoint_gb": 1.5}, "startup_s": {"imports": 7.0},
        "utilisation": used, "plan": {"cluster": "dgx", "step_s_range": [0.3, 0.5], "rows": rows},
        "projection": {"steps": 100, "why": "100 steps", "hours": 0.5, "gpu_hours": 1.0,
                       "cost": {"on_demand": 3.0, "spot": None, "currency": "USD", "date": "2026-04-29", "source": "a list"}},
        "peers": [against], "notes": ["a note"], **more,
    }  # fmt: skip
