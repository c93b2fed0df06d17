"""What a run leaves behind and how it is watched: run folder, observers, curves, statistics, doctor."""

from typing import TYPE_CHECKING

from covey.functions import when_used

if TYPE_CHECKING:
    from covey.metric_names import METRICS, MetricDefinition, describe_metric
    from covey.observe.console import ConsoleProgress
    from covey.observe.curve import draw_comparison, draw_learning_curve, draw_run
    from covey.observe.doctor import Diagnosis, Doctor, Thresholds, diagnose
    from covey.observe.observers import BaseObserver, Observer, Observers, RunFolderWriter
    from covey.observe.run_folder import RunFolder, collect_versions
    from covey.observe.statistics import PairedDifference, mcnemar_exact, paired_difference, wilson_interval
    from covey.observe.trackers import MLflowTracker, TensorBoardTracker, TrackioTracker, WandbTracker, make_observers
    from covey.processes import memory_metrics, peak_cuda_bytes, peak_rss_bytes

__all__ = [
    "METRICS",
    "BaseObserver",
    "ConsoleProgress",
    "Diagnosis",
    "Doctor",
    "MLflowTracker",
    "MetricDefinition",
    "Observer",
    "Observers",
    "PairedDifference",
    "RunFolder",
    "RunFolderWriter",
    "TensorBoardTracker",
    "Thresholds",
    "TrackioTracker",
    "WandbTracker",
    "collect_versions",
    "describe_metric",
    "diagnose",
    "draw_comparison",
    "draw_learning_curve",
    "draw_run",
    "make_observers",
    "mcnemar_exact",
    "memory_metrics",
    "paired_difference",
    "peak_cuda_bytes",
    "peak_rss_bytes",
    "wilson_interval",
]

__getattr__ = when_used(
    __name__,
    {
        "covey.metric_names": "METRICS MetricDefinition describe_metric",
        "covey.observe.console": "ConsoleProgress",
        "covey.observe.curve": "draw_comparison draw_learning_curve draw_run",
        "covey.observe.doctor": "Diagnosis Doctor Thresholds diagnose",
        "covey.observe.observers": "BaseObserver Observer Observers RunFolderWriter",
        "covey.observe.run_folder": "RunFolder collect_versions",
        "covey.observe.statistics": "PairedDifference mcnemar_exact paired_difference wilson_interval",
        "covey.observe.trackers": "MLflowTracker TensorBoardTracker TrackioTracker WandbTracker make_observers",
        "covey.processes": "memory_metrics peak_cuda_bytes peak_rss_bytes",
    },
)
