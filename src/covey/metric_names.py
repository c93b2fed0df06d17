"""Every metric that Covey writes: its unit and its one definition.

Names are TRL's where the meaning is TRL's. A name with `<...>` is a family: `rewards/<function>/mean` stands
for one metric for each reward function.

*Trained tokens* are the sampled tokens that no mask takes out of the loss, of the completions that were run. All that
have such a token are; with beta and entropy_coef at 0 only those of which one such token has an advantage other than 0.
A tied group has no gradient then, so it is not run, and nothing is known of it that only the trainer could compute. A
token that loses its surrogate only (see `mask/<reason>`) is not out of the loss: its advantage is 0.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class MetricDefinition(NamedTuple):
    """Unit ("" = a plain number) and meaning of a metric."""

    unit: str
    meaning: str


_ROWS = """
step | steps | steps finished when the line was written; the line describes the step that made this number
epoch | epochs | passes over the training data so far, with fraction
num_tokens | tokens | prompt and sampled tokens of all steps so far, a prompt counted for each completion
tokens/raw | tokens | that the rows of the update's passes would take one by one, as inputs: prompts and completions
    without a completion's last token, each for itself; added over its optimiser steps
tokens/unique | tokens | of these, those that differ in themselves or in what precedes them: the step as one tree
tokens/computed | tokens | that the passes computed: more than tokens/unique where a tree is cut to stay within
    optim.tokens_per_micro_batch, or the model cannot share
policy_version | | version of the weights that sampled this step's completions (the oldest, if several)
phase | | position of the phase in schedule.phases, from 0
loss | | loss of the whole step, KL and entropy terms included, mean over the passes over it (as all that follows of
    the update, extremes apart); its size says little, its gradient counts
policy_loss | | the surrogate's part of the loss, without KL and entropy terms
learning_rate | | learning rate of this step
grad_norm | | L2 norm of the gradient before clipping to optim.max_grad_norm, mean over the passes over the step
reward | | mean over completions of the weighted sum of rewards, without those that no function scored
reward_std | | standard deviation of the reward within a group (0 with fewer than two rewards; added completions
    count), mean over groups
accuracy | fraction | sampled completions that are right: by the task's rule, by success in a world (of the episodes
    that no failure of the environment ended), or by the reward that rewards.correctness names; absent where nothing
    says so. Masks leave it alone, unlike usmle-qa.md's, which is the mean reward of what they keep
accuracy/<kind> | fraction | the same of one kind of question, which is the row's column `kind` (a world's `type`);
    in evaluations whose rows name 2 to 20 kinds
accuracy_low/<kind> | fraction | lower end of its 95 % Wilson interval
accuracy_high/<kind> | fraction | upper end of its 95 % Wilson interval
num_completions/<kind> | completions | of eval/num_completions, those of this kind
rewards/<function>/mean | | mean of this function's unweighted reward over the completions that it scored
rewards/<function>/std | | standard deviation of the same over all these completions of the step
rewards/<function>/none | fraction | completions for which this function returned None
frac_reward_none | fraction | completions that no reward function scored, episodes that environment.failed_episodes
    excludes; they get advantage 0
frac_reward_zero_std | fraction | groups that teach nothing: those whose rewards are all equal, advantage 0 unless turns
    or reward functions are compared one by one; those without a score where adv_estimator compares beyond groups
completions/mean_length | tokens | mean number of sampled tokens of a completion, the end token included
completions/min_length | tokens | the shortest completion
completions/max_length | tokens | the longest completion
completions/clipped_ratio | fraction | completions cut off at sampling.max_completion_length
prompts/opened_tag | fraction | prompts that end in an open tag, such as <think> of a chat template; absent where none
    does
completions/no_answer_ratio | fraction | completions without an answer, right or wrong, by the task's rule
    (without a task: empty ones); of agents, agent/no_action_ratio
completions/mean_terminated_length | tokens | mean length of the completions that ended by themselves
completions/min_terminated_length | tokens | the shortest completion that ended by itself
completions/max_terminated_length | tokens | the longest completion that ended by itself
kl | nats | divergence from the reference by algorithm.kl_estimator, mean over trained tokens
kl_penalty | | algorithm.beta times kl; only where beta is above 0
entropy | nats | entropy of the policy's next-token distribution (at the sampling temperature, and with
    algorithm.keep_sampling_mask over the ids that were left), mean over trained tokens
entropy_coef | | weight of the entropy bonus after the step; only with algorithm.adaptive_entropy
loss_scale | | by which losses are multiplied so that gradients fit float16, after the step; only with float16
skipped_steps | optimiser steps | that were not taken since a float16 gradient overflowed; only with float16
clip_ratio/low_mean | fraction | trained tokens held back by the lower clip
    (ratio below 1 - epsilon, advantage negative)
clip_ratio/high_mean | fraction | trained tokens held back by an upper limit (ratio above 1 + epsilon_high, advantage
    positive; above delta, advantage negative; with cispo, above epsilon_max)
clip_ratio/region_mean | fraction | trained tokens held back by either
clip_ratio/low_min | fraction | the smallest clip_ratio/low_mean among the passes over the step
clip_ratio/high_max | fraction | the largest clip_ratio/high_mean among the passes over the step
ratio/mean | | importance ratio exp(new - old log-probability), by the loss (importance_sampling_level), mean over
    trained tokens; with algorithm.importance_sampling_correction old is the trainer's own before the first pass
ratio/min | | the smallest importance ratio of a trained token in any pass
ratio/max | | the largest importance ratio of a trained token in any pass
sampling/sampling_logp_difference/mean | nats | absolute difference of log-probability between trainer and
    sampler before the update, mean over the tokens that the trainer scored: all sampled ones of the completions that
    were run, or all unmasked ones of the step where a mask depends on the policy; with the same weights unless
    schedule.max_staleness is above 0
sampling/sampling_logp_difference/max | nats | the same, largest over these tokens
sampling/importance_sampling_ratio/min | | smallest ratio exp(trainer - sampler) of one of these tokens, before the
    cap; only with algorithm.importance_sampling_correction, as mean and max
sampling/importance_sampling_ratio/mean | | mean of it
sampling/importance_sampling_ratio/max | | largest of it
mask_ratio | fraction | completions of which masks leave some token's surrogate in the loss, of those that down_sampling
    chose, mean over the passes over the step; only where a mask is on
mask/<reason> | fraction | sampled tokens that this mask excluded from the loss (off_policy_mask and
    top_entropy_quantile, and with loss_type reinforce_kept every mask: from its surrogate only), mean over the passes
sampling/added_completions | completions | sampled because a group taught nothing (sampling.max_generations); not
    counted in accuracy, rewards and lengths, nor in what is known of a question
dynamic_sampling/discarded_groups | groups | tied groups that dynamic sampling sampled and did not train on; accuracy,
    rewards and lengths of the step count them, what describes the update does not
agent/success | fraction | episodes in which the agent solved its task; those that an environment's failure ended are
    counted, unlike in accuracy
agent/turns | turns | mean number of actions in an episode
agent/no_action_ratio | fraction | turns that were no valid action
agent/same_action_ratio | fraction | of the turns that begin with what several episodes of their group saw: those in
    which all of these did the same; what none of them tries cannot be learnt
agent/failed_ratio | fraction | episodes that an environment's failure ended
agent/failed_episodes | episodes | the same as a number; accuracy leaves them out
agent/cut_short_ratio | fraction | episodes that a limit of turns or tokens ended
agent/full_context_ratio | fraction | episodes that the limit of tokens ended
agent/cut_observations | observations | observations longer than environment.max_observation_tokens
agent/waiting_share | fraction | of the time in which episodes were played: nothing could be sampled, since every
    episode waited for its environment
tools/call_frequency | calls | tool calls in a completion, mean over completions; only with tools, in covey.trl
tools/failure_frequency | fraction | tool calls that raised, named no tool or could not be read
samplers/reissued_units | units | units that were asked for again since a sampler failed, since the step before; only
    with distributed.samplers or several servers, as all of samplers/
samplers/restarts | samplers | that were replaced, since the step before
staleness/mean | optimiser steps | age of a group, by which the weights that sampled it are older than those that this
    step began with, mean over groups; only with schedule.max_staleness above 0, as all of staleness/
staleness/max | optimiser steps | the oldest group's age
staleness/<age> | fraction | groups of exactly this age
staleness/dropped_groups | groups | groups that were sampled for this step and dropped, since they were older than
    schedule.max_staleness
step_time | seconds | wall-clock time of the whole step
time/sampling | seconds | of it, sampling completions (with schedule.max_staleness above 0, beside earlier steps)
time/samplers_waiting | seconds | of sampling since the step before, those in which a sampler had nothing to sample
    (the last units, replacements), mean over samplers; as samplers/
time/scoring | seconds | of it, reward functions (the same)
time/waiting_for_samples | seconds | of it, waiting for samples: those of this step, and those under way before new
    weights can be published; only with schedule.max_staleness above 0
time/reference | seconds | of it, log-probabilities under the reference
time/publish | seconds | of it, giving the new weights to the sampler
time/update | seconds | of it, forward, backward and optimiser
memory/peak_gb | GB (10^9 bytes) | largest resident memory of the process so far
memory/peak_cuda_gb | GB (10^9 bytes) | largest memory that torch allocated on the CUDA device so far
eval/accuracy | fraction | evaluation completions that are right, as `accuracy`
eval/accuracy_low | fraction | lower end of the 95 % Wilson interval of eval/accuracy
eval/accuracy_high | fraction | upper end of the same interval
eval/reward | | as `reward`, on the evaluation prompts
eval/num_completions | completions | completions that the evaluation judged: all but the episodes that an
    environment's failure ended
eval/seconds | seconds | time that the evaluation took
eval/<metric> | | as <metric>, on the evaluation prompts, sampled at evaluation.eval_temperature
"""
"""Name | unit | meaning; an indented line continues the row before."""

METRICS: dict[str, MetricDefinition] = {}
for _row in _ROWS.strip().replace("\n    ", " ").splitlines():
    _name, *_cells = (cell.strip() for cell in _row.split("|"))
    METRICS[_name] = MetricDefinition(*_cells)


_FAMILIES = [
    (re.compile(re.sub(r"<\w+>", ".+", re.escape(name))), definition)
    for name, definition in METRICS.items()
    if "<" in name
]


def describe_metric(name: str) -> MetricDefinition | None:
    """Definition of a metric by its full name, families included; None for a name that is not Covey's.

    `eval/<metric>` is only a definition where `<metric>` itself has one.
    """
    if name in METRICS:
        return METRICS[name]
    if name.startswith("eval/"):
        inner = describe_metric(name.removeprefix("eval/"))
        return None if inner is None else MetricDefinition(inner.unit, inner.meaning + ", on the evaluation prompts")
    return next((definition for pattern, definition in _FAMILIES if pattern.fullmatch(name)), None)


_MORE_IS_BETTER = re.compile(r"eval/(accuracy(_low|_high)?|reward|rewards/.+/mean|agent/success)")


def says_which_is_best(name: str) -> bool:
    """True for a metric by which the best evaluation can be chosen; what reward functions log is taken at its word."""
    return describe_metric(name) is None or _MORE_IS_BETTER.fullmatch(name) is not None
