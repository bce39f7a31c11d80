"""The page of ``make gpu-check``: verdicts, versions, speed, profile and the next bottleneck."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.gpu_check import REPO
from tools.gpu_parts import shares

TOP = 8
"""Operations of a profile that are shown."""


def write(path: Path, state: Mapping[str, Any], order: list[str]) -> None:
    """The page of all verdicts so far."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(render(state, order))
    for folder in (str(REPO), str(Path.home())):  # no place of this machine is published
        text = text.replace(folder, "~" if folder != str(REPO) else ".")
    path.write_text(text + "\n")


def render(state: Mapping[str, Any], order: list[str]) -> Iterator[str]:
    """Its lines."""
    parts = {name: state["parts"][name] for name in order if name in state["parts"]}
    counts = {
        verdict: sum(one["verdict"] == verdict for one in parts.values()) for verdict in ("pass", "fail", "not possible here")
    }
    yield f"# gpu-check: {state['name']}"
    yield ""
    left = len(order) - len(parts)
    yield f"{counts['pass']} passed, {counts['fail']} failed, {counts['not possible here']} not possible here, {left} not run."
    yield f"Last command: `{state['command']}`."
    yield ""
    yield from _machine(parts.get("versions", {}).get("facts") or {})
    yield from table(
        ["part", "verdict", "seconds", "date (UTC)", "commit", ""],
        [[n, p["verdict"], f"{p['seconds']:g}", p["date"], p["commit"], p["why"]] for n, p in parts.items()],
    )
    if findings := (parts.get("doctor", {}).get("facts") or {}).get("findings"):
        yield from ("## What doctor found", "", *(f"- {one}" for one in findings), "")
    yield from _speed({name: one for name, one in parts.items() if one["facts"].get("step_s")})
    yield from _attention((parts.get("attention", {}).get("facts") or {}).get("rows") or {})
    yield from _losses({name: one["facts"] for name, one in parts.items() if one["facts"].get("cpu")})


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A Markdown table with an empty line behind it."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in row)} |"
    yield ""


def _machine(facts: Mapping[str, Any]) -> Iterator[str]:
    if not facts:
        return
    if facts.get("gpu"):
        yield (
            f"- hardware: {facts['gpus']} x {facts['gpu']}, {facts['memory_gib']} GiB, "
            f"compute capability {facts['capability']}, driver {facts['driver']}, NCCL {facts['nccl']}"
        )
    else:
        yield "- hardware: no GPU; ranks are processes on CPUs"
    have = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version != "absent")
    yield f"- versions: {have}"
    if facts["differ"]:
        yield "- other than the pins: " + ", ".join(f"{name} {version}" for name, version in facts["differ"].items())
    yield ""


def _speed(benches: Mapping[str, Any]) -> Iterator[str]:
    if not benches:
        return
    yield "## Speed"
    yield ""
    yield "Ratios are step times, clustertune over the peer, the median of pairs with its 95 % interval."
    yield ""
    rows = []
    for name, one in benches.items():
        f = one["facts"]
        planned = f"{f['planned']['ratio']:.2f}" if f.get("planned") and f["planned"].get("ratio") else "-"
        mfu = f"{f['mfu']:.1%}" if f.get("mfu") else "-"
        rows.append(
            [name, f"{f['step_s']:.3g}", f"{f['tokens_per_s_per_gpu']:,.0f}", mfu, f"{f['peak_gib']:.1f}", planned, one["why"]]
        )
    yield from table(["bench", "s a step", "tokens/s per rank", "MFU", "peak GiB", "measured / planned", "against"], rows)
    for name, one in benches.items():
        profile = one["facts"].get("profile")
        if not profile:
            continue
        yield f"### Where a step of {name} goes"
        yield ""
        yield f"Next bottleneck: {one['facts']['bottleneck']}."
        yield ""
        yield ", ".join(f"{kind} {share:.0%}" for kind, share in shares(profile).items()) + "."
        yield ""
        top = [[f"`{row['name']}`", f"{row['seconds']:.4g}", f"{row['calls']:g}"] for row in profile["top"][:TOP]]
        yield from table(["operation", "seconds a step", "calls a step"], top)


def _attention(rows: Mapping[str, Any]) -> Iterator[str]:
    if not rows:
        return
    yield "## Packed attention"
    yield ""

    def cell(row: Mapping[str, Any], key: str) -> str:
        return f"{row[key]:.3g}" if isinstance(row.get(key), int | float) else "-"

    keys = ("forward_ms", "backward_ms", "peak_mib", "apart")
    yield from table(
        ["kernel", "forward ms", "backward ms", "peak MiB", "largest difference", ""],
        [[name, *(cell(row, key) for key in keys), str(row.get("why", ""))] for name, row in rows.items()],
    )


def _losses(runs: Mapping[str, Any]) -> Iterator[str]:
    if not runs:
        return
    yield "## Losses here and on the CPU"
    yield ""
    rows = []
    for name, f in runs.items():
        measured, cpu = (" ".join(f"{value:.4f}" for _, value in sorted(f[key].items(), key=_step)) for key in ("here", "cpu"))
        rows.append([name.removeprefix("tiny-"), str(f["ranks"]), measured, cpu])
    yield from table(["recipe", "ranks", "here", "CPU"], rows)


def _step(item: tuple[Any, Any]) -> int:
    return int(item[0])
