"""What the doctor says of a run: `code: message` and `-> fix`; `last` is "(last 10 steps)"."""

import re

_TEXTS = """
not_finite: {name} was NaN or infinite in {bad} of the last {total} steps
-> {fix}
episodes_failed: the environment failed in {share:.0%} of the episodes {last}, which are not trained on
-> Find the errors in events.jsonl and in the column error of completions/, and fix the environment. If it is only slow,
   raise environment.step_seconds
rewards_none: no reward function could score {share:.0%} of the completions {last}, which are not trained on
-> Return 0.0 for a wrong or unreadable answer, and None only if the reward does not apply
teacher_silent: no completion {last} had a teacher: there was no context for it to read, or none that fits the model
-> Look at algorithm.teacher.context, success and teacher/too_long. feedback needs a reward function that says something
groups_all_right: {about}, and the {named} is {right:.2f}: the prompts are too easy now{unless}
-> Stop here, use harder prompts, or set algorithm.dynamic_sampling=3 to skip solved prompts
reward_never_nonzero: the reward was 0 for every completion of the last {total} steps
-> Read completions/ in the run folder. If right answers are there, the reward function does not recognise them. If not,
   {begin}. Or use easier prompts, or reward partial success
reward_constant: {about}
-> Reward something in which completions differ: GRPO learns only from differences
groups_all_wrong: {about}, and the {named} is {right:.2f}: the prompts are too hard so far{unless}
-> Raise sampling.num_generations until some completions succeed, use easier prompts, or reward partial success. Or
   {begin}
groups_tied: {about}{known}: little is left to learn from
-> Set algorithm.dynamic_sampling=3, raise sampling.num_generations or sampling.temperature, or drop prompts that are
   always or never solved
gradient_zero: the gradient was exactly 0 in the last {count} steps although rewards differ
-> Check which mask/<reason> excludes the tokens, and that the weights are trainable (model.use_peft)
learning_rate_zero: the learning rate was 0 in the last {count} steps
-> The schedule has ended: raise schedule.max_steps, or set optim.lr_scheduler_type to constant
policy_does_not_move: after {count} steps the KL from the reference is below {limit:g} at a learning rate of {rate:.1e}:
   the policy hardly changes
-> Raise optim.learning_rate (1e-5 to 1e-4 is usual with LoRA, 1e-6 without)
completions_truncated: {share:.0%} of the completions were cut off{at} {last}
-> Raise sampling.max_completion_length, or ask for shorter answers{mask}
completions_short: completions have {length:.1f} tokens on average {last}: nearly empty
-> Check the prompt and the chat template in completions/ of the run folder, and that no reward favours short answers
no_answer: no answer was found in {share:.0%} of the completions {last}, more than {limit:.0%}
-> Read in completions/ of the run folder what is written instead. In the first steps it is usual. If it stays, ask for
   the format more clearly, or reward it
tag_opened_by_prompt: {name} was 0 in the last {total} steps. The chat template already opens a tag such as <think> in
   the prompt, so completions hold only its end
-> Let the reward function accept this; its argument prompt_ends has the end of each prompt
mask_ratio_low: only {kept:.0%} of the completions are not fully masked {last}, less than {limit:.0%}; active masks:
   {acting}
-> For an off-policy mask, update the reference more often (algorithm.reference_update_steps). For the validity mask,
   ask for the format more clearly. For mask_truncated_completions, raise sampling.max_completion_length
mask_ratio_high: {kept:.0%} of the completions are not fully masked {last}, more than {limit:.0%}: the samples are good,
   and the masks have little effect
-> Nothing needs to be done. Masks that depend on the policy cost a forward pass and can be switched off
masked: {reason} excluded {share:.0%} of the sampled tokens from the loss {last}
-> Loosen or switch off {reason}. Masking every bad completion also removes the signal that would improve them
kl_high: the KL from the reference is {kl:.2f} nats per token {last}, above {limit:g}
-> Raise algorithm.beta or lower optim.learning_rate. If the reference follows the policy, lower
   algorithm.reference_update_steps
clip_fraction_high: {share:.0%} of the tokens were clipped {last}: updates are too large
-> Lower optim.learning_rate or algorithm.num_iterations
greedy_from_the_start: the entropy was {begun:.4f} nats per token from the first step on, and is {entropy:.4f} {last}:
   the completions of a group are nearly the same, and KL and updates are large
-> Raise sampling.temperature (1 is usual)
entropy_collapse: the entropy is {entropy:.4f} nats per token {last}: the completions of a group are nearly the same
-> Raise sampling.temperature, the upper clip range or algorithm.entropy_coef, or go back to an earlier checkpoint with
   a larger algorithm.beta
entropy_fell: the entropy fell from {begun:.2f} to {entropy:.2f} nats per token within {count} steps, and the
   reward does not rise: the policy hardly explores any more
-> Start again, or from a checkpoint before the fall, with a lower optim.learning_rate, or a larger
   algorithm.entropy_coef or algorithm.beta. Also {begin}
kinds_at_zero: the accuracy of {names} was 0 in {count} evaluations, while that of {best} rose from {before:.0%} to
   {now:.0%}
-> Put one solved example of each of these kinds into the prompt (few-shot), and add training rows of them. Read in
   completions/ of the run folder what is answered instead
constant_answers: {about}: the prompt has little effect
-> Begin again with solved examples in the prompt, one for each class or kind of question (few-shot), whose answers
   differ. If they are there, take a larger model, more steps, 8 or 16 sampling.num_generations, or a lower
   optim.learning_rate
sampler_mismatch: log-probabilities of sampler and trainer differ by {nats:.3f} nats per token {last}
-> Set algorithm.importance_sampling_correction to token_truncate, or run both in the same model.dtype
actions_alike: {share:.0%} of the turns begin in a state where all episodes of the group act the same {last}, and only
   {succeed:.0%} of the episodes succeed: actions that are never tried cannot be learnt
-> Go back to a checkpoint where they differed, with a larger sampling.temperature or algorithm.entropy_coef, or with
   more tasks in a step (data.prompts_per_step) and fewer episodes of each
samplers_idle: samplers are idle for {share:.0%} of the sampling time {last}
-> Use fewer distributed.samplers, a smaller distributed.groups_per_unit in a new run, or more data.prompts_per_step
scoring_slow: reward functions take {scoring:.1f} s of a step of {step:.1f} s {last}
-> Use distributed.reward_workers (more of them), or make the slowest reward function faster
reward_falling: the mean reward fell from {older:.3f} to {newer:.3f} within {count} steps
-> Lower optim.learning_rate or raise algorithm.beta, and go back to an earlier checkpoint
kl_low: the reward does not rise, and the KL is {kl:.4f} nats per token, below {limit:g}: the KL penalty may be too
   strong
-> Lower algorithm.beta
reward_flat: the mean reward does not rise: {older:.3f}, then {newer:.3f} in the newer half of {count} steps, with a
   standard error of {error:.3f}
-> Read completions (covey report RUN --worst). If this is the highest possible reward, stop here. If right answers are
   never sampled, raise sampling.temperature or sampling.num_generations. If they are sampled but do not become more
   frequent, raise optim.learning_rate or data.prompts_per_step
"""
SAYS = {
    match[1]: [" ".join(text.split()) for text in match.groups()[1:]]
    for match in re.finditer(r"^(\w+): (.*?)^-> (.*?)(?=^\w|\Z)", _TEXTS, re.MULTILINE | re.DOTALL)
}
"""Code -> message and fix, to be filled with numbers."""
