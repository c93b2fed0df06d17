// Metrics under plain names, with the unit that an axis needs: "%" for shares.

const NAMES = {
  "eval/accuracy": ["Held-out accuracy", "%"], "eval/accuracy by kind": ["Held-out accuracy by kind of question", "%"], "eval/reward": ["Held-out reward"],
  reward: ["Training reward"], accuracy: ["Training accuracy", "%"], "agent/success": ["Episodes that succeed", "%"],
  "completions/mean_length": ["Completion length", "tokens"], "completions/max_length": ["Longest completion", "tokens"],
  "completions/clipped_ratio": ["Completions cut off at the length limit", "%"], "completions/no_answer_ratio": ["Completions without an answer", "%"],
  entropy: ["Entropy of the policy", "nats per token"], kl: ["KL from the reference model", "nats per token"],
  frac_reward_zero_std: ["Groups without a learning signal", "%"], frac_reward_none: ["Completions that no reward could score", "%"],
  loss: ["Loss"], grad_norm: ["Gradient norm"], learning_rate: ["Learning rate"], "clip_ratio/region_mean": ["Tokens held back by the clip", "%"],
  mask_ratio: ["Completions that the masks keep", "%"], "sampling/sampling_logp_difference/mean": ["Sampler against trainer", "nats per token"],
};

/** The plain name; of a metric without one the name in metrics.jsonl. */
export function plain(name) {
  if (NAMES[name]) return NAMES[name][0];
  const reward = /^(eval\/)?rewards\/(.+)\/mean$/.exec(name);
  return reward ? `${reward[1] ? "Held-out reward" : "Reward"} ${reward[2]}` : name;
}

export const unit = (name) => NAMES[name]?.[1] ?? (name.startsWith("eval/accuracy") || name.startsWith("mask/") ? "%" : "");
