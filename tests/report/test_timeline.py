"""The timeline of the roles: what is drawn, what is told in words."""

from fake_runs import make_events, make_frames

from shadowsync.metrics.history import RoleEvent
from shadowsync.report.cards import Section, timeline_section


def timeline(events: list[RoleEvent]) -> Section:
    made = timeline_section(events, make_frames())
    assert made is not None
    return made


def svg(events: list[RoleEvent]) -> str:
    drawn = timeline(events).cards[0].svg
    assert drawn is not None
    return drawn


def test_without_events_there_is_none() -> None:
    assert timeline_section([], make_frames()) is None


def test_every_role_and_state_is_named() -> None:
    drawn = svg(make_events())
    for text in ("driver", "reader-0", "trainer-2", "embedding-1", "dense-0", "alive", "saving", "dead", "unreachable"):
        assert f">{text}<" in drawn
    assert drawn.index(">driver<") < drawn.index(">trainer-0<") < drawn.index(">dense-0<")


def test_the_legend_names_only_what_occurs() -> None:
    drawn = svg([RoleEvent(0.0, "driver", "alive"), RoleEvent(9.0, "driver", "left")])
    assert ">alive<" in drawn
    for absent in ("dead", "saving", "restarting", "unreachable"):
        assert f">{absent}<" not in drawn


def test_events_are_told_in_order_and_only_so_many() -> None:
    made = timeline(make_events()[::-1])
    assert [row[0] for row in made.told] == sorted(row[0] for row in made.told)
    assert ("0:10", "trainer-1", "dead", "its process was killed by signal 9") in made.told
    assert made.left_out == 0
    saves = [RoleEvent(float(k), "driver", "saving" if k % 2 else "saved") for k in range(500)]
    many = timeline([*saves, RoleEvent(500.0, "driver", "dead")])
    assert [row[2] for row in many.told] == ["dead"]
    assert many.left_out == 500


def test_of_many_roles_the_eventful_ones_are_drawn() -> None:
    events = [RoleEvent(0.0, f"trainer-{rank}", "alive") for rank in range(60)]
    events += [RoleEvent(5.0, "trainer-57", "dead"), RoleEvent(9.0, "trainer-57", "restarted")]
    made = timeline(events)
    assert made.cards[0].svg is not None
    assert ">trainer-57<" in made.cards[0].svg
    assert "36 further roles had fewer troubles and are not drawn" in made.cards[0].shows


def test_a_death_at_the_very_end_is_seen() -> None:
    events = [RoleEvent(0.0, "trainer-0", "alive"), RoleEvent(100.0, "trainer-0", "dead")]
    assert ">dead<" in svg(events)


def test_events_of_one_moment_can_be_drawn() -> None:
    assert ">driver<" in svg([RoleEvent(50.0, "driver", "dead")])
    made = timeline_section([RoleEvent(0.0, "driver", "alive")], [])
    assert made is not None
    assert made.cards[0].svg is not None
