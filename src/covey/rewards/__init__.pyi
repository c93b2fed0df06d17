"""The names of the package, for type checkers and for its `__getattr__`."""

from covey.rewards.code import CodeReward, Sandbox, TestHarness
from covey.rewards.extract import boxed_content, completion_text, final_number, last_number, parse_number, prompt_text
from covey.rewards.jail.harness import AssertTests, CallTests, ProgramTests, TestResult
from covey.rewards.jail.sandbox import Limits
from covey.rewards.judge import JudgeReward
from covey.rewards.maths import MathReward
from covey.rewards.option_letter import extract_choice
from covey.rewards.parallel import ParallelVerifier
from covey.rewards.text import exact_match, format_reward, json_reward, length_reward, numeric_match, tags_reward
from covey.rewards.verifier import RewardFunction, SupportsBatchVerify, Verifier, reward_name, verifier_from_reward

__all__ = [
    "AssertTests", "CallTests", "CodeReward", "JudgeReward", "Limits", "MathReward", "ParallelVerifier",
    "ProgramTests", "RewardFunction", "Sandbox", "SupportsBatchVerify", "TestHarness", "TestResult", "Verifier",
    "boxed_content", "completion_text", "exact_match", "extract_choice", "final_number", "format_reward",
    "json_reward", "last_number", "length_reward", "numeric_match", "parse_number", "prompt_text", "reward_name",
    "tags_reward", "verifier_from_reward",
]  # fmt: skip
