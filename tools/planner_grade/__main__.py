"""``docs/results/planner.md``: the grade of the planner as a page, written by ``make planner-grade``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from clustertune.plan.constants import Constants, number
from tools.planner_grade.case import case
from tools.planner_grade.claims import ClaimResult, check_claims
from tools.planner_grade.data import claims_file, published_runs
from tools.planner_grade.grade import Flow, GradeRow, flows
from tools.planner_grade.reference import RUN, alternatives, floors

HEAD = """# The planner against published runs

Made by `make planner-grade`; a test fails where this page is not what the code computes. "Error" is predicted over published,
less 1: a positive one is a run predicted too slow. Sources, settings and what a source leaves open stand with each row in
`tools/planner_grade/`. Nothing was run for this page: it holds other people's measurements.

What it is worth: the shares of peak were fitted to the 17 IDRIS rows and, with less weight, to the throughput tables; the width
of the calibration's prior was set with these rows in sight; the A100 cluster's 3.1 GB/s is what its own runs imply, for its
authors measured no bandwidth. Held out altogether are the 72B rows, NeMo's HFAutoModel and mixtures of experts. Ethernet is
not: its 8.0 GB/s come from the run that it is graded on. That row shows only that the arithmetic agrees with itself.

"In range": how many published steps lie in the range that a plan prints, which is meant for four of five; the width of each
class (bf16, float8 and Megatron-Core, experts) was set with these rows in sight. Memory is the peak that torch had allocated;
torchtitan's tables print what its allocator had reserved (`max_reserved_gib`, "memory" of its train.py), which is more:
up to all that it once split and could not join. Its loss was not compiled with the model, and is counted so. What its rows with
long rows and TP lack beyond that is not explained. "Lowest" is the row that is predicted most too low.
"""


def page() -> str:
    """The whole page as Markdown."""
    found = flows()
    lines = [HEAD, *_summary(found), *_details(found), *_reference(), *_claims()]
    return "\n".join(lines) + "\n"


def _summary(found: list[Flow]) -> Iterator[str]:
    yield "## Step time and memory\n"
    yield "| flow | runs | mean error | worst | goal | in range | memory, mean | lowest | what is held out |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|---|"
    for flow in found:
        goal = "" if flow.goal is None else f"{flow.goal:.0%}{'' if flow.mean <= flow.goal else ' MISSED'}"
        memory = "" if flow.memory_mean is None else f"{flow.memory_mean:.1%}"
        errors = [error for row in flow.counted if (error := row.memory_error) is not None]
        cells = [flow.name, str(len(flow.counted)), f"{flow.mean:.1%}", f"{flow.worst:.1%}", goal]
        cells += [f"{sum(row.in_range for row in flow.counted)}", memory, f"{min(errors):+.1%}" if errors else "", flow.what]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _details(found: list[Flow]) -> Iterator[str]:
    for flow in found:
        yield f"### {flow.name[0].upper()}{flow.name[1:]}\n"
        yield "| run | model | GPUs | published s | predicted s | error | published GiB | predicted GiB | error | note |"
        yield "|---|---|--:|--:|--:|--:|--:|--:|--:|---|"
        yield from map(_line, flow.rows)
        yield ""


def _line(row: GradeRow) -> str:
    run = row.run
    memory = ["", "", ""]
    if row.published_gib is not None and row.predicted_gib is not None and row.memory_error is not None:
        memory = [f"{row.published_gib:.1f}", f"{row.predicted_gib:.1f}", f"{row.memory_error:+.1%}"]
    notes = [row.note] if row.note else []
    notes += [f"not counted: {run.excluded}"] if run.excluded else []
    notes += ["not read at its source"] if not run.verified else []
    figures = [f"{row.published_s:.4g}", f"{row.predicted_s:.4g}", f"{row.error:+.1%}"]
    cells = [run.id, run.model, f"{run.world} x {run.cluster}", *figures]
    return "| " + " | ".join([*cells, *memory, "; ".join(notes)]) + " |"


def _reference() -> Iterator[str]:
    floor, one = floors(), case_seconds()
    yield "## The reference run: Llama-3.1-405B, LoRA, 2 x 8 RTX PRO 6000, 100 GbE, 8 h 24 m\n"
    gathered, ring, node = floor.gathered_bytes / 1e12, floor.hours / floor.ring_h, floor.hours / floor.node_h
    yield f"- Weights gathered in the run: {gathered:.1f} TB into each node (162 gathers of 811.7 GB x 15/16)."
    yield f"- Floor of that traffic at line rate: {floor.ring_h:.2f} h as one ring ({ring:.1f} x faster than the run)"
    yield f"  and {floor.node_h:.2f} h where each node receives only what it lacks ({node:.1f} x)."
    products = floor.hours / floor.compute_h
    yield f"- Floor of its products at the dense peak, recomputation included: {floor.compute_h:.2f} h ({products:.0f} x)."
    yield f"- Predicted at the 4.7 GB/s that the run itself implies: {one:.0f} s a step; 36 steps and 18 evaluations"
    yield "  are what 8 h 24 m (840 s a step, loading and evaluations included) were spent on.\n"
    yield "What the same 36 steps of 32 sequences would take on the same GPUs:\n"
    yield "| strategy | s a step at 4.7 GB/s | times faster | at 8.1 GB/s | times faster | GiB per GPU | fits |"
    yield "|---|--:|--:|--:|--:|--:|---|"
    found = alternatives()
    first = found[0]
    for option in found:
        cells = [option.name]
        for bandwidth, seconds in option.step_s.items():
            cells += [f"{seconds:.0f}", f"{first.step_s[bandwidth] / seconds:.1f}"]
        yield "| " + " | ".join([*cells, f"{option.needed / 2**30:.0f}", "yes" if option.fits else "NO"]) + " |"
    yield ""


def case_seconds() -> float:
    """Predicted seconds of a step of the reference run as it was."""
    return case(published_runs()[RUN]).step(Constants()).seconds


def _claims() -> Iterator[str]:
    results = check_claims()
    counts = {verdict: sum(r.verdict == verdict for r in results) for verdict in ("right", "imprecise", "refuted")}
    yield "## The sources' figures\n"
    words = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    yield f"{len(results)} figures computed again: {words}.\n"
    for title, verdict in (("Refuted", "refuted"), ("Imprecise", "imprecise"), ("Right", "right")):
        yield f"### {title}\n"
        yield "| source | claim | claimed | computed | arithmetic | instead |"
        yield "|---|---|--:|--:|---|---|"
        yield from (_claim(result) for result in results if result.verdict == verdict)
        yield ""


def _claim(result: ClaimResult) -> str:
    claim, claimed = result.claim, result.claim.claimed
    figure = f"{number(claimed[0])} to {number(claimed[1])}" if isinstance(claimed, tuple) else number(claimed)
    cells = [f"{claims_file().sources[claim.source]}, {claim.place}", claim.claim, f"{figure} {claim.unit}"]
    cells += [f"{number(result.computed)} {claim.unit}", result.arithmetic, claim.instead]
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"


def main() -> None:
    """Print the page, and write it where the first argument says."""
    text = page()
    sys.stdout.write(text)
    for file in sys.argv[1:]:
        Path(file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
