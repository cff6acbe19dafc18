"""Who averages with whom, whatever the order in which trainers come, report, leave and die."""

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from shadowsync.sync.averaging import AveragingBook, Phase, Verdict

RANKS = range(4)


def arrived(*ranks: int, turn: int = 1) -> AveragingBook:
    """A book of these trainers, all of them there."""
    book = AveragingBook(ranks)
    for rank in ranks:
        book.arrive(rank, turn)
    return book


def phases(book: AveragingBook, *ranks: int, turn: int = 1) -> list[Phase]:
    return [book.verdict(rank, turn).phase for rank in ranks]


def report(book: AveragingBook, rank: int, success: bool = True, turn: int = 1) -> None:
    book.report(rank, book.verdict(rank, turn).attempt, success)


def test_a_round_starts_with_the_last_and_counts_with_the_last_report() -> None:
    book = AveragingBook([2, 0])
    book.arrive(2, 1)
    assert phases(book, 2, 0) == [Phase.WAIT, Phase.OUT]
    book.arrive(0, 1)
    assert book.verdict(2, 1) == book.verdict(0, 1) == Verdict(Phase.GO, attempt=1, epoch=1, members=(0, 2))
    report(book, 0)
    assert phases(book, 0, 2) == [Phase.WAIT, Phase.GO]
    report(book, 2)
    assert book.verdict(0, 1) == book.verdict(2, 1) == Verdict(Phase.DONE, round=1)


def in_common(book: AveragingBook, holds: dict[int, int], turn: int) -> tuple[bool, bool]:
    """What the book says to trainers that come with these averages; all of them succeed."""
    for rank, held in holds.items():
        book.arrive(rank, turn, held)
    (said,) = {book.verdict(rank, turn) for rank in holds}
    for rank in holds:
        report(book, rank, turn=turn)
    return said.common, said.complete


def test_members_hear_what_they_have_in_common() -> None:
    book = AveragingBook([0, 1])
    assert in_common(book, {0: 0, 1: 0}, 1) == (False, False), "nothing yet"
    assert in_common(book, {0: 1, 1: 1}, 2) == (True, True)
    assert in_common(book, {0: 2, 1: 1}, 3) == (False, False), "one never heard of the second"
    book.join(2)
    assert in_common(book, {0: 3, 1: 3, 2: 0}, 4) == (False, False), "one is new"
    book.dead(2)
    assert in_common(book, {0: 4, 1: 4}, 5) == (True, False), "all have it, but one is gone"
    assert in_common(book, {0: 5, 1: 5}, 6) == (True, True)


def test_who_dies_when_all_others_have_the_result_was_a_member() -> None:
    book = arrived(0, 1)
    report(book, 0)
    book.dead(1)
    assert phases(book, 0) == [Phase.DONE]
    assert in_common(book, {0: 1}, 2) == (True, False)


def test_the_ring_lasts_as_long_as_its_members_stay() -> None:
    book, epochs = AveragingBook([0, 1]), []
    for turn in (1, 2, 3):
        if turn == 3:
            book.join(2)
            book.arrive(2, 1)
        for rank in (0, 1):
            book.arrive(rank, turn)
        epochs.append(book.verdict(0, turn).epoch)
        for rank in (0, 1):
            report(book, rank, turn=turn)
        if turn == 3:
            report(book, 2, turn=1)
            assert book.verdict(2, 1) == Verdict(Phase.DONE, round=3)
    assert epochs == [1, 1, 2]


def test_who_left_and_came_back_gets_a_new_ring() -> None:
    """It has closed its end of the old one."""
    book = arrived(0, 1)
    for rank in (0, 1):
        report(book, rank)
    book.leave(1)
    book.join(1)
    for rank in (0, 1):
        book.arrive(rank, 2)
    assert book.verdict(0, 2).epoch == 2


def test_one_failure_makes_all_repeat_in_a_new_ring() -> None:
    book = arrived(0, 1, 2)
    report(book, 0)
    report(book, 1, success=False)
    assert phases(book, 0, 1, 2) == [Phase.WAIT, Phase.WAIT, Phase.VOID]
    report(book, 2)
    assert book.round == 0
    assert book.verdict(0, 1) == Verdict(Phase.GO, attempt=2, epoch=2, members=(0, 1, 2))


def test_a_death_in_the_middle_voids_the_round_for_those_still_in_it() -> None:
    book = arrived(0, 1, 2)
    report(book, 1, success=True)
    book.dead(2)
    assert phases(book, 0, 1) == [Phase.VOID, Phase.WAIT]
    report(book, 0, success=False)
    assert book.verdict(0, 1) == book.verdict(1, 1) == Verdict(Phase.GO, attempt=2, epoch=2, members=(0, 1))


def test_a_death_after_everybody_else_has_the_result_does_no_harm() -> None:
    book = arrived(0, 1, 2)
    report(book, 0)
    report(book, 1)
    book.dead(2)
    assert book.verdict(0, 1) == book.verdict(1, 1) == Verdict(Phase.DONE, round=1)
    assert phases(book, 2) == [Phase.OUT]


def test_who_leaves_before_the_start_is_out_and_lets_the_others_start() -> None:
    book = AveragingBook([0, 1, 2])
    book.arrive(0, 1)
    book.arrive(1, 1)
    book.leave(1)
    assert phases(book, 0, 1) == [Phase.WAIT, Phase.OUT]
    book.leave(2)
    assert book.verdict(0, 1).members == (0,)


def test_who_leaves_after_the_start_ends_the_round_with_the_others() -> None:
    book = arrived(0, 1)
    book.leave(1)
    assert phases(book, 0, 1) == [Phase.GO, Phase.GO]
    report(book, 0)
    report(book, 1)
    assert phases(book, 0, 1) == [Phase.DONE, Phase.DONE]
    book.arrive(0, 2)
    assert book.verdict(0, 2).members == (0,)


def test_who_leaves_a_round_that_fails_is_not_in_its_repetition() -> None:
    book = arrived(0, 1)
    book.leave(1)
    report(book, 0, success=False)
    report(book, 1, success=False)
    assert phases(book, 1) == [Phase.OUT]
    assert book.verdict(0, 1).members == (0,)


def test_a_trainer_started_anew_begins_with_its_first_turn() -> None:
    book = arrived(0, 1, turn=7)
    for rank in (0, 1):
        report(book, rank, turn=7)
    book.dead(1)
    book.join(1)
    book.arrive(0, 8)
    book.arrive(1, 1)
    assert book.verdict(1, 1).members == (0, 1)
    report(book, 0, turn=8)
    report(book, 1)
    assert book.verdict(1, 1) == Verdict(Phase.DONE, round=2)


def test_a_later_turn_gives_up_the_earlier_one() -> None:
    book = arrived(0, 1)
    book.arrive(1, 2)
    assert phases(book, 0) == [Phase.VOID]
    report(book, 0, success=False)
    assert book.verdict(1, 2).members == (0, 1)
    assert phases(book, 1, turn=1) == [Phase.OUT]


def test_calls_that_come_twice_or_late_change_nothing() -> None:
    book = arrived(0, 1)
    first = book.verdict(0, 1)
    for _ in range(2):
        book.arrive(0, 1)
        book.report(0, first.attempt, True)
    book.report(0, first.attempt, False)
    assert phases(book, 0, 1) == [Phase.WAIT, Phase.GO]
    report(book, 1)
    book.arrive(0, 1)
    book.report(1, first.attempt, False)
    assert phases(book, 0, 1) == [Phase.DONE, Phase.DONE]
    book.leave(3)
    book.dead(3)
    assert book.members == {0, 1}


@dataclass
class Player:
    """A trainer that follows the book's verdicts; what it does next is drawn."""

    rank: int
    present: bool = True
    turn: int = 0
    asking: bool = False
    rounds: list[int] = field(default_factory=list)


class Play:
    """Random trainers around one book, with what must always hold."""

    def __init__(self) -> None:
        self.book = AveragingBook(RANKS)
        self.players = [Player(rank) for rank in RANKS]
        self.together: dict[int, tuple[int, ...]] = {}

    def move(self, player: Player, choice: int) -> None:
        moves: list[Callable[[Player], None]] = [self.go_on, self.go_on, self.go_on, self.fail, self.leave, self.die]
        moves[choice](player)
        if not player.present and choice < 2:
            self.book.join(player.rank)
            player.present = True

    def go_on(self, player: Player) -> None:
        self._step(player, success=True)

    def fail(self, player: Player) -> None:
        self._step(player, success=False)

    def _step(self, player: Player, success: bool) -> None:
        if not player.asking:
            if not player.present:
                return
            player.turn, player.asking = player.turn + 1, True
            self.book.arrive(player.rank, player.turn)
        verdict = self.book.verdict(player.rank, player.turn)
        if verdict.phase is Phase.GO:
            assert player.rank in verdict.members
            self.together.setdefault(verdict.attempt, verdict.members)
            assert self.together[verdict.attempt] == verdict.members
        if verdict.phase in (Phase.GO, Phase.VOID):
            self.book.report(player.rank, verdict.attempt, success and verdict.phase is Phase.GO)
        if verdict.phase is Phase.DONE:
            player.rounds.append(verdict.round)
        if verdict.phase in (Phase.DONE, Phase.OUT):
            assert verdict.phase is Phase.DONE or not player.present
            player.asking = False

    def leave(self, player: Player) -> None:
        player.present = False
        self.book.leave(player.rank)

    def die(self, player: Player) -> None:
        self.book.dead(player.rank)
        self.players[player.rank] = Player(player.rank, present=False)


@given(moves=st.lists(st.tuples(st.sampled_from(RANKS), st.integers(0, 5)), max_size=120))
@settings(deadline=None, max_examples=150, derandomize=True)
def test_trainers_agree_on_their_rounds_and_nobody_is_stuck(moves: list[tuple[int, int]]) -> None:
    play = Play()
    for rank, choice in moves:
        play.move(play.players[rank], choice)
    for player in play.players:
        assert player.rounds == sorted(set(player.rounds))
    # whoever is still there now behaves; all of them must come through, together
    left = [player for player in play.players if player.present or player.asking]
    for _ in range(40):
        for player in left:
            if player.present or player.asking:
                play.go_on(player)
    before = play.book.round
    staying = [player for player in left if player.present]
    for _ in range(12):
        for player in staying:
            play.go_on(player)
    if staying:
        assert play.book.round > before
        assert len({player.rounds[-1] for player in staying}) <= 2, "at most one round apart"
