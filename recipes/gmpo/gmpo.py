"""GMPO: geometric-mean policy optimisation (arXiv 2507.20673), a loss of one's own in one file.

What a completion has become more likely by is the geometric mean of its tokens' ratios, each of them clipped: one
token of an extreme ratio moves a geometric mean far less than the arithmetic one of GRPO.
"""

from covey.algorithms import LossInputs, Surrogate, bounded_exp, loss, row_mean


@loss(aggregation="sequence_mean")
def gmpo(x: LossInputs, clip: float = 0.4) -> Surrogate:
    """`-A · exp(mean over the row of the clipped log-ratios)`, the same for all tokens of a row.

    A token's log-ratio is held at `clip` nats where A > 0, at `-clip` where A < 0: ratios from e^-0.4 to e^0.4.
    """
    low = (x.advantages < 0) & (x.log_ratio < -clip)
    high = (x.advantages > 0) & (x.log_ratio > clip)
    log_ratio = x.xp.where(low, x.xp.full_like(x.logp, -clip), x.log_ratio)
    log_ratio = x.xp.where(high, x.xp.full_like(x.logp, clip), log_ratio)
    ratio = x.xp.broadcast_to(bounded_exp(row_mean(log_ratio, x.mask)), x.logp.shape)
    return Surrogate(-ratio * x.advantages, low, high, ratio)
