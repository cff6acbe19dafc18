"""Searches learning rates and synchronisation on the demo with Ray Tune; each trial is a job of its own.

    pip install 'shadowsync[ray,demo]'
    python examples/tune.py --trials 16 --concurrent 2

ASHA stops trials that are worse than two thirds of the others at the same number of samples. Words after the options
are overrides for all trials, as `shadowsync train` takes them: train.trainers=4 model.name=deepfm.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler

from shadowsync import Job, ShadowSyncError
from shadowsync.config import load
from shadowsync.metrics.history import Frame

SPACE = {
    "sync.alpha": tune.uniform(0.05, 0.9),
    "sync.k": tune.choice([1, 5, 20, 80]),
    "train.lr": tune.loguniform(0.003, 0.3),
    "embedding.lr": tune.loguniform(0.02, 1.0),
}
ALWAYS = ["sync.method=easgd", "sync.schedule=every_k", "report.every_s=0.5", "report.html=false"]


def trial(choices: dict[str, Any], overrides: list[str]) -> None:
    """Trains one choice and reports as it goes; Tune ends the process when it has seen enough."""
    config = load(None, [*ALWAYS, *overrides, *(f"{key}={value}" for key, value in choices.items())])

    def report(frame: Frame) -> None:
        if frame.ne_window is not None and frame.samples < frame.total_samples:  # the end comes with the test, below
            tune.report({"samples": frame.samples, "ne": frame.ne_window, "auc": frame.auc})

    result = Job(config, out=Path(tune.get_context().get_trial_dir()) / "run").run(on_frame=report)
    assert result.test is not None, "choose data with test rows: trials are compared by them"
    assert result.train is not None
    last = {"samples": result.data.trained_samples, "ne": result.train.ne_window, "auc": result.train.auc}
    tune.report({**last, "test_ne": result.test.ne, "test_auc": result.test.auc})


def search(options: argparse.Namespace, epochs: int) -> tune.ResultGrid:
    """All trials; those that ASHA stopped early have no `test_auc`."""
    samples = options.rows * epochs
    more = samples + 1  # or the last report, which holds the test, would come too late
    scheduler = ASHAScheduler(time_attr="samples", max_t=more, grace_period=max(1, samples // 9), reduction_factor=3)
    settings = tune.TuneConfig(
        metric="ne",
        mode="min",
        num_samples=options.trials,
        max_concurrent_trials=options.concurrent,
        scheduler=scheduler,
    )
    overrides = [f"data.rows={options.rows}", *options.overrides]
    function = tune.with_resources(tune.with_parameters(trial, overrides=overrides), {"cpu": 1})
    storage = tune.RunConfig(name="tune", storage_path=str(Path("runs").resolve()), verbose=1)
    return tune.Tuner(function, param_space=SPACE, tune_config=settings, run_config=storage).fit()


def show(results: tune.ResultGrid) -> None:
    """A line for every trial, the best first, and how to train with the best."""
    found = [results[number] for number in range(len(results))]
    ended = sorted(found, key=lambda one: float((one.metrics or {}).get("test_auc", 0.0)), reverse=True)
    print("test AUC  test NE  window NE   samples  choices")
    for one in ended:
        metrics, choices = one.metrics or {}, one.config or {}
        test = f"{metrics['test_auc']:8.4f} {metrics['test_ne']:8.4f}" if "test_auc" in metrics else " stopped early   "
        chosen = " ".join(f"{key}={value:.3g}" for key, value in choices.items())
        print(f"{test} {metrics.get('ne', float('nan')):10.4f} {metrics.get('samples', 0):9,}  {chosen}")
    best = " ".join(f"{key}={value:.4g}" for key, value in (ended[0].config or {}).items())
    print(f"best: shadowsync train sync.method=easgd sync.schedule=every_k {best}")


def main() -> None:
    """Reads the options, searches and shows what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=16, help="choices to be tried")
    parser.add_argument("--concurrent", type=int, default=2, help="trials at a time, one core each")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows to train on")
    parser.add_argument("overrides", nargs="*", help="key.path=value, for all trials")
    options = parser.parse_args()
    try:
        epochs = load(None, [*ALWAYS, *options.overrides]).data.epochs
    except ShadowSyncError as error:
        parser.error(str(error))
    ray.init(include_dashboard=False, log_to_driver=False)
    show(search(options, epochs))


if __name__ == "__main__":
    main()
