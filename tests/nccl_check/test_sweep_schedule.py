"""What is measured in which order, and what has no time: by a clock that only moves when something is measured."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest

from clustertune.nccl_check import setup as schedule
from clustertune.nccl_check.result import COLLECTIVES, bus_factor
from clustertune.nccl_check.setup import CaseSchedule, CollectiveCase, Setup, members, shapes, tournament
from tests.nccl_check.documents import setup

MIB = 1 << 20


def play(
    wanted: Setup, gb_s: Callable[[CollectiveCase], float], *, seconds: float = 60.0, latency: float = 1e-4, room: int = 1 << 40
) -> tuple[list[CollectiveCase], list[tuple[str, str, int, str]], float]:
    """The cases of a round on links of a rate; what was left out; and the time that it took."""
    now = [0.0]
    left_out: list[tuple[str, str, int, str]] = []
    report = lambda **entry: left_out.append(tuple(entry.values()))  # noqa: E731
    cases, run = [], CaseSchedule(wanted, lambda: now[0], seconds, room, report).run()
    try:
        case = next(run)
        while True:
            cases.append(case)
            each = latency + case.bytes / gb_s(case) / 1e9
            now[0] += each * (case.iterations + case.warmup + 1)
            case = run.send(each)
    except StopIteration:
        return cases, left_out, now[0]


def even(rate: float) -> Callable[[CollectiveCase], float]:
    return lambda _case: rate


def test_everything_is_measured_where_there_is_time() -> None:
    """Every size of every collective in every scope, once in full; large sizes before small ones."""
    wanted = setup(2, 2, largest=4 * MIB, smallest=1 << 10)
    cases, left_out, _ = play(wanted, even(10.0))
    full = {(c.scope, c.collective, c.bytes) for c in cases if c.iterations == 20}
    sizes = [4 * MIB >> 2 * n for n in range(7)]
    assert full >= {(s, c, b) for s in ("world", "intra", "inter") for c in COLLECTIVES for b in sizes}
    assert {(c.collective, c.back) for c in cases if c.scope == "pair"} == {("p2p", False), ("p2p", True)}, (
        "the world is the pair"
    )
    assert left_out == []
    order = [c.bytes for c in cases if (c.scope, c.collective) == ("world", "all_gather") and c.iterations == 20]
    assert order == sizes


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.1, 1.0, 50.0])
def test_time_is_kept_on_any_link(rate: float) -> None:
    """The limit of a prolog is a promise: a slow link gets fewer iterations and sizes, never more time."""
    cases, left_out, took = play(setup(3, 1, largest=64 * MIB), even(rate), seconds=30.0)
    # The first try of a size cannot know the link yet.
    assert took <= 30.0 + 5 * MIB / rate / 1e9
    for case in cases:
        assert case.iterations >= 3 <= schedule.LEAST_ITERATIONS
    reported = {(scope, name, size) for scope, name, size, _ in left_out}
    measured = {(c.scope, c.collective, c.bytes) for c in cases}
    wanted = {("world", c, 64 * MIB >> 2 * n) for c in COLLECTIVES for n in range(9)}
    assert wanted <= reported | measured, "what was not measured is reported"
    assert not reported or all(reason for *_, reason in left_out)


@pytest.mark.parametrize("seconds", [20.0, 60.0, 300.0])
@pytest.mark.parametrize("rate", [0.000125, 0.0025, 0.0375, 0.125, 1.0])
def test_slow_is_not_hung(rate: float, seconds: float) -> None:
    """1 Mbit/s to 8 Gbit/s: all iterations together are over before the time after which one of them counts as hung."""
    wanted = setup(3, 1, largest=64 * MIB, case_seconds=max(10.0, seconds / 4))
    cases, _, _ = play(wanted, even(rate), seconds=seconds)
    assert len({(*case.track, case.bytes) for case in cases}) >= len(COLLECTIVES)
    for case in cases:
        each = 1e-4 + case.bytes / rate / 1e9
        assert each * (case.iterations + case.warmup + 1) < wanted.case_seconds / 2 + each, case
        assert not case.seconds or case.seconds <= wanted.case_seconds / 2


def test_no_time_at_all_is_told() -> None:
    """A budget of nothing leaves out everything, and says so once for each."""
    cases, left_out, _ = play(setup(2), even(1.0), seconds=0.0)
    assert cases == []
    assert {reason for *_, reason in left_out} <= {"no time was left", "would take 0 s, 0 s are left for it"}
    assert len(left_out) == len({entry[:3] for entry in left_out}) > 10


def test_a_slow_scope_does_not_starve_the_others() -> None:
    """Two nodes on 10 Mbit/s: the links inside the nodes are measured with all sizes all the same."""
    wanted = setup(2, 2, largest=16 * MIB)
    cases, left_out, _ = play(wanted, lambda case: 10.0 if case.scope == "intra" else 0.00125, seconds=60.0)
    assert {c.bytes for c in cases if c.scope == "intra" and c.iterations == 20} >= {16 * MIB, 1 << 10}
    assert any(scope == "world" for scope, *_ in left_out)


def test_pairs_have_time_of_their_own() -> None:
    """They find the slow node: large sizes of the world must not eat what is theirs."""
    cases, _, _ = play(setup(5, largest=256 * MIB), even(0.02), seconds=60.0)
    measured = {(c.turn, c.back) for c in cases if c.scope == "pair" and c.collective == "p2p" and c.bytes > MIB}
    assert measured == {(turn, back) for turn in range(5) for back in (False, True)}


def test_the_only_pair_has_time_of_its_own() -> None:
    """One way at a time is the only look at a line that gloo cannot fill both ways."""
    cases, _, _ = play(setup(2, largest=256 * MIB), even(0.005), seconds=20.0)
    assert {c.back for c in cases if c.scope == "pair" and c.bytes >= MIB} == {False, True}


def test_memory_bounds_the_sizes() -> None:
    """A rank that has no memory for a size must not find out in the middle of a collective."""
    cases, left_out, _ = play(setup(1, 2, largest=64 * MIB), even(10.0), room=4 * MIB)
    assert max(c.bytes for c in cases) == 4 * MIB
    assert ("intra", "all_gather", 64 * MIB, "does not fit into memory") in left_out


def test_what_was_done_or_hung_before_is_not_made_again() -> None:
    """The round after a hang measures the rest."""
    wanted = setup(2, largest=MIB)
    first, _, _ = play(wanted, even(1.0))
    known = tuple((*case.track, case.bytes, 0.001) for case in first[:5])
    keys = {entry[:5] for entry in known}
    second, _, _ = play(setup(2, largest=MIB, known=known, skip=(("world", "all_reduce", 0),)), even(1.0))
    assert not {(*case.track, case.bytes) for case in second} & set(keys)
    assert not any((c.scope, c.collective) == ("world", "all_reduce") for c in second)
    assert len(second) > 10


def test_a_later_round_knows_the_link() -> None:
    """It would take a slow link for one without limits, measure the largest size for minutes, and call that hung."""
    known = tuple(("world", name, 0, False, size, size / MIB * 8) for name in COLLECTIVES for size in schedule.FIRST_BYTES)
    wanted = setup(2, largest=64 * MIB, scopes=("world",), known=known)
    cases, left_out, took = play(wanted, even(MIB / 8e9), seconds=30.0)
    assert took <= 30.0
    assert 0 < max(case.bytes for case in cases) < MIB
    assert {entry[2] for entry in left_out} >= {64 * MIB, 16 * MIB, 4 * MIB}


@pytest.mark.parametrize("players", [2, 3, 4, 5, 8, 17])
def test_a_tournament_has_every_pair_once(players: int) -> None:
    """In as few turns as there can be, and no node twice in one."""
    turns = tournament(players)
    assert sorted(pair for turn in turns for pair in turn) == list(combinations(range(players), 2))
    for turn in turns:
        assert len({player for pair in turn for player in pair}) == 2 * len(turn)
    assert len(turns) == players - 1 + players % 2


def test_members() -> None:
    """Three nodes of two ranks: who measures with whom."""
    wanted = setup(3, 2)
    assert members(wanted, "world", 0, 3) == [0, 1, 2, 3, 4, 5]
    assert members(wanted, "intra", 0, 3) == [2, 3]
    assert members(wanted, "inter", 0, 2) == [0, 2, 4]
    assert members(wanted, "inter", 0, 3) == []
    turn = next(number for number, pairs in enumerate(tournament(3)) if (0, 2) in pairs)
    assert members(wanted, "pair", turn, 5) == [0, 1, 4, 5]
    assert members(wanted, "pair", turn, 2) == []


def test_scopes_that_mean_something() -> None:
    """A collective of one rank has no bandwidth."""
    found = [shapes(setup(nodes, each)) for nodes, each in ((1, 1), (1, 2), (2, 1), (2, 4))]
    assert found == [[], ["intra"], ["world", "pair"], ["world", "intra", "inter", "pair"]]


def test_bus_factors() -> None:
    """Those of nccl-tests' doc/PERFORMANCE.md."""
    assert [bus_factor(name, 8) for name in COLLECTIVES] == [0.875, 0.875, 1.75, 1.0, 1.0]
    assert (bus_factor("all_reduce", 2), bus_factor("all_gather", 2)) == (1.0, 0.5)
