"""Tasks: prompts, and the check of their answers."""

from typing import TYPE_CHECKING

from covey.functions import when_used

if TYPE_CHECKING:
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

__getattr__ = when_used(
    __name__,
    {
        "covey.tasks.base": "Task configured_task get_task register_task task_names task_options",
        "covey.tasks.code": "Code",
        "covey.tasks.dataset": "Row build_prompts load_rows",
        "covey.tasks.order": "DataOrder WeightedOrder",
        "covey.tasks.fields": "Fields",
        "covey.tasks.gsm8k": "GSM8K",
        "covey.tasks.usmle": "USMLE",
    },
)
