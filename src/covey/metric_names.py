"""Every metric that Covey writes: its unit and its one definition.

Names are TRL's where the meaning is TRL's. A name with `<...>` is a family: `rewards/<function>/mean` stands
for one metric for each reward function.

*Trained tokens* are the sampled tokens that no mask takes out of the loss, in the completions that were run. With beta
and entropy_coef at 0, a completion is run only if such a token has an advantage other than 0: a group of equal rewards
is not run, and the trainer computes nothing for it. A token that only loses its policy-gradient term (see
`mask/<reason>`) stays in the loss with advantage 0.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class MetricDefinition(NamedTuple):
    """Unit ("" = a plain number) and meaning of a metric."""

    unit: str
    meaning: str


_ROWS = """
step | steps | steps finished when the line was written; the line describes the last of them
epoch | epochs | passes over the training data so far, with fraction
num_tokens | tokens | prompt and sampled tokens of all steps so far; a prompt counts once per completion
tokens/raw | tokens | input tokens of the update without prefix sharing: every prompt and completion by itself, a
    completion's last token left out; summed over passes and optimiser steps
tokens/unique | tokens | of tokens/raw, those that remain when every shared prefix counts once
tokens/computed | tokens | tokens that the update computed; more than tokens/unique when a prefix is computed again, to
    stay within optim.tokens_per_micro_batch or because the model cannot share prefixes
policy_version | | version of the weights that sampled this step's completions (the oldest, if several)
phase | | index of the phase in schedule.phases, from 0
loss | | loss of the whole step with KL and entropy terms, mean over its passes, like all metrics of the update that
    are not a minimum or maximum; its size says little, its gradient counts
policy_loss | | loss without KL and entropy terms
learning_rate | | learning rate of this step
grad_norm | | L2 norm of the gradient before clipping to optim.max_grad_norm, mean over the passes
reward | | weighted sum of rewards, mean over the completions that some function scored
soft_overlong_penalty | | penalty of rewards.soft_overlong_cache (0 to 1), mean over completions; not part of `reward`
reward_std | | standard deviation of the reward within a group (0 with fewer than two rewards; added completions
    count), mean over groups
accuracy | fraction | sampled completions that are right: by the task's rule, by success in a world (episodes that an
    environment's failure ended are left out), or by the reward that rewards.correctness names; absent without any of
    these. Masks have no effect, unlike in usmle-qa.md, where it is the mean reward of the completions that they keep
accuracy/<kind> | fraction | accuracy of one kind of question, given by the column `kind` of the row (a world's
    `type`); only in evaluations with 2 to 20 kinds
accuracy_low/<kind> | fraction | lower end of its 95 % Wilson interval
accuracy_high/<kind> | fraction | upper end of its 95 % Wilson interval
num_completions/<kind> | completions | completions of this kind in eval/num_completions
rewards/<function>/mean | | unweighted reward of this function, mean over the completions that it scored
rewards/<function>/std | | standard deviation of that reward over the completions of the step
rewards/<function>/none | fraction | completions for which this function returned None
frac_reward_none | fraction | completions that no reward function scored, and episodes that environment.failed_episodes
    excludes; their advantage is 0
frac_reward_zero_std | fraction | groups without a gradient: all rewards equal (with an adv_estimator that compares
    turns or reward functions: all of those); with one that compares beyond groups, groups without any score
completions/mean_length | tokens | sampled tokens of a completion with its end token, mean
completions/min_length | tokens | the shortest completion
completions/max_length | tokens | the longest completion
completions/clipped_ratio | fraction | completions cut off at sampling.max_completion_length
prompts/opened_tag | fraction | prompts that end in an open tag, such as <think> of a chat template; absent if none does
completions/no_answer_ratio | fraction | completions without an answer, right or wrong, by the task's rule (without a
    task: empty ones); for agents, agent/no_action_ratio
completions/mean_terminated_length | tokens | mean length of the completions that were not cut off
completions/min_terminated_length | tokens | the shortest completion that was not cut off
completions/max_terminated_length | tokens | the longest completion that was not cut off
kl | nats | KL divergence from the reference by algorithm.kl_estimator, mean over trained tokens
kl_penalty | | algorithm.beta times kl; only with beta above 0
entropy | nats | entropy of the policy's next-token distribution at the sampling temperature, mean over trained tokens;
    with algorithm.keep_sampling_mask over the kept ids
entropy_coef | | weight of the entropy bonus after the step; only with algorithm.adaptive_entropy
loss_scale | | factor on the loss that keeps gradients within float16, after the step; only with float16
skipped_steps | optimiser steps | steps skipped because a float16 gradient overflowed; only with float16
clip_ratio/low_mean | fraction | trained tokens clipped from below (ratio below 1 - epsilon, advantage negative)
clip_ratio/high_mean | fraction | trained tokens clipped from above (ratio above 1 + epsilon_high with a positive
    advantage, or above delta with a negative one; with cispo, above epsilon_max)
clip_ratio/region_mean | fraction | trained tokens clipped from either side
clip_ratio/low_min | fraction | the smallest clip_ratio/low_mean among the passes over the step
clip_ratio/high_max | fraction | the largest clip_ratio/high_mean among the passes over the step
ratio/mean | | importance ratio exp(new - old log-probability) as the loss uses it (importance_sampling_level), mean
    over trained tokens; with algorithm.importance_sampling_correction, old is the trainer's own before the first pass
ratio/min | | the smallest importance ratio of a trained token in any pass
ratio/max | | the largest importance ratio of a trained token in any pass
sampling/sampling_logp_difference/mean | nats | absolute difference of log-probability between trainer and sampler
    before the update, mean over the tokens that the trainer scored: sampled tokens of the completions that were run, or
    all unmasked ones when a mask depends on the policy. Both have the same weights unless schedule.max_staleness is
    above 0
sampling/sampling_logp_difference/max | nats | largest such difference
sampling/importance_sampling_ratio/min | | smallest ratio exp(trainer - sampler log-probability) of these tokens, before
    the cap; only with algorithm.importance_sampling_correction, as mean and max
sampling/importance_sampling_ratio/mean | | mean of that ratio
sampling/importance_sampling_ratio/max | | largest such ratio
mask_ratio | fraction | of the completions that down_sampling chose, those with some token's policy-gradient term left
    after all masks, mean over the passes; only with a mask
mask/<reason> | fraction | sampled tokens that this mask takes out of the loss, mean over the passes; off_policy_mask,
    top_entropy_quantile and, with loss_type reinforce_kept, every mask only remove the policy-gradient term
sampling/added_completions | completions | sampled because all rewards of a group were equal (sampling.max_generations);
    not counted in accuracy, rewards, lengths and the record of each question
dynamic_sampling/discarded_groups | groups | groups with equal rewards that dynamic sampling did not train on; accuracy,
    rewards and lengths count them, metrics of the update do not
agent/success | fraction | episodes that solved their task, of all episodes; accuracy leaves failed environments out
agent/turns | turns | actions of an episode, mean
agent/branches | sequences | token sequences of an episode, mean; 1 for a conversation that only grew
agent/no_action_ratio | fraction | turns without a valid action
agent/same_action_ratio | fraction | of the turns that several episodes of a group begin with the same observation:
    those in which all of these episodes act alike; an action that none of them tries cannot be learned
agent/failed_ratio | fraction | episodes that an environment's failure ended
agent/failed_episodes | episodes | number of episodes that an environment's failure ended; accuracy leaves them out
agent/cut_short_ratio | fraction | episodes that a limit of turns or tokens ended
agent/full_context_ratio | fraction | episodes that the limit of tokens ended
agent/cut_observations | observations | observations longer than environment.max_observation_tokens
agent/waiting_share | fraction | share of the playing time in which every episode waited for its environment, so that
    nothing could be sampled
tools/call_frequency | calls | tool calls of a completion, mean; only with tools
tools/failure_frequency | fraction | tool calls that raised, named no tool or could not be read
tools/cut_results | results | results longer than environment.max_observation_tokens; only where there are any
tools/failed_episodes | episodes | completions that the failure of an MCP server ended; only where there are any
teacher/kl | nats | minus the mean of the teacher's log-probability minus the sampler's, over tokens with a teacher: an
    estimate of KL(policy, teacher) that may be below 0; only with algorithm.teacher, as all of teacher/
teacher/<name>/kl | nats | teacher/kl of one of several teachers, by its name in algorithm.teacher.teachers
teacher/k3 | nats | the same KL by the estimator k3, never below 0
teacher/divergence | nats | of the policy from the teacher over the vocabulary, mean over tokens; with use = loss
teacher/mass | fraction | the teacher's probability of the top_k ids that are compared, mean over these tokens
teacher/disagreement | fraction | tokens that the teacher finds less likely than the sampler
teacher/rows | fraction | completions with a teacher
teacher/tied_rows | fraction | of the completions in groups with equal rewards, those with a teacher
teacher/agrees_with_reward | fraction | of two completions of a group with different rewards: how often the teacher
    prefers the better one (mean over its tokens); 0.5 = no relation
teacher/too_long | completions | without a teacher, because what it would read is longer than the model takes
samplers/reissued_units | units | batches of samples requested again because a sampler failed, since the step before;
    only with distributed.samplers or several servers, as all of samplers/
samplers/restarts | samplers | samplers replaced since the step before
staleness/mean | optimiser steps | age of a group, the number of steps by which the weights that sampled it are older
    than those at the start of this step, mean over groups; only with schedule.max_staleness above 0, as all of
    staleness/
staleness/max | optimiser steps | age of the oldest group
staleness/<age> | fraction | groups of exactly this age
staleness/dropped_groups | groups | groups sampled for this step and dropped, being older than schedule.max_staleness
step_time | seconds | wall-clock time of the whole step
time/sampling | seconds | part of step_time: sampling (with schedule.max_staleness above 0, during earlier steps)
time/samplers_waiting | seconds | part of the sampling time in which a sampler had nothing to do (last batches,
    replacements), mean over samplers, since the step before; as samplers/
time/scoring | seconds | part of step_time: reward functions (with schedule.max_staleness above 0, during earlier steps)
time/waiting_for_samples | seconds | part of step_time: waiting for this step's samples, and for those that must finish
    before new weights can be sent; only with schedule.max_staleness above 0
time/reference | seconds | part of step_time: log-probabilities under the reference
time/teacher | seconds | part of step_time: log-probabilities under the teacher; only with algorithm.teacher
time/publish | seconds | part of step_time: sending the new weights to the sampler
time/update | seconds | part of step_time: forward pass, backward pass and optimiser
memory/peak_gb | GB (10^9 bytes) | largest resident memory of the process so far
memory/peak_cuda_gb | GB (10^9 bytes) | largest memory that torch allocated on the CUDA device so far
eval/accuracy | fraction | evaluation completions that are right, as `accuracy`
eval/accuracy_low | fraction | lower end of the 95 % Wilson interval of eval/accuracy
eval/accuracy_high | fraction | upper end of the same interval
eval/reward | | as `reward`, on the evaluation prompts
eval/num_completions | completions | completions that the evaluation scored: all but the episodes that an environment's
    failure ended
eval/most_frequent_answer | fraction | answers with the text that is given most often, white space around it left out;
    only with one answer for each problem, and not in worlds
eval/seconds | seconds | duration of the evaluation
eval/<metric> | | the metric on the evaluation prompts, sampled at evaluation.eval_temperature
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
