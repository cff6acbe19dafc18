"""Measures of speed and parallelism that are plain arithmetic (ShadowSync, arXiv 2003.03477)."""


def example_level_parallelism(batch_size: int, workers: int, trainers: int) -> int:
    """ELP: samples that are in a forward or backward pass at once = batch size × workers per trainer × trainers."""
    return batch_size * workers * trainers


def average_sync_gap(iterations: int, syncs: int) -> float | None:
    """Iterations per synchronisation, summed over the trainers; None where there was no synchronisation."""
    return iterations / syncs if syncs > 0 else None


def rate(amount: float, seconds: float) -> float:
    """Amount per second; 0 where no time has passed."""
    return amount / seconds if seconds > 0 else 0.0
