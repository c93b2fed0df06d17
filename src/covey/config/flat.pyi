"""GRPOConfig's flat names for type checkers and editors. Generated from the sections; do not edit.

COVEY_WRITE_DOCS=1 pytest tests/test_config_types.py      # writes it
"""

# ruff: noqa: D403
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from covey.config.algorithm import AdaptiveEntropy, AlgorithmConfig
from covey.config.data import DataConfig
from covey.config.distributed import DistributedConfig
from covey.config.environment import EnvironmentConfig
from covey.config.rewards import RewardConfig
from covey.config.run import RunConfig
from covey.config.sampling import ModelConfig, SamplingConfig, VLLMConfig
from covey.config.server import ServerConfig
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
    num_generations: int
    max_generations: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    max_completion_length: int
    stop_strings: list[str] | tuple[str, ...] | str
    engine: Literal["covey", "vllm"]
    sampler_dtype: Literal["model", "float32", "bfloat16"]
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
    functions: list[str] | tuple[str, ...] | str
    reward_weights: list[float] | tuple[float, ...] | None
    correctness: str | None
    reward_timeout: float
    soft_overlong_cache: int
    world: str | None
    max_turns: int | None
    history_length: int | None
    action_format: Literal["tags", "text", "tool", "choice"]
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

    @property
    def dtype(self) -> Literal["auto", "float32", "bfloat16", "float16"]:
        """Number format of weights and arithmetic; auto = bfloat16 on a GPU, else float32. With use_peft false it is
        always float32.
        """
    @property
    def quantization(self) -> Literal["none", "nf4", "int8", "torchao_int8"]:
        """Hold the linear layers of the frozen model in fewer bits under the adapter (QLoRA): nf4 (4 bits) or int8 of
        bitsandbytes, or torchao_int8 (extra quantization). Only with use_peft.
        """
    @property
    def device(self) -> str:
        """auto, cpu, cuda or cuda:N; auto = the first GPU if there is one."""
    @property
    def gradient_checkpointing(self) -> bool:
        """Recompute activations in the backward pass: about 30 % slower, far less memory."""
    @property
    def trust_remote_code(self) -> bool:
        """Run Python code that comes with the model. Only for models that you trust."""
    @property
    def use_peft(self) -> bool:
        """Train a LoRA adapter on the frozen model; false trains all weights."""
    @property
    def lora_r(self) -> int:
        """Rank of the adapter."""
    @property
    def lora_alpha(self) -> float:
        """Scale of the adapter: its output is multiplied by alpha / r."""
    @property
    def lora_dropout(self) -> float:
        """Dropout before the adapter, in training only."""
    @property
    def lora_target_modules(self) -> str | tuple[str, ...]:
        """Layers that get an adapter: all-linear, or a list of module names such as q_proj."""
    @property
    def prefix_sharing(self) -> bool:
        """Compute shared prefixes of sequences once in training; false = each sequence by itself."""
    @property
    def fused_layers(self) -> bool:
        """Train LoRA with hand-written layers, which keep half the activations, on Llama-like models (Llama, Qwen,
        Gemma, Mistral, Phi, GLM and others). false, and any other model = the model's own layers.
        """
    @property
    def adapter(self) -> str | None:
        """Folder of a PEFT adapter to start from; none = a new one."""
    @property
    def loss_type(self) -> str:
        """The loss. grpo averages over the tokens of a completion, then over completions; dapo over all tokens; bnpo
        over all tokens that are trained; dr_grpo divides by a constant. gspo and gspo_token use one ratio per
        completion, luspo too, times length; gmpo uses the geometric mean of clipped ratios. Others: cispo, sapo,
        vespo, clip_cov and kl_cov (limit tokens of high covariance), reinforce (no ratio, no clip), reinforce_kept
        (usmle-qa.md to the letter: mean over the completions that masks keep, KL over all sampled tokens). Your own:
        FILE.py:NAME.
        """
    @property
    def loss_parameters(self) -> dict[str, bool | int | float | str]:
        """Parameters of the loss by name. Losses that clip: epsilon_high (upper clip range; default epsilon, for dapo
        0.28), delta (cap on the ratio, which also bounds the loss of negative advantages), importance_sampling_level
        (token, sequence or gspo_token). cispo: epsilon_max. sapo: sapo_temperature_pos, sapo_temperature_neg. vespo:
        { k_pos = 2.0 } and so on.
        """
    @property
    def adv_estimator(
        self,
    ) -> (
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
    ):
        """How rewards become advantages. grpo: against the group's mean and standard deviation. naive_grpo: the same,
        with each multi-turn episode counted once. dr_grpo: mean only. rloo: mean of the others. gigpo: for agents,
        also compares turns that began with the same observation. gdpo: normalises each reward function in its group,
        then their sum over the batch. reinforce_plus_plus: against the batch; reinforce_plus_plus_baseline: group
        mean, then batch. remax: against the greedy completion. opo: mean weighted by length. optimal_token_baseline:
        per token, weighted by gradient length. gpg. grpo_passk: only the best of the group. Your own:
        FILE.py:FUNCTION or MODULE:FUNCTION.
        """
    @property
    def adv_parameters(self) -> dict[str, bool | int | float | str]:
        """Parameters of the estimator by name. reinforce_plus_plus: gamma. Estimators that divide by a standard
        deviation: std_correction (1 divides by G - 1, 0 by G). grpo with agents: step_score, the score of a turn:
        episode (reward of the whole episode), return (discounted return) or step (the turn's own reward). discount of
        returns. gigpo: step_advantage_weight (the paper's omega).
        """
    @property
    def scale_rewards(self) -> Literal["group", "batch", "none"]:
        """Divide advantages by the standard deviation of the group, of the whole batch, or not at all. No effect with
        an adv_estimator that does not divide, such as dr_grpo and rloo. True means group, False none.
        """
    @property
    def beta(self) -> float:
        """Weight of the KL divergence from the reference model; 0 turns it off and saves its forward pass."""
    @property
    def kl_estimator(self) -> Literal["k1", "k2", "k3", "k1+", "k3+", "abs", "k3_unbiased", "exact", "exact_weighted"]:
        """How that KL is estimated per token. k3 is never negative; k3_unbiased is also correct off-policy; exact
        sums over the vocabulary; exact_weighted reproduces a published formula that is not unbiased.
        """
    @property
    def epsilon(self) -> float | None:
        """Lower clip range: an importance ratio below 1 - epsilon has no further gradient. none = the default of
        loss_type: 0.2; 0.0003 for gspo and gspo_token; 0.002 for luspo; for gmpo 0.4, a range of log-ratios.
        """
    @property
    def num_iterations(self) -> int:
        """Passes over each batch of completions (the paper's mu)."""
    @property
    def num_minibatches(self) -> int:
        """Optimiser steps of each pass, on random parts of the batch. Ratios compare with the policy that sampled the
        batch.
        """
    @property
    def entropy_coef(self) -> float:
        """Weight of an entropy bonus; 0 = off."""
    @property
    def adaptive_entropy(self) -> AdaptiveEntropy | None:
        """Adapt entropy_coef to keep the entropy at a target (Skywork-OR1). A table, which may be empty: { target =
        0.2, delta = 0.005, min = 0.0, max = 1.0 }. After each optimiser step entropy_coef moves by delta: up if the
        entropy (in nats, mean over trained tokens) is at or below target, else down. The bonus acts only after a step
        with entropy at or below target. none = off.
        """
    @property
    def mask_truncated_completions(self) -> bool:
        """Leave completions that hit max_completion_length out of the loss."""
    @property
    def off_policy_mask_threshold(self) -> float | None:
        """Remove the policy gradient of a completion with a negative advantage if the mean over its tokens of old -
        new log-probability, in nats, is above this. Averages and its KL term stay (DeepSeek-V3.2, equation 8). none =
        off.
        """
    @property
    def reference_drift_threshold(self) -> float | str | None:
        """Leave a completion out of the loss, whatever its advantage, unless the mean over its tokens of policy -
        reference log-probability, in nats, is below this; 0.5 in the USMLE recipe. sum:12 = the sum over its tokens.
        none = off.
        """
    @property
    def keep_sampling_mask(self) -> bool:
        """Store the ids that top_k, top_p and min_p left for each token, and compute all log-probabilities over those
        ids only (DeepSeek-V3.2).
        """
    @property
    def validity_min_length(self) -> int | None:
        """Validity mask: leave a completion out of the loss if it has fewer characters than this, has no valid answer
        or repeats itself. It still counts in its group's mean. Without invalid completions nothing teaches the valid
        form. none = off; 10 in the USMLE recipe.
        """
    @property
    def top_entropy_quantile(self) -> float:
        """Only this fraction of the tokens, those of highest entropy, has a policy gradient. Averages, KL and entropy
        terms still cover all tokens. 1 = all, 0.2 in arXiv 2506.01939.
        """
    @property
    def importance_sampling_correction(self) -> str:
        """Correct for a sampler whose log-probabilities differ from the trainer's. token_truncate and
        sequence_truncate weight tokens or completions by their ratio, capped; token_mask and sequence_mask drop those
        beyond the cap. The cap is 3 unless given (token_truncate:2), or a smallest and a largest ratio
        (token_mask:0.5:5: IcePop). auto = token_truncate with vLLM, a server of another kind than covey, a
        sampling.sampler_dtype narrower than the model's, or schedule.max_staleness above 0; else off.
        """
    @property
    def reference_update_steps(self) -> int | None:
        """Optimiser steps between updates of the reference from the policy; none = the reference never changes."""
    @property
    def reference_ema_decay(self) -> float:
        """Share of the old reference that an update keeps (exponential moving average); 0 = a copy."""
    @property
    def dynamic_sampling(self) -> int:
        """Replace groups whose rewards are all equal by newly sampled ones (DAPO). The number is how many times a
        step may sample in all before it trains on the groups it has. 0 = off; 3 is usual.
        """
    @property
    def down_sampling(self) -> str:
        """Train only on some completions of each group, 4 unless a number is given: max_variance:8 (those whose
        rewards vary most: PODS), largest_advantage:8 (CPPO), shortest:8 and token_efficiency:8 (GFPO), first:8, or
        your own, FILE.py:RULE:8. Advantages compare the selected completions or the whole group, as in the rule's
        paper (group for largest_advantage); append `:selected` or `:group` to choose. none = all.
        """
    @property
    def num_generations(self) -> int:
        """Completions per prompt (the group size G); 2 or more with most values of algorithm.adv_estimator."""
    @property
    def max_generations(self) -> int | None:
        """Most completions per prompt. If the rewards of a group are all equal and below the best of the step,
        num_generations more are sampled until they differ or this number is reached. none = off.
        """
    @property
    def temperature(self) -> float:
        """Divides the logits before the softmax; above 1 explores more."""
    @property
    def top_k(self) -> int:
        """Sample only from the k most likely tokens; 0 = all."""
    @property
    def top_p(self) -> float:
        """Sample only from the smallest set of tokens with this total probability; 1 = all."""
    @property
    def min_p(self) -> float:
        """Sample only tokens with at least this fraction of the most likely token's probability; 0 = all."""
    @property
    def max_completion_length(self) -> int:
        """Longest completion, in tokens; longer ones are cut off."""
    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end a completion, besides the model's own end-of-sequence tokens."""
    @property
    def engine(self) -> Literal["covey", "vllm"]:
        """The sampler in this process: covey, Covey's engine for CPUs and small models, or vllm, which must be
        installed; the vllm section configures it. Not measured on a GPU.
        """
    @property
    def sampler_dtype(self) -> Literal["model", "float32", "bfloat16"]:
        """Number format of the sampler's copy of the weights; model = that of the model. A narrower one can be faster
        but samples from a slightly different policy, which algorithm.importance_sampling_correction corrects.
        """
    @property
    def kv_cache_gb(self) -> float:
        """Memory for the KV cache, in GiB: of running completions, and of earlier prompts and conversations while
        there is room. Completions that do not fit wait.
        """
    @property
    def max_batch_size(self) -> int:
        """Completions sampled at the same time; the others wait."""
    @property
    def gpu_memory_utilization(self) -> float:
        """Share of the GPU's memory for vLLM's weights and KV cache. On a CPU the KV cache has
        sampling.kv_cache_gb.
        """
    @property
    def llm_arguments(self) -> dict[str, bool | int | float | str]:
        """Arguments of vllm.LLM by name, such as tensor_parallel_size (GPUs that share the model), max_model_len
        (longest prompt and completion together) and enforce_eager; they replace Covey's. enable_sleep_mode = false:
        vLLM keeps its memory during the update. enable_lora = false: the adapter is merged before the weights are
        sent, as always on CPUs.
        """
    @property
    def dataset(self) -> str | None:
        """Training prompts: a .jsonl, .json, .csv or .parquet file, or a dataset id on the hub; none = the task
        brings its own.
        """
    @property
    def eval_dataset(self) -> str | None:
        """Held-out prompts, given like dataset; none = the task's own, or no evaluation."""
    @property
    def eval_fraction(self) -> float:
        """Share of the distinct prompts of dataset that are held out and never trained on; 0 = none. A hash of the
        prompt chooses them, so that order and seed change nothing, and rows with equal prompts stay together.
        """
    @property
    def task(self) -> str | None:
        """A task that renders prompts and scores answers, by name (arithmetic) or in a file (FILE.py:TASK); none =
        prompts as they are in the dataset.
        """
    @property
    def prompts_per_step(self) -> int:
        """Distinct prompts for each optimiser step; completions per step are this times num_generations."""
    @property
    def max_prompt_length(self) -> int | None:
        """Longest prompt, in tokens; none = what the model's context leaves. See long_prompts."""
    @property
    def long_prompts(self) -> Literal["error", "truncate", "drop"]:
        """What becomes of prompts beyond that: an error before training, their last tokens only, or no use of them;
        how many is said. A question that is cut may have another answer.
        """
    @property
    def prompt_order(self) -> Literal["random", "given", "difficulty"]:
        """How prompts are visited: in a new random order in each epoch, in the order of the dataset, or drawn by what
        their last answers say that they can teach (most where half of the completions are right; new prompts first of
        all), which needs to know what is right: a task, or rewards.correctness.
        """
    @property
    def system_prompt(self) -> str | None:
        """System message put before every prompt; none = what the dataset has."""
    @property
    def prompt_column(self) -> str:
        """Dataset column with the prompt: a string or a list of messages."""
    @property
    def chat_template_kwargs(self) -> dict[str, bool | int | float | str]:
        """Further arguments of the chat template, such as enable_thinking."""
    @property
    def functions(self) -> tuple[str, ...]:
        """Reward functions by name, for the command line: FILE.py:FUNCTION or MODULE:FUNCTION; none given = those of
        the task.
        """
    @property
    def reward_weights(self) -> tuple[float, ...] | None:
        """One weight for each reward function, in their order; none = 1 for each."""
    @property
    def correctness(self) -> str | None:
        """The function that says which completions are right: 1 = right, 0 = wrong. The name of a reward, or
        FILE.py:FUNCTION or MODULE:FUNCTION for one that is no reward. Without a task, accuracy, prompt_order and
        min_accuracy need it; none = the task says so, or nothing does.
        """
    @property
    def reward_timeout(self) -> float:
        """Seconds that one call of a reward function may take before the run stops; 1e9 = no limit."""
    @property
    def soft_overlong_cache(self) -> int:
        """Soft overlong punishment (DAPO): the reward falls linearly by up to 1 over the last this many tokens before
        max_completion_length; 0 = off.
        """
    @property
    def world(self) -> str | None:
        """The world to act in, by name with options (house, house:rooms=4, gymnasium:env=FrozenLake-v1) or in a file
        (FILE.py:WORLD, FILE.py:WORLD:size=9); none = prompts with single answers.
        """
    @property
    def max_turns(self) -> int | None:
        """Actions after which an episode ends; none = the world's own limit."""
    @property
    def history_length(self) -> int | None:
        """Each turn has its own prompt, which shows this many earlier turns; 2 is usual. none = one growing
        conversation, whose keys and values are kept between turns.
        """
    @property
    def action_format(self) -> Literal["tags", "text", "tool", "choice"]:
        """How a turn is read as an action: text (its first line), tags (<action>...</action>), tool (a call in JSON),
        choice (only an admissible action can be sampled).
        """
    @property
    def show_actions(self) -> bool:
        """List the admissible actions after each observation."""
    @property
    def invalid_action_penalty(self) -> float:
        """Subtracted from the reward of a turn without a valid action."""
    @property
    def failed_episodes(self) -> Literal["exclude", "score"]:
        """Episodes that an environment's failure ended: exclude = leave them out of their group and the loss; score =
        keep the reward so far.
        """
    @property
    def max_observation_tokens(self) -> int:
        """A longer observation is cut to this length, and counted."""
    @property
    def max_conversation_tokens(self) -> int:
        """Longest conversation after its opening, in tokens; an episode that would need more ends. Memory grows with
        the conversations. With history_length: longest prompt with history; older turns are dropped.
        """
    @property
    def parallel_episodes(self) -> int:
        """Episodes played at the same time, each in its own process."""
    @property
    def step_seconds(self) -> float:
        """Time limit of an environment's step; a reset may take three times as long."""
    @property
    def inference_server_url(self) -> str | tuple[str, ...] | None:
        """Sample on the inference server at this address (`covey serve` has http://127.0.0.1:8000 unless told
        otherwise), to which the adapter is uploaded; or several, with commas or as a list. none = sample here.
        """
    @property
    def inference_server_kind(self) -> str:
        """covey (`covey serve`), vllm (vLLM's OpenAI server with run-time LoRA loading), sglang (SGLang's server), or
        FILE.py:NAME (a dialect of your own, see docs/use.md).
        """
    @property
    def server_token(self) -> str | None:
        """Bearer token of the server; none = the environment variable COVEY_SERVER_TOKEN. Never saved."""
    @property
    def adapter_folder(self) -> str | None:
        """Where weights are written for another server than covey's to read; none = beside the run folder,
        OUTPUT_DIR-adapters.
        """
    @property
    def server_timeout(self) -> float:
        """Seconds that one request may take."""
    @property
    def server_retry_seconds(self) -> float:
        """Seconds for which a request that failed is tried again before the run stops, to be resumed."""
    @property
    def samplers(self) -> int | None:
        """Ray actors that only sample. 0 = this process, or the servers, in the same fixed batches and so with the
        same numbers; none = this process in one call.
        """
    @property
    def ray_address(self) -> str:
        """Ray cluster, HOST:PORT; local = one that is started here and ends with the run; auto = the one that this
        machine is part of, else local. A cluster also starts learners; with local, torchrun starts them.
        """
    @property
    def gpus_per_sampler(self) -> float | None:
        """GPUs per sampler, fractions included; none = 1 if the cluster has any and model.device is not cpu, else
        0.
        """
    @property
    def groups_per_unit(self) -> int:
        """Groups in one batch of a sampler; it samples this times sampling.num_generations completions in one call.
        It changes the numbers.
        """
    @property
    def learners(self) -> int:
        """Processes that train. covey train starts them on the Ray cluster of ray_address or of this machine, else
        with torchrun on this machine; torchrun by hand starts them anywhere. Each has a GPU if there are any. They
        also sample if nothing else does. It does not change the numbers, with samplers at 0 or more.
        """
    @property
    def learner_kind(self) -> Literal["auto", "replicated", "sharded"]:
        """What each of several learners holds: replicated = all weights; sharded = a part of them (FSDP2); auto =
        replicated, unless weights and training state would fill 80 % of a device's memory.
        """
    @property
    def timeout_seconds(self) -> float:
        """Seconds without an answer after which a sampler or another worker is given up; a start has at least 120.
        Learners wait as long for each other, and a restart for room in the cluster.
        """
    @property
    def max_restarts(self) -> int:
        """How often in a row a sampler is replaced before the run continues without it, and how often covey train
        restarts all learners when one dies.
        """
    @property
    def reward_workers(self) -> int | None:
        """Ray actors that score completions in whole groups, each on its own CPU. 0 = this process, group by group as
        they would; none = this process, all rows of a step in one call.
        """
    @property
    def optimizer(self) -> Literal["adamw", "adamw_8bit", "paged_adamw_8bit"]:
        """adamw: PyTorch's fused AdamW. adamw_8bit: that of bitsandbytes (extra quantization), with 8-bit moments.
        paged_adamw_8bit: the same, whose moments move to host memory when the GPU is full. PyTorch only.
        """
    @property
    def learning_rate(self) -> float:
        """Peak learning rate. The default suits LoRA; for all weights (use_peft false) use about 1e-6."""
    @property
    def embedding_lr(self) -> float | None:
        """Learning rate of the embedding, if it is trained; none = learning_rate."""
    @property
    def optimizer_parameters(self) -> dict[Literal["weight_decay", "beta1", "beta2", "epsilon"], float]:
        """Parameters of AdamW by name: weight_decay (decoupled; default 0), beta1 (0.9), beta2 (0.999), epsilon
        (1e-8).
        """
    @property
    def lr_scheduler_type(
        self,
    ) -> Literal[
        "linear",
        "cosine",
        "constant",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ]:
        """Learning-rate schedule after warm-up, as in transformers: to 0 (linear, cosine), constant, or another
        one.
        """
    @property
    def lr_scheduler_kwargs(self) -> dict[str, bool | int | float | str]:
        """Options of the schedule, such as min_lr of cosine_with_min_lr or num_decay_steps of warmup_stable_decay."""
    @property
    def warmup_steps(self) -> float:
        """Optimiser steps over which the learning rate rises from 0; below 1, their share of all steps."""
    @property
    def max_grad_norm(self) -> float:
        """Gradients with a larger norm are scaled down to it; 0 = never."""
    @property
    def autocast(self) -> Literal["none", "bfloat16", "float16"]:
        """Mixed precision: weights and optimiser stay float32, and products of the forward pass use this type,
        float16 with adaptive loss scaling. none = everything in the type of the weights.
        """
    @property
    def offload(self) -> bool:
        """On a GPU: keep the optimiser's moments, and a reference that is a copy of weights, in host memory between
        uses. It takes less memory and makes each step slower. Not measured on a GPU.
        """
    @property
    def tokens_per_micro_batch(self) -> int:
        """Packed tokens in one forward and backward pass; a single sequence that is longer is kept whole. It changes
        memory and speed only: the gradient is that of the whole step.
        """
    @property
    def max_steps(self) -> int:
        """Steps: each samples completions and trains on them, with several optimiser steps if num_iterations or
        num_minibatches is above 1. -1 = as many as num_train_epochs gives. Above 0 it replaces num_train_epochs.
        """
    @property
    def max_optimizer_steps(self) -> int | None:
        """Length in optimiser steps, in place of max_steps, when each step's completions have several
        (num_iterations, num_minibatches). Warm-up and schedule count them too. The last step's completions are
        trained on less often if the number is no multiple.
        """
    @property
    def num_train_epochs(self) -> float:
        """Passes over the dataset."""
    @property
    def max_minutes(self) -> float | None:
        """Time limit of the run in minutes; none = none."""
    @property
    def phases(self) -> tuple[PhaseConfig, ...]:
        """Consecutive parts of the run, each with a name, one length (steps, tokens or minutes) and its own
        temperature, beta, num_generations or learning_rate.
        """
    @property
    def max_staleness(self) -> int:
        """Optimiser steps by which the sampler's weights may be behind. 0 = sampling and training take turns. From 1
        on, the next steps are sampled during training, and importance_sampling_correction is token_truncate unless it
        is set.
        """
    @property
    def stale_groups(self) -> Literal["wait", "drop"]:
        """How max_staleness is kept: wait (each update waits for running samples; the same run gives the same
        numbers) or drop (sampling goes on, and groups that became older are dropped).
        """
    @property
    def eval_steps(self) -> int:
        """Optimiser steps between evaluations; 0 = none while training."""
    @property
    def eval_on_start(self) -> bool:
        """Evaluate before the first step, to compare with later."""
    @property
    def eval_at_end(self) -> bool:
        """Evaluate after the last step too."""
    @property
    def num_eval_prompts(self) -> int | None:
        """Evaluate on the first this many held-out prompts; none = all."""
    @property
    def eval_temperature(self) -> float:
        """Sampling temperature in evaluation; 0 = greedy."""
    @property
    def num_generations_eval(self) -> int:
        """Completions for each held-out prompt; above 1 only with eval_temperature above 0."""
    @property
    def early_stopping_patience(self) -> int | None:
        """Stop after this many evaluations without a better metric; none = never."""
    @property
    def metric_for_best_model(self) -> str:
        """Evaluation metric that chooses the best checkpoint; more is better. Without eval/accuracy (nothing says
        which completions are right) the whole run uses eval/reward.
        """
    @property
    def load_best_model_at_end(self) -> bool:
        """Finish with the weights of the best evaluation instead of the last."""
    @property
    def output_dir(self) -> str:
        """Folder of the run: metrics, completions, checkpoints, config. A recipe's default is runs/NAME, after its
        file (or the folder of a recipe.toml).
        """
    @property
    def overwrite(self) -> bool:
        """Delete the run that is in output_dir, and start anew; false = replace only a run without a finished
        step.
        """
    @property
    def run_name(self) -> str | None:
        """Name in reports; none = the folder's name."""
    @property
    def seed(self) -> int:
        """Seed of everything random: data order, adapter, sampled completions."""
    @property
    def logging_steps(self) -> int:
        """Optimiser steps between lines of metrics on the screen; metrics.jsonl has every step."""
    @property
    def save_steps(self) -> int:
        """Optimiser steps between checkpoints; 0 = only at the end of the run."""
    @property
    def save_total_limit(self) -> int | None:
        """Keep this many checkpoints, deleting the oldest; none = all."""
    @property
    def report_to(self) -> tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...]:
        """Also send metrics to these trackers. The run folder always has them."""
    @property
    def report_completions(self) -> int:
        """Completions of a step, with prompts and rewards, that the trackers get too; 0 = none. A long run sends
        those of fewer and fewer steps.
        """
    @property
    def log_completions(self) -> bool:
        """Record sampled completions with their rewards."""
    @property
    def keep_batches(self) -> bool:
        """Keep the token ids, log-probabilities and rewards that each step trained on, from which `covey doctor RUN
        --step N` computes the step again; about 6 bytes a token.
        """
    @property
    def ledger(self) -> str:
        """off, sampled:N (such as sampled:2) or all: groups of each step whose tokens its ledger has;
        sampled:2,all:50 = those of all groups every 50 steps. It tells of a token what it got and what it added to
        the loss (`covey watch` shows it), in about 50 bytes.
        """
    @property
    def allow_mixture(self) -> bool:
        """Let machines of one run differ in GPUs, drivers, threads, or versions of torch and NumPy. What is computed
        depends on which machine does it then; false = such a cluster is refused.
        """
    @property
    def progress(self) -> bool:
        """Show progress on the screen (standard error)."""
    @property
    def num_completions_to_print(self) -> int | None:
        """Completions shown on the screen each time metrics are; none = no completions."""
