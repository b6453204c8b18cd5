"""What the passes of a step measured, added up, and what that comes to in metrics."""

from msgspec import Struct

from thundersync.learn.messages import PassReport


class PassSums(Struct, kw_only=True):
    """Sums over the passes of all workers."""

    passes: int = 0
    pass_busy_s: float = 0.0
    tokens: int = 0
    sampled_tokens: int = 0
    mismatch_sum: float = 0.0
    mismatch_max: float = 0.0
    corrected: int = 0
    kl_sum: float = 0.0
    entropy_sum: float = 0.0
    divergence_sum: float = 0.0
    queue_wait_s: float = 0.0
    """Sum over pieces, from reward to the start of their pass."""
    pieces: int = 0
    parts_peak: int = 0

    def add(self, report: PassReport) -> None:
        self.passes += 1
        self.pass_busy_s += report.busy_s
        self.tokens += report.tokens
        self.sampled_tokens += report.sampled_tokens
        self.mismatch_sum += report.mismatch_sum
        self.mismatch_max = max(self.mismatch_max, report.mismatch_max)
        self.corrected += report.corrected
        self.kl_sum += report.kl_sum
        self.entropy_sum += report.entropy_sum
        self.divergence_sum += report.divergence_sum
        self.parts_peak = max(self.parts_peak, report.parts)

    def metrics(self, terms: frozenset[str]) -> dict[str, float]:
        """Means are over sampled tokens that were worked; `terms` names the optional ones to tell."""
        tokens = max(1, self.sampled_tokens)
        optional = {"kl": self.kl_sum, "entropy": self.entropy_sum, "divergence": self.divergence_sum}
        return {
            "tokens_trained": float(self.tokens),
            "passes": float(self.passes),
            "queue_wait_s": self.queue_wait_s / max(1, self.pieces),
            "parts_peak": float(self.parts_peak),
            "mismatch_mean": self.mismatch_sum / tokens,
            "mismatch_max": self.mismatch_max,
            "importance_capped_share": self.corrected / tokens,
        } | {f"{name}_mean": value / tokens for name, value in optional.items() if name in terms}
