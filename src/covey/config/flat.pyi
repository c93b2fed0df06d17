"""GRPOConfig's flat names for type checkers and editors. Generated from the sections; do not edit.

COVEY_WRITE_DOCS=1 pytest tests/test_config_types.py      # writes it
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypedDict

from covey.config.algorithm import AdaptiveEntropy, AlgorithmConfig
from covey.config.data import DataConfig, RewardConfig
from covey.config.environment import EnvironmentConfig
from covey.config.run import RunConfig
from covey.config.sampling import ModelConfig, SamplingConfig, VLLMConfig
from covey.config.server import DistributedConfig, ServerConfig
from covey.config.teacher import TeacherConfig
from covey.config.training import EvaluationConfig, OptimConfig, PhaseConfig, ScheduleConfig

class Settings(TypedDict, total=False):
    """Keyword arguments of `GRPOConfig` and of its `replace`."""

    model: ModelConfig | Mapping[str, Any] | str | Path
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    quantization: Literal["none", "nf4", "int8", "torchao_int8"]
    device: str
    gradient_checkpointing: bool
    trust_remote_code: bool
    use_peft: bool
    lora_r: int
    lora_alpha: float
    lora_dropout: float
    lora_target_modules: str | list[str] | tuple[str, ...]
    prefix_sharing: bool
    fused_layers: bool
    adapter: str | Path | None
    loss_type: str | Callable[..., Any]
    loss_parameters: Mapping[str, bool | int | float | str] | None
    adv_estimator: (
        Literal[
            "grpo",
            "naive_grpo",
            "dr_grpo",
            "rloo",
            "gigpo",
            "gdpo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "remax",
            "opo",
            "optimal_token_baseline",
            "gpg",
            "grpo_passk",
        ]
        | str
        | Callable[..., Any]
    )
    adv_parameters: Mapping[str, bool | int | float | str] | None
    scale_rewards: Literal["group", "batch", "none"] | bool
    beta: float
    kl_estimator: Literal["k1", "k2", "k3", "k1+", "k3+", "abs", "k3_unbiased", "exact", "exact_weighted"]
    epsilon: float | None
    num_iterations: int
    num_minibatches: int
    entropy_coef: float
    adaptive_entropy: AdaptiveEntropy | Mapping[str, Any] | None
    mask_truncated_completions: bool
    off_policy_mask_threshold: float | None
    reference_drift_threshold: float | str | None
    keep_sampling_mask: bool
    validity_min_length: int | None
    top_entropy_quantile: float
    importance_sampling_correction: str
    reference_update_steps: int | None
    reference_ema_decay: float
    dynamic_sampling: int
    down_sampling: str | Callable[..., Any]
    teacher: TeacherConfig | Mapping[str, Any] | None
    num_generations: int
    max_generations: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_completion_length: int
    stop_strings: list[str] | tuple[str, ...] | str
    engine: Literal["covey", "vllm"]
    sampler_dtype: Literal["model", "float32", "bfloat16", "int8"]
    kv_cache_gb: float
    max_batch_size: int
    gpu_memory_utilization: float
    llm_arguments: Mapping[str, bool | int | float | str] | None
    dataset: str | Path | None
    eval_dataset: str | Path | None
    eval_fraction: float
    task: str | None
    prompts_per_step: int
    max_prompt_length: int | None
    long_prompts: Literal["error", "truncate", "drop"]
    prompt_order: Literal["random", "given", "difficulty"]
    system_prompt: str | None
    prompt_column: str
    chat_template_kwargs: Mapping[str, bool | int | float | str] | None
    processor_kwargs: Mapping[str, bool | int | float | str | Mapping[str, int]] | None
    functions: list[str] | tuple[str, ...] | str
    reward_weights: list[float] | tuple[float, ...] | None
    correctness: str | None
    reward_timeout: float
    soft_overlong_cache: int
    world: str | None
    tools: list[str] | tuple[str, ...] | str
    max_turns: int | None
    history_length: int | None
    action_format: Literal["tags", "text", "turn", "call", "choice"]
    show_actions: bool
    invalid_action_penalty: float
    failed_episodes: Literal["exclude", "score"]
    max_observation_tokens: int
    max_conversation_tokens: int
    parallel_episodes: int
    step_seconds: float
    inference_server_url: str | list[str] | tuple[str, ...] | None
    inference_server_kind: str
    server_token: str | None
    adapter_folder: str | None
    server_timeout: float
    server_retry_seconds: float
    samplers: int | None
    ray_address: str
    gpus_per_sampler: float | None
    groups_per_unit: int
    learners: int
    learner_kind: Literal["auto", "replicated", "sharded"]
    timeout_seconds: float
    max_restarts: int
    reward_workers: int | None
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"]
    learning_rate: float
    embedding_lr: float | None
    optimizer_parameters: Mapping[Literal["weight_decay", "beta1", "beta2", "epsilon"], float]
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "constant",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ]
    lr_scheduler_kwargs: Mapping[str, bool | int | float | str] | None
    warmup_steps: float
    max_grad_norm: float
    autocast: Literal["none", "bfloat16", "float16"]
    offload: bool
    tokens_per_micro_batch: int
    max_steps: int
    max_optimizer_steps: int | None
    num_train_epochs: float
    max_minutes: float | None
    phases: list[PhaseConfig | Mapping[str, Any]] | tuple[PhaseConfig | Mapping[str, Any], ...]
    max_staleness: int
    stale_groups: Literal["wait", "drop"]
    eval_steps: int
    eval_on_start: bool
    eval_at_end: bool
    num_eval_prompts: int | None
    eval_temperature: float
    num_generations_eval: int
    early_stopping_patience: int | None
    metric_for_best_model: str
    load_best_model_at_end: bool
    output_dir: str | Path
    overwrite: bool
    run_name: str | None
    seed: int
    logging_steps: int
    save_steps: int
    save_total_limit: int | None
    report_to: (
        list[Literal["tensorboard", "wandb", "trackio", "mlflow"]]
        | tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...]
        | Literal["tensorboard", "wandb", "trackio", "mlflow", "none"]
        | None
    )
    report_completions: int
    log_completions: bool
    keep_batches: bool
    ledger: str
    allow_mixture: bool
    progress: bool
    num_completions_to_print: int | None
    algorithm: AlgorithmConfig | Mapping[str, Any]
    sampling: SamplingConfig | Mapping[str, Any]
    vllm: VLLMConfig | Mapping[str, Any]
    data: DataConfig | Mapping[str, Any]
    rewards: RewardConfig | Mapping[str, Any]
    environment: EnvironmentConfig | Mapping[str, Any]
    server: ServerConfig | Mapping[str, Any]
    distributed: DistributedConfig | Mapping[str, Any]
    optim: OptimConfig | Mapping[str, Any]
    schedule: ScheduleConfig | Mapping[str, Any]
    evaluation: EvaluationConfig | Mapping[str, Any]
    run: RunConfig | Mapping[str, Any]
    kl_coef: float
    kl_coeff: float
    num_samples_per_prompt: int
    max_new_tokens: int
    clip_epsilon: float | None
    num_epochs: float
    update_reference_every: int | None
    normalize_advantages: Literal["group", "batch", "none"] | bool
    norm_adv_by_std_in_grpo: Literal["group", "batch", "none"] | bool
    use_baseline: bool
    use_unbiased_kl: bool
    use_off_policy_masking: bool
    off_policy_threshold: float | None
    upload_adapters_to_server: bool

class Flat:
    """Fields that are read without the name of their section."""

    dtype: Final[Literal["auto", "float32", "bfloat16", "float16"]]
    """Number format of weights and arithmetic. auto = bfloat16 on a GPU, else float32; float32 if use_peft is false.
    On a CPU bfloat16 is that of frozen matrices and their products alone: half the memory, and less time on a
    processor with AVX512-BF16 or AMX."""
    quantization: Final[Literal["none", "nf4", "int8", "torchao_int8"]]
    """Number format of the frozen linear layers under the adapter (QLoRA): nf4 (4 bits) or int8 of bitsandbytes, or
    torchao_int8 (extra quantization). It needs use_peft."""
    device: Final[str]
    """auto, cpu, cuda or cuda:N; auto = the first GPU if there is one."""
    gradient_checkpointing: Final[bool]
    """Recompute activations in the backward pass. This is about 30 % slower and takes far less memory."""
    trust_remote_code: Final[bool]
    """Run Python code that comes with the model. Use it only for models that you trust."""
    use_peft: Final[bool]
    """Train a LoRA adapter on the frozen model; false trains all weights."""
    lora_r: Final[int]
    """Rank of the adapter."""
    lora_alpha: Final[float]
    """Scale of the adapter: its output is multiplied by alpha / r."""
    lora_dropout: Final[float]
    """Dropout before the adapter during training."""
    lora_target_modules: Final[str | tuple[str, ...]]
    """Layers with an adapter: all-linear, a name such as q_proj, a list of names, or a regular expression."""
    prefix_sharing: Final[bool]
    """Compute shared prefixes of sequences once in training; false = compute each sequence by itself."""
    fused_layers: Final[bool]
    """Train LoRA with hand-written layers, which keep half the activations. They exist for Llama-like models (Llama,
    Qwen, Gemma, Mistral, Phi, GLM and others). false = the model's own layers, as with all other models."""
    adapter: Final[str | None]
    """Folder of a PEFT adapter to start from; none = a new one."""
    loss_type: Final[str]
    """The loss. grpo averages over the tokens of a completion, then over completions; dapo over all tokens; bnpo over
    all tokens that are trained; dr_grpo divides by a constant. gspo and gspo_token use one ratio per completion,
    luspo too, times length; gmpo uses the geometric mean of clipped ratios. Others: cispo, sapo, vespo, clip_cov and
    kl_cov (limit tokens of high covariance), reinforce (no ratio, no clip), reinforce_kept (usmle-qa.md to the
    letter: mean over the completions that masks keep, KL over all sampled tokens). Your own: FILE.py:NAME."""
    loss_parameters: Final[dict[str, bool | int | float | str]]
    """Parameters of the loss by name. Losses that clip: epsilon_high (upper clip range; default epsilon, for dapo
    0.28), delta (cap on the ratio, which also bounds the loss of negative advantages), importance_sampling_level
    (token, sequence or gspo_token). cispo: epsilon_max. sapo: sapo_temperature_pos, sapo_temperature_neg. vespo: {
    k_pos = 2.0 } and so on."""
    adv_estimator: Final[
        Literal[
            "grpo",
            "naive_grpo",
            "dr_grpo",
            "rloo",
            "gigpo",
            "gdpo",
            "reinforce_plus_plus",
            "reinforce_plus_plus_baseline",
            "remax",
            "opo",
            "optimal_token_baseline",
            "gpg",
            "grpo_passk",
        ]
        | str
    ]
    """How rewards become advantages. grpo: against the group's mean and standard deviation. naive_grpo: the same,
    with each multi-turn episode counted once. dr_grpo: mean only. rloo: mean of the others. gigpo: for agents, also
    compares turns that began with the same observation. gdpo: normalises each reward function in its group, then
    their sum over the batch. reinforce_plus_plus: against the batch; reinforce_plus_plus_baseline: group mean, then
    batch. remax: against the greedy completion. opo: mean weighted by length. optimal_token_baseline: per token,
    weighted by gradient length. gpg. grpo_passk: only the best of the group. Your own: FILE.py:FUNCTION or
    MODULE:FUNCTION."""
    adv_parameters: Final[dict[str, bool | int | float | str]]
    """Parameters of the estimator by name. reinforce_plus_plus: gamma. Estimators that divide by a standard
    deviation: std_correction (1 divides by G - 1, 0 by G). grpo with agents: step_score, the score of a turn: episode
    (reward of the whole episode), return (discounted return) or step (the turn's own reward). discount of returns.
    gigpo: step_advantage_weight (the paper's omega)."""
    scale_rewards: Final[Literal["group", "batch", "none"]]
    """Divide advantages by the standard deviation of the group, of the whole batch, or not at all. No effect with an
    adv_estimator that does not divide, such as dr_grpo and rloo. True means group, False none."""
    beta: Final[float]
    """Weight of the KL divergence from the reference model; 0 turns it off and saves its forward pass."""
    kl_estimator: Final[Literal["k1", "k2", "k3", "k1+", "k3+", "abs", "k3_unbiased", "exact", "exact_weighted"]]
    """How that KL is estimated per token. k3 is never negative; k3_unbiased is also correct off-policy; exact sums
    over the vocabulary; exact_weighted reproduces a published formula that is not unbiased."""
    epsilon: Final[float | None]
    """Lower clip range: an importance ratio below 1 - epsilon has no further gradient. none = the default of
    loss_type: 0.2; 0.0003 for gspo and gspo_token; 0.002 for luspo; for gmpo 0.4, a range of log-ratios."""
    num_iterations: Final[int]
    """Passes over each batch of completions (the paper's mu)."""
    num_minibatches: Final[int]
    """Optimiser steps of each pass, on random parts of the batch. Ratios compare with the policy that sampled the
    batch."""
    entropy_coef: Final[float]
    """Weight of an entropy bonus; 0 = off."""
    adaptive_entropy: Final[AdaptiveEntropy | None]
    """Adapt entropy_coef to keep the entropy at a target (Skywork-OR1). A table, which may be empty: { target = 0.2,
    delta = 0.005, min = 0.0, max = 1.0 }. After each optimiser step entropy_coef moves by delta: up if the entropy
    (in nats, mean over trained tokens) is at or below target, else down. The bonus acts only after a step with
    entropy at or below target. none = off."""
    mask_truncated_completions: Final[bool]
    """Leave completions that hit max_completion_length out of the loss."""
    off_policy_mask_threshold: Final[float | None]
    """Remove the policy gradient of a completion with a negative advantage if the mean over its tokens of old - new
    log-probability, in nats, is above this. Averages and its KL term stay (DeepSeek-V3.2, equation 8). none = off."""
    reference_drift_threshold: Final[float | str | None]
    """Leave a completion out of the loss, whatever its advantage, unless the mean over its tokens of policy -
    reference log-probability, in nats, is below this; 0.5 in the USMLE recipe. sum:12 = the sum over its tokens. none
    = off."""
    keep_sampling_mask: Final[bool]
    """Store the ids that top_k, top_p and min_p left for each token, and compute all log-probabilities over those ids
    only (DeepSeek-V3.2)."""
    validity_min_length: Final[int | None]
    """Validity mask: leave a completion out of the loss if it has fewer characters than this, has no valid answer or
    repeats itself. It still counts in its group's mean. Without invalid completions nothing teaches the valid form.
    none = off; 10 in the USMLE recipe."""
    top_entropy_quantile: Final[float]
    """Only this fraction of the tokens, those of highest entropy, has a policy gradient. Averages, KL and entropy
    terms still cover all tokens. 1 = all, 0.2 in arXiv 2506.01939."""
    importance_sampling_correction: Final[str]
    """Correct for a sampler whose log-probabilities differ from the trainer's. token_truncate and sequence_truncate
    weight tokens or completions by their ratio, capped; token_mask and sequence_mask drop those beyond the cap. The
    cap is 3 unless given (token_truncate:2), or a smallest and a largest ratio (token_mask:0.5:5: IcePop). auto =
    token_truncate with vLLM, a server of another kind than covey, a sampling.sampler_dtype narrower than the model's,
    or schedule.max_staleness above 0; else off."""
    reference_update_steps: Final[int | None]
    """Optimiser steps between updates of the reference from the policy; none = the reference never changes."""
    reference_ema_decay: Final[float]
    """Share of the old reference that an update keeps (exponential moving average); 0 = a copy."""
    dynamic_sampling: Final[int]
    """Replace groups whose rewards are all equal by newly sampled ones (DAPO). The number is how many times a step
    may sample in all before it trains on the groups it has. 0 = off; 3 is usual."""
    down_sampling: Final[str]
    """Train only on some completions of each group, 4 unless a number is given: max_variance:8 (those whose rewards
    vary most: PODS), largest_advantage:8 (CPPO), shortest:8 and token_efficiency:8 (GFPO), first:8, or your own,
    FILE.py:RULE:8. Advantages compare the selected completions or the whole group, as in the rule's paper (group for
    largest_advantage); append `:selected` or `:group` to choose. none = all."""
    teacher: Final[TeacherConfig | None]
    """A teacher, which says of each sampled token how likely it should be, beside the rewards or in their place. A
    table: { weights = "ema", context = "solution", use = "sum", coef = 1.0, ... }; docs/teachers.md lists its
    settings. none = off."""
    num_generations: Final[int]
    """Completions per prompt (the group size G); 2 or more with most values of algorithm.adv_estimator."""
    max_generations: Final[int | None]
    """Most completions per prompt. If the rewards of a group are all equal and below the best of the step,
    num_generations more are sampled until they differ or this number is reached. none = off."""
    temperature: Final[float]
    """Divides the logits before the softmax; above 1 explores more."""
    top_k: Final[int]
    """Sample only from the k most likely tokens; 0 = all."""
    top_p: Final[float]
    """Sample only from the smallest set of tokens with this total probability; 1 = all."""
    min_p: Final[float]
    """Sample only tokens with at least this fraction of the most likely token's probability; 0 = all."""
    max_completion_length: Final[int]
    """Longest completion, in tokens; longer ones are cut off."""
    stop_strings: Final[tuple[str, ...]]
    """Texts that end a completion, in addition to the model's end-of-sequence tokens."""
    engine: Final[Literal["covey", "vllm"]]
    """The sampler in this process: covey (for CPUs and small models) or vllm, which must be installed; the vllm
    section configures it. Not measured on a GPU."""
    sampler_dtype: Final[Literal["model", "float32", "bfloat16", "int8"]]
    """Number format of the sampler's copy of the weights; model = that of the model. A narrower one can be faster but
    samples from a slightly different policy, which algorithm.importance_sampling_correction corrects. int8 is for
    CPUs and rounds what the weights are multiplied with, too."""
    kv_cache_gb: Final[float]
    """Memory for the KV cache, in GiB. It holds running completions, and earlier prompts and conversations while
    there is room. Completions that do not fit wait."""
    max_batch_size: Final[int]
    """Completions sampled at the same time; the others wait."""
    gpu_memory_utilization: Final[float]
    """Share of the GPU's memory for vLLM's weights and KV cache. On a CPU, sampling.kv_cache_gb sets the KV cache."""
    llm_arguments: Final[dict[str, bool | int | float | str]]
    """Arguments of vllm.LLM by name; they replace Covey's. Examples: tensor_parallel_size (GPUs that share the
    model), max_model_len (longest prompt with completion, in tokens), enforce_eager, enable_sleep_mode = false (vLLM
    keeps its memory during the update), enable_lora = false (send merged weights, as always on CPUs)."""
    dataset: Final[str | None]
    """Training prompts: a .jsonl, .json, .csv or .parquet file, or a dataset id on the Hugging Face hub. none = the
    task's own."""
    eval_dataset: Final[str | None]
    """Held-out prompts, in the same forms as dataset. none = the task's own, or no evaluation."""
    eval_fraction: Final[float]
    """Share of dataset's distinct prompts to hold out for evaluation; 0 = none. A hash of the prompt chooses them, so
    order and seed do not matter, and rows with equal prompts stay together."""
    task: Final[str | None]
    """The task that writes prompts and scores answers: a name (arithmetic) or FILE.py:TASK. none = the dataset's
    prompts as they are."""
    prompts_per_step: Final[int]
    """Prompts in each step. A step samples num_generations completions of each."""
    max_prompt_length: Final[int | None]
    """Longest prompt, in tokens. A prompt and max_completion_length must also fit into the model's context. none =
    only that limit."""
    long_prompts: Final[Literal["error", "truncate", "drop"]]
    """What to do with prompts that are too long. error: stop before training. truncate: keep their last tokens, which
    can change the question. drop: leave them out. A warning counts the cut or dropped prompts."""
    prompt_order: Final[Literal["random", "given", "difficulty"]]
    """Order of the prompts. random: shuffled again in each epoch. given: as in the dataset. difficulty: drawn at
    random, most often new prompts and prompts with half of their completions right; needs a task or
    rewards.correctness."""
    system_prompt: Final[str | None]
    """System message for prompts without one; a text prompt then becomes the user's message. none = add nothing."""
    prompt_column: Final[str]
    """Dataset column that holds the prompt, a string or a list of messages."""
    chat_template_kwargs: Final[dict[str, bool | int | float | str]]
    """More arguments for the chat template, such as enable_thinking."""
    processor_kwargs: Final[dict[str, bool | int | float | str | dict[str, int]]]
    """More arguments for a vision model's processor, such as do_image_splitting or the table size."""
    functions: Final[tuple[str, ...]]
    """Reward functions: FILE.py:FUNCTION or MODULE:FUNCTION. An empty list = the task's own."""
    reward_weights: Final[tuple[float, ...] | None]
    """One weight for each reward function, in the same order; none = 1 for each."""
    correctness: Final[str | None]
    """The function that returns 1 for right and 0 for wrong completions: the name of a reward function, or
    FILE.py:FUNCTION or MODULE:FUNCTION for another one. Accuracy, prompt_order = difficulty and min_accuracy need it.
    none = the task decides; without a task there is no accuracy."""
    reward_timeout: Final[float]
    """Time limit for one call of a reward function, in seconds; a longer call stops the run. 1e9 = no limit."""
    soft_overlong_cache: Final[int]
    """Length of DAPO's soft overlong penalty, in tokens before max_completion_length. Over this range the penalty
    rises linearly to 1. Advantages take it off the reward; the metric reward does not. 0 = off."""
    world: Final[str | None]
    """The world to act in, with options: house, house:rooms=4, gymnasium:env=FrozenLake-v1, or your own as
    FILE.py:WORLD or FILE.py:WORLD:size=9. none = prompts with single answers."""
    tools: Final[tuple[str, ...]]
    """Functions that the model may call while it answers prompts: FILE.py:FUNCTION, "mcp:COMMAND" or "mcp:URL" (an
    MCP server). Rewards are those of the task."""
    max_turns: Final[int | None]
    """Most turns of an episode; none = the world's own limit, with tools no limit."""
    history_length: Final[int | None]
    """Give each turn its own prompt, with this many earlier turns; 2 is usual. none = one growing conversation, whose
    KV cache is kept between turns."""
    action_format: Final[Literal["tags", "text", "turn", "call", "choice"]]
    """How the action is read from a turn: text (its first line), turn (all of it), tags (<action>...</action>), call
    (a function call: its name and arguments as JSON), choice (only an admissible action can be sampled)."""
    show_actions: Final[bool]
    """List the admissible actions after each observation."""
    invalid_action_penalty: Final[float]
    """Penalty subtracted from the reward of a turn without a valid action."""
    failed_episodes: Final[Literal["exclude", "score"]]
    """What to do with episodes that end because the environment failed. exclude: leave them out of their group and
    the loss. score: keep the reward so far."""
    max_observation_tokens: Final[int]
    """Longest observation or result of a tool, in tokens. Longer ones are cut, and a metric counts them."""
    max_conversation_tokens: Final[int]
    """Longest conversation after the first prompt, in tokens; a longer episode ends. Memory grows with it. With
    history_length: longest prompt with history, in tokens; older turns are dropped."""
    parallel_episodes: Final[int]
    """Episodes played at the same time, each in its own process."""
    step_seconds: Final[float]
    """Time limit for a step of the environment or a call of a tool, in seconds; a reset may take three times as
    long."""
    inference_server_url: Final[str | tuple[str, ...] | None]
    """Address of the inference server that samples, such as http://127.0.0.1:8000 (the default of `covey serve`).
    Several addresses: a list, or text with commas. The adapter is uploaded to each. none = sample in this process."""
    inference_server_kind: Final[str]
    """covey (`covey serve`), vllm (vLLM's OpenAI server with run-time LoRA loading), sglang (SGLang's server), or
    FILE.py:NAME (your own dialect, see docs/use.md)."""
    server_token: Final[str | None]
    """Bearer token of the server; none = the environment variable COVEY_SERVER_TOKEN. It is never saved."""
    adapter_folder: Final[str | None]
    """Folder from which vLLM, SGLang or your own server reads the weights; none = OUTPUT_DIR-adapters, beside the run
    folder."""
    server_timeout: Final[float]
    """Time limit for one request, in seconds."""
    server_retry_seconds: Final[float]
    """Time, in seconds, to repeat a failed request before the run stops. The run can then be resumed."""
    samplers: Final[int | None]
    """Ray actors that only sample. 0 = this process (or the servers) samples the same fixed batches, with the same
    results. none = this process samples a step in one call."""
    ray_address: Final[str]
    """Ray cluster as HOST:PORT. local = start one on this machine for the run. auto = the cluster of this machine,
    else local. Ray also starts the learners on a cluster; with local, torchrun starts them."""
    gpus_per_sampler: Final[float | None]
    """GPUs per sampler, from 0 to 1; none = 1 if the cluster has GPUs and model.device is not cpu, else 0."""
    groups_per_unit: Final[int]
    """Groups in a unit, the fixed batch that a sampler samples in one call. Results depend on it, in the last
    digits."""
    learners: Final[int]
    """Processes that train, each on its own GPU if there are any. `covey train` starts them on the Ray cluster, else
    with torchrun on this machine; you can also call torchrun yourself. They sample too if there is no other sampler.
    With samplers at 0 or more, results do not depend on their number."""
    learner_kind: Final[Literal["auto", "replicated", "sharded"]]
    """What each of several learners holds. replicated: all weights. sharded: a part of them (FSDP2). auto: sharded if
    weights and training state would fill 80 % of a device's memory, else replicated."""
    timeout_seconds: Final[float]
    """Give up a sampler or worker after this many seconds without an answer (at least 120 while it starts). Learners
    wait as long for each other, and restarts for a free place in the cluster."""
    max_restarts: Final[int]
    """How often in a row a failed sampler is replaced before the run continues without it. Also how often `covey
    train` restarts the learners after one died."""
    reward_workers: Final[int | None]
    """Ray actors that score completions, a group in each call, each actor on its own CPU. 0 = this process scores
    group by group, with the same results. none = this process scores all completions of a step in one call."""
    optimizer: Final[Literal["adamw", "adamw_8bit", "paged_adamw_8bit"]]
    """adamw: PyTorch's fused AdamW. adamw_8bit: AdamW of bitsandbytes (extra quantization), with 8-bit moments.
    paged_adamw_8bit: the same; its moments move to host memory when the GPU is full."""
    learning_rate: Final[float]
    """Peak learning rate. The default suits LoRA. To train all weights (use_peft = false), use about 1e-6."""
    embedding_lr: Final[float | None]
    """Learning rate of a trained embedding; none = learning_rate."""
    optimizer_parameters: Final[dict[Literal["weight_decay", "beta1", "beta2", "epsilon"], float]]
    """Parameters of AdamW by name: weight_decay (decoupled; default 0), beta1 (0.9), beta2 (0.999), epsilon
    (1e-8)."""
    lr_scheduler_type: Final[
        Literal[
            "linear",
            "cosine",
            "constant",
            "cosine_with_restarts",
            "polynomial",
            "inverse_sqrt",
            "cosine_with_min_lr",
            "cosine_warmup_with_min_lr",
            "warmup_stable_decay",
        ]
    ]
    """Learning-rate schedule after warm-up, as in transformers. linear and cosine fall to 0."""
    lr_scheduler_kwargs: Final[dict[str, bool | int | float | str]]
    """Options of the schedule, such as min_lr for cosine_with_min_lr or num_decay_steps for warmup_stable_decay."""
    warmup_steps: Final[float]
    """Steps over which the learning rate rises from 0; below 1 = a share of all steps. With max_optimizer_steps these
    are optimiser steps."""
    max_grad_norm: Final[float]
    """Scale gradients with a larger norm down to this norm; 0 = never."""
    autocast: Final[Literal["none", "bfloat16", "float16"]]
    """Mixed precision: matrix products use this type, weights and optimiser stay float32. float16 has adaptive loss
    scaling. none = compute in the type of the weights."""
    offload: Final[bool]
    """Keep the optimiser's moments, and the weights of a copied reference, in host memory between uses. This takes
    less GPU memory and makes each step slower. Not measured on a GPU."""
    tokens_per_micro_batch: Final[int]
    """Most tokens in one forward and backward pass, with shared prefixes counted once. It changes memory and speed,
    not the gradient. A longer sequence has a pass of its own."""
    max_steps: Final[int]
    """Length in steps. A step samples prompts_per_step groups and trains on them, which takes num_iterations x
    num_minibatches optimiser steps (default 1). -1 = as many steps as num_train_epochs gives."""
    max_optimizer_steps: Final[int | None]
    """Length in optimiser steps, in place of max_steps. Warm-up and learning-rate schedule then count optimiser steps
    too, and the last step may have fewer of them."""
    num_train_epochs: Final[float]
    """Passes over the dataset, when max_steps is -1."""
    max_minutes: Final[float | None]
    """Time limit in minutes of steps, without evaluations and checkpoints; none = no limit."""
    phases: Final[tuple[PhaseConfig, ...]]
    """Consecutive parts of the run. Each has one length (steps, tokens or minutes) and may set temperature, beta,
    num_generations, learning_rate or min_accuracy."""
    max_staleness: Final[int]
    """How many optimiser steps old the sampler's weights may be. 0 = sampling and training take turns. 1 or more =
    the next steps are sampled during training; importance_sampling_correction = auto is then token_truncate."""
    stale_groups: Final[Literal["wait", "drop"]]
    """What to do about samples older than max_staleness. wait: each update waits for running samples, and results are
    reproducible. drop: sampling goes on, and groups that are too old are dropped."""
    eval_steps: Final[int]
    """Evaluate every this many steps; 0 = not during training."""
    eval_on_start: Final[bool]
    """Evaluate before the first step."""
    eval_at_end: Final[bool]
    """Evaluate after the last step."""
    num_eval_prompts: Final[int | None]
    """Number of held-out prompts to use, from the first on; none = all."""
    eval_temperature: Final[float]
    """Sampling temperature in evaluation; 0 = greedy, else at least 0.001."""
    num_generations_eval: Final[int]
    """Completions per held-out prompt; above 1 needs eval_temperature above 0."""
    early_stopping_patience: Final[int | None]
    """Stop after this many evaluations without an improvement of metric_for_best_model; none = never."""
    metric_for_best_model: Final[str]
    """Evaluation metric that chooses the best checkpoint; higher is better. If no accuracy is known (no task, no
    rewards.correctness), eval/reward takes the place of eval/accuracy."""
    load_best_model_at_end: Final[bool]
    """End with the weights of the best evaluation, not the last ones."""
    output_dir: Final[str]
    """Folder for metrics, completions, checkpoints and settings. Default with a recipe: runs/NAME, where NAME is the
    name of its file (or of the folder that holds recipe.toml)."""
    overwrite: Final[bool]
    """Delete an earlier run in output_dir and start again. false = only if that run has no finished step."""
    run_name: Final[str | None]
    """Name of the run in reports and trackers; none = the folder's name."""
    seed: Final[int]
    """Seed of all random numbers: data order, new adapter, sampled completions."""
    logging_steps: Final[int]
    """Print metrics, and send them to trackers, every this many steps. metrics.jsonl has every step."""
    save_steps: Final[int]
    """Save a checkpoint every this many steps; 0 = only at the end of the run."""
    save_total_limit: Final[int | None]
    """Most checkpoints to keep; the oldest are deleted first. none = keep all."""
    report_to: Final[tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...]]
    """Experiment trackers that also get the metrics. The run folder always has them."""
    report_completions: Final[int]
    """Completions, with prompts and rewards, to send to trackers with a step's metrics; 0 = none. Later in a run,
    fewer steps send them."""
    log_completions: Final[bool]
    """Write sampled completions and their rewards into the run folder."""
    keep_batches: Final[bool]
    """Keep each step's token ids, log-probabilities and rewards, about 6 bytes per token. `covey doctor RUN --step N`
    computes a step again from them."""
    ledger: Final[str]
    """off, sampled:N (N random groups of each step, such as sampled:2) or all. The ledger records advantage, masks,
    ratio, loss and gradient of each token of these groups, about 50 bytes per token; `covey watch` shows it.
    sampled:2,all:50 = 2 groups, and all groups every 50 steps."""
    allow_mixture: Final[bool]
    """Let the machines of a run differ in GPUs, drivers, threads, or versions of torch and NumPy. Results then depend
    on which machine computes what. false = refuse such a cluster."""
    progress: Final[bool]
    """Show progress on the screen (standard error)."""
    num_completions_to_print: Final[int | None]
    """Completions to print each time metrics are printed; none = no completions."""
