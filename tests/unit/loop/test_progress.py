"""The probe fails for a part that stands still, and says which."""

from specdecode_operator.loop.progress import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_part_that_stands_still_is_named() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.expect("urgent-0", every_seconds=10)
    progress.expect("events", every_seconds=30)
    clock.now = 9
    progress.beat("events")
    clock.now = 20
    assert progress.stalled() == ("urgent-0 has not moved for 20 s",)
    assert progress.oldest_beat_seconds() == 20


def test_all_is_well_while_everything_comes_round() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.expect("events", every_seconds=30)
    for _ in range(100):
        clock.now += 1
        progress.beat("events")
        assert progress.stalled() == ()
