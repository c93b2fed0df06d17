"""The names of the package, for type checkers and for its `__getattr__`."""

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
    "METRICS", "BaseObserver", "ConsoleProgress", "Diagnosis", "Doctor", "MLflowTracker", "MetricDefinition",
    "Observer", "Observers", "PairedDifference", "RunFolder", "RunFolderWriter", "TensorBoardTracker", "Thresholds",
    "TrackioTracker", "WandbTracker", "collect_versions", "describe_metric", "diagnose", "draw_comparison",
    "draw_learning_curve", "draw_run", "make_observers", "mcnemar_exact", "memory_metrics", "paired_difference",
    "peak_cuda_bytes", "peak_rss_bytes", "wilson_interval",
]  # fmt: skip
