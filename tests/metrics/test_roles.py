"""What happened to roles, as states and as spans of time."""

from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.metrics.history import Event, RoleEvent, RoleState, Span, role_order, spans, state_after

DEATH = [
    RoleEvent(0.0, "embedding-1", "alive"),
    RoleEvent(10.0, "embedding-1", "saving"),
    RoleEvent(12.0, "embedding-1", "saved"),
    RoleEvent(20.0, "embedding-1", "dead", "its process ended"),
    RoleEvent(24.0, "embedding-1", "restarted"),
    RoleEvent(30.0, "embedding-1", "restored"),
]


def test_a_death_and_a_return() -> None:
    assert spans(DEATH, until=40.0) == {
        "embedding-1": [
            Span(0.0, 10.0, "alive"),
            Span(10.0, 12.0, "saving"),
            Span(12.0, 20.0, "alive"),
            Span(20.0, 24.0, "dead"),
            Span(24.0, 30.0, "restarting"),
            Span(30.0, 40.0, "alive"),
        ]
    }


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # the end of a save does not revive the dead
        (["saving", "dead", "saved"], [Span(0.0, 1.0, "saving"), Span(1.0, 4.0, "dead")]),
        (["unreachable", "dead", "reachable"], [Span(0.0, 1.0, "unreachable"), Span(1.0, 4.0, "dead")]),
        # who left is in no span until it is back
        (["alive", "left", "alive"], [Span(0.0, 1.0, "alive"), Span(2.0, 4.0, "alive")]),
        # neighbours of one state are one span
        (["alive", "alive", "alive"], [Span(0.0, 4.0, "alive")]),
    ],
)
def test_states_of_events_a_second_apart(events: list[Event], expected: list[Span]) -> None:
    happened = [RoleEvent(float(second), "trainer-0", event) for second, event in enumerate(events)]
    assert spans(happened, until=4.0) == {"trainer-0": expected}


def test_roles_stand_as_a_batch_meets_them() -> None:
    shuffled = ["dense-0", "other", "trainer-10", "trainer-9", "embedding-0", "driver", "reader-1"]
    expected = ["driver", "reader-1", "trainer-9", "trainer-10", "embedding-0", "dense-0", "other"]
    assert sorted(shuffled, key=role_order) == expected
    events = [RoleEvent(0.0, role, "alive") for role in shuffled]
    assert list(spans(events, 1.0)) == expected


@pytest.mark.parametrize("event", get_args(Event))
@pytest.mark.parametrize("state", [None, *get_args(RoleState)])
def test_every_event_leads_to_a_state(state: RoleState | None, event: Event) -> None:
    assert state_after(state, event) in get_args(RoleState)


@settings(deadline=None, derandomize=True, max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from(["trainer-0", "dense-1"]), st.sampled_from(get_args(Event))),
        max_size=12,
    )
)
def test_spans_follow_each_other_and_end_in_the_last_state(steps: list[tuple[int, str, Event]]) -> None:
    now, events = 0.0, []
    for passed, role, event in steps:
        now += passed
        events.append(RoleEvent(now, role, event))
    told = spans(events, until=now + 1.0)
    states: dict[str, RoleState] = {}
    for event in events:
        states[event.role] = state_after(states.get(event.role), event.event)
    assert set(told) == set(states)
    for role, stretches in told.items():
        assert all(stretch.start < stretch.end for stretch in stretches)
        assert all(a.end < b.start or (a.end == b.start and a.state != b.state) for a, b in pairwise(stretches))
        last = [stretch for stretch in stretches if stretch.end == now + 1.0]
        assert [stretch.state for stretch in last] == ([] if states[role] == "left" else [states[role]])
