"""Saves that are cut off: by a full disk, by kill -9, and by a reader that looks at the wrong moment."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoint_helpers import (
    SECOND,
    ScriptedLocal,
    ScriptedRemote,
    Steps,
    assert_holds,
    assert_state,
    chain,
    disk_full,
    make_snapshot,
    memory_root,
    model_on,
    small_store,
    tight_store,
)

from shadowsync.checkpoint.files import Files, LocalFiles, open_files
from shadowsync.errors import CheckpointError, SaveError

MANY_STEPS = 1000
MEMBERS: dict[str, tuple[Callable[[Path], str], Callable[[str, Steps], Files]]] = {
    "local": (str, lambda root, steps: ScriptedLocal(Path(root), steps)),
    "memory": (lambda path: memory_root(), ScriptedRemote),
}


@pytest.mark.parametrize(
    ("member", "what"), [("local", "whole"), ("memory", "whole"), ("local", "delta"), ("local", "compaction")]
)
def test_a_full_disk_at_any_moment_leaves_what_was_there(tmp_path: Path, member: str, what: str) -> None:
    make_root, scripted = MEMBERS[member]
    outcomes, changed = [], True
    for at in range(1, MANY_STEPS):
        if changed:
            root = make_root(tmp_path / str(at))
            _, states = chain(root, keep=9)
        model = model_on(states)
        states["samples-000000000004"], states[f"{SECOND}-whole"] = model.copy(), states[SECOND]
        steps = Steps(at, disk_full)
        store = tight_store(root, keep=1, files=scripted(root, steps))
        try:
            if what == "compaction":
                store.compact(SECOND)
            else:
                store.save(model.delta(SECOND) if what == "delta" else model.whole())
        except SaveError as error:
            outcomes.append(str(error).partition(": ")[2])
        assert sorted(open_files(root).names()) == tight_store(root).names(), "no half one is left"
        loaded = tight_store(root).load()
        assert loaded.skipped == ()
        assert_state(loaded, states[loaded.name])
        if steps.done < at:
            break
        assert "No space left on device" in outcomes[-1]
        assert "\n" not in outcomes[-1]
        changed = " is complete" in outcomes[-1]
        assert loaded.name == (outcomes[-1].partition(" is complete")[0][-len(loaded.name) :] if changed else SECOND)
        assert changed or "as they were" in outcomes[-1] or "it is as it was" in outcomes[-1]
    assert steps.done < at, "the last went through"
    assert len(outcomes) >= 15
    assert len(set(outcomes)) == (1 if what == "delta" else 2), "beside a delta nothing is removed"
    again = tight_store(root, keep=1)
    assert again.compact(again.names()[-1]).endswith("-whole") == (what != "whole")
    assert len(again.names()) == 1


def test_the_sentence_names_the_place_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(SaveError) as caught:
        small_store(tmp_path, files=ScriptedLocal(tmp_path, Steps(3, disk_full))).save(make_snapshot(10))
    assert str(caught.value) == (
        f"{tmp_path}: the new checkpoint could not be written (No space left on device), earlier ones are as they "
        "were: make room, or set train.checkpoint_dir to another place"
    )


def test_a_folder_that_cannot_be_made_is_a_save_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SaveError, match="could not be written"):
        small_store(tmp_path / "file").save(make_snapshot(10))


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small_store(tmp_path, files=ScriptedLocal(tmp_path, Steps(5, interrupt))).save(make_snapshot(10))
    assert list(tmp_path.iterdir()) == []


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed_save(root: Path, at: int) -> bool:
    """Saves in a process of its own, which dies at step `at`; whether it did."""
    child = os.fork()
    if child == 0:
        try:
            small_store(root, keep=1, files=ScriptedLocal(root, Steps(at, kill_myself))).save(make_snapshot(20))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def test_kill_9_at_any_moment_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    found = []
    for at in range(1, MANY_STEPS):
        root = tmp_path / str(at)
        small_store(root).save(make_snapshot(10))
        if not killed_save(root, at):
            break
        store = small_store(root, keep=1)
        loaded = store.load()
        found.append(loaded.samples)
        assert_holds(loaded, loaded.samples)
        assert loaded.skipped == ()
        store.save(make_snapshot(30))
        assert [path.name for path in root.iterdir()] == ["samples-000000000030"]
        assert_holds(store.load(), 30)
    assert found == sorted(found)
    assert len(found) >= 15
    assert set(found) == {10, 20}


def test_a_reader_that_finds_its_checkpoint_removed_takes_the_one_that_took_its_place(tmp_path: Path) -> None:
    writer = small_store(tmp_path, keep=1)
    writer.save(make_snapshot(10))

    class Late(LocalFiles):
        """Between listing and reading, another process saves and removes what was listed."""

        saved = False

        def read(self, path: str, start: int, stop: int) -> bytes:
            if not self.saved:
                self.saved = True
                writer.save(make_snapshot(20))
            return super().read(path, start, stop)

    loaded = small_store(tmp_path, files=Late(str(tmp_path), tmp_path)).load()
    assert_holds(loaded, 20)
    assert loaded.skipped == ()


def test_loading_while_another_thread_saves_gives_whole_checkpoints(tmp_path: Path) -> None:
    small_store(tmp_path, keep=1).save(make_snapshot(1))
    writer = small_store(tmp_path, keep=1)
    saver = threading.Thread(target=lambda: [writer.save(make_snapshot(samples)) for samples in range(2, 16)])
    saver.start()
    loads = 0
    try:
        while saver.is_alive() or loads == 0:
            try:
                loaded = small_store(tmp_path).load()
                assert_holds(loaded, loaded.samples)
                loads += 1
            except CheckpointError as error:  # rows of a checkpoint that was removed after it was opened
                assert "missing" in str(error) or "holds no checkpoint" in str(error)  # noqa: PT017
    finally:
        saver.join()
    assert_holds(small_store(tmp_path).load(), 15)
