"""The names of the package, for type checkers and for its `__getattr__`."""

from covey.tasks.base import Task, configured_task, get_task, register_task, task_names, task_options
from covey.tasks.code import Code
from covey.tasks.dataset import Row, build_prompts, load_rows
from covey.tasks.fields import Fields
from covey.tasks.gsm8k import GSM8K
from covey.tasks.order import DataOrder, WeightedOrder
from covey.tasks.usmle import USMLE

__all__ = [
    "GSM8K", "USMLE", "Code", "DataOrder", "Fields", "Row", "Task", "WeightedOrder", "build_prompts",
    "configured_task", "get_task", "load_rows", "register_task", "task_names", "task_options",
]  # fmt: skip
