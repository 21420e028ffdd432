"""DSVConfig: every ``--dsv-*`` knob. A field ``dsv_x`` is the flag ``--dsv-x`` and the YAML key ``dsv-x``."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from megatron_dsv.config_fields import check_fields, flag_of, knob, parse_sizes

STAGES = ("dense", "predictor", "sparse", "auto")
WINDOWS = {"window-1/3": 1 / 3, "window-2/3": 2 / 3}
PLANNING = ("dsv_cp_calibration", "dsv_cp_replan_interval")
"""Knobs that only --dsv-cp-plan planned reads and other launches must not set. The machines are not among them: a site
names them once, for all its launches."""
MASS_RULES = ("mass", "topk-mass")
"""Selection rules that add up scores of blocks, for which a maximum is none."""


@dataclass(frozen=True)
class DSVConfig:
    """Dynamic sparse attention (--dsv-*)."""

    dsv_sparse_stage: str = knob(
        "dense", "dense: full attention, no predictors. predictor: full attention, predictors learn beside it. "
        "sparse: every layer within its budget attends to predicted keys only. auto: predictors from step 0, each "
        "layer goes sparse when its recall passes the gate.",
        choices=STAGES, aliases={"0": "dense", "1": "predictor", "2": "sparse"})
    dsv_attention: str = knob(
        "predicted", "what a query group attends to once it is sparse: keys found by the predictor, or a fixed window "
        "of 1/3 or 2/3 of each grid dimension (a baseline; needs --dsv-sparse-stage dense).",
        choices=("predicted", *WINDOWS))
    dsv_predictor_rank: int = knob(16, "width of the low-rank query and key of one head.", minimum=1, maximum=256)
    dsv_predictor_input: str = knob(
        "hidden", "what the predictor reads: the layer's modulated hidden state, or the normalised, rotated query and "
        "key.", choices=("hidden", "qk"))
    dsv_predictor_lr: float = knob(1e-4, "learning rate of the predictors.", minimum=0)
    dsv_predictor_sparse_lr_scale: float = knob(
        0.1, "factor on the predictor learning rate once a layer attends sparsely at the longest length that is "
        "profiled.", minimum=0)
    dsv_predictor_weight_decay: float = knob(0.0, "weight decay of the predictors.", minimum=0)
    dsv_predictor_clip_grad: float = knob(
        1.0, "gradient norm the predictors are clipped to, apart from the backbone; 0 switches clipping off.",
        minimum=0)
    dsv_predictor_loss_weight: float = knob(
        1.0, "factor on the predictors' gradients before they are clipped. AdamW divides a constant factor out again, "
        "so it shifts what --dsv-predictor-clip-grad cuts and little else; how fast they learn is --dsv-predictor-lr. "
        "0 leaves them untrained.", minimum=0)
    dsv_predictor_cosine_weight: float = knob(
        0.95, "weight of 1 - cos(predicted row, true row) in the predictor loss.", minimum=0)
    dsv_predictor_norm_weight: float = knob(
        0.05, "weight of the relative difference of the row norms in the predictor loss.", minimum=0)
    dsv_predictor_query_stride: int = knob(
        256, "one query row in so many trains the predictor at each step.", minimum=1)
    dsv_predictor_proxies: int = knob(
        4, "proxy queries that stand for a query group in prediction; must divide --dsv-q-block-size.", minimum=1)
    dsv_score_reduction: str = knob(
        "mass", "how predicted scores become one value per (query group, key block): softmax mass summed over the "
        "block, log-sum-exp, or the maximum.", choices=("mass", "lse", "max"))
    dsv_q_block_size: int = knob(
        64, "tokens of a query group; one selection serves the whole group.", minimum=1, power_of_two=True)
    dsv_kv_block_size: int = knob(
        64, "tokens of a key block, the unit of selection; 1 selects single tokens.", minimum=1, power_of_two=True)
    dsv_cube_size: str | None = knob(
        None, "3-D cube (frames x height x width, in tokens) that makes up a query group, such as 4x4x4; unset derives "
        "it from --dsv-q-block-size.", sizes=3)
    dsv_selection_rule: str = knob(
        "topk", "topk: a fixed number of blocks per head. mass: the smallest set that reaches --dsv-budget-mass of "
        "the predicted mass. topk-mass: mass, capped at the head's top-k budget.",
        choices=("topk", "mass", "topk-mass"))
    dsv_keep_ratio: float | None = knob(
        None, "force this share of key blocks to be kept in every head; unset uses the measured budget of each head.",
        above=0, maximum=1)
    dsv_min_keep_ratio: float = knob(0.02, "floor of the kept share of a head.", minimum=0, maximum=1)
    dsv_dense_above: float | None = knob(
        None, "a layer whose budget keeps more than this share of its blocks stays dense; unset decides by measured "
        "kernel times where this device has them, else at 0.5.", minimum=0, maximum=1)
    dsv_budget_mass: float = knob(
        0.95, "attention mass of a query group that its key budget must hold, measured in whole blocks.",
        above=0, maximum=1)
    dsv_theta: float = knob(
        0.9, "attention mass that defines the critical keys of one query, for the reported sparsity.",
        above=0, maximum=1)
    dsv_gate_recall: float = knob(
        0.9, "share of the true attention mass that predicted selections must hold before a layer goes sparse.",
        above=0, maximum=1)
    dsv_rollback_recall: float = knob(
        0.85, "a sparse layer whose recall stays below this, for --dsv-gate-passes profiles running, falls back to "
        "dense; at most --dsv-gate-recall counts.", above=0, maximum=1)
    dsv_gate_passes: int = knob(2, "profiles running that must pass the gate.", minimum=1)
    dsv_profile_interval: int = knob(
        50, "steps between two profiles of sparsity, budget and recall; where videos have several lengths, a profile "
        "waits for the next step of those that attention spends most on.", minimum=1)
    dsv_profile_groups: int = knob(8, "query groups sampled in one profile.", minimum=1)
    dsv_profile_momentum: float = knob(
        0.9, "weight of the old value in the running profile.", minimum=0, below=1)
    dsv_keep_own_block: bool = knob(True, "always keep the key blocks that hold the query group's own tokens.")
    dsv_sparse_backend: str = knob(
        "auto", "kernel of sparse attention; auto is the fastest measured one that can serve on a GPU, and reference "
        "on a CPU.", choices=("auto", "reference", "triton", "flash4", "cudnn"))
    dsv_dense_backend: str = knob(
        "auto", "kernel of dense attention; auto is the fastest measured one that can serve.",
        choices=("auto", "sdpa", "flash4", "reference"))
    dsv_deterministic: bool = knob(False, "bitwise repeatable attention gradients.")
    dsv_freeze_selection: bool = knob(
        False, "select by fixed pseudo-random scores of layer and head in place of predicted ones: the same selection "
        "in every layout and at every step, for comparing layouts.")

    dsv_cp_plan: str = knob(
        "planned", "how context parallelism splits a block's attention. planned: by cost and measured sparsity. "
        "sequence or heads: that split alone, evenly, in every block. random: another plan for every block at every "
        "step, to find faults.", choices=("planned", "sequence", "heads", "random"))
    dsv_cp_groups: str = knob(
        "parents", "communicators of context parallelism, each several hundred MiB of a GPU. parents: one of all its "
        "ranks and one of those in a node. dedicated: one for each group of ranks in a plan. virtual: that of all "
        "its ranks alone.", choices=("parents", "dedicated", "virtual"))
    dsv_cp_cluster: str | None = knob(
        None, "the machines, for --dsv-cp-plan planned and --dry-run: a YAML file, or one of configs/cluster by its "
        "name; unset takes what was measured on H200.")
    dsv_cp_calibration: str | None = knob(
        None, "file that `dsv bench --calibrate` wrote on these machines; goes before --dsv-cp-cluster.")
    dsv_cp_replan_interval: int | None = knob(
        None, "least number of steps between two looks for a better context-parallel plan; unset looks after every "
        "profile, and so does a layer that turns sparse or dense.", minimum=1)
    dsv_cp_correction: bool = knob(
        True, "correct predicted times by those that profiled steps measure, within bounds, so that plans depend on "
        "them; never under --dsv-deterministic.")

    def validate(self) -> None:
        """Check every field and every rule between fields.

        Raises:
            ValueError: one line with the flag, what is allowed, what it got and the way out.
        """
        check_fields(self)
        if self.window_fraction is not None and self.dsv_sparse_stage != "dense":
            raise ValueError(f"--dsv-attention {self.dsv_attention} needs --dsv-sparse-stage dense, got "
                             f"{self.dsv_sparse_stage}; a window has no predictor to train")
        if self.dsv_q_block_size % self.dsv_predictor_proxies:
            raise ValueError(f"--dsv-predictor-proxies must divide --dsv-q-block-size {self.dsv_q_block_size}, got "
                             f"{self.dsv_predictor_proxies}; use a power of two")
        if self.cube is not None and prod(self.cube) != self.dsv_q_block_size:
            raise ValueError(f"--dsv-cube-size must hold --dsv-q-block-size {self.dsv_q_block_size} tokens, got "
                             f"{self.dsv_cube_size} ({prod(self.cube)} tokens); leave it unset to derive it")
        if self.dsv_predictor_cosine_weight + self.dsv_predictor_norm_weight == 0:
            raise ValueError("--dsv-predictor-cosine-weight or --dsv-predictor-norm-weight must be above 0, got 0 and "
                             "0; to switch the predictor loss off use --dsv-predictor-loss-weight 0")
        if self.dsv_keep_ratio is not None and self.dsv_keep_ratio < self.dsv_min_keep_ratio:
            raise ValueError(f"--dsv-keep-ratio must be at least --dsv-min-keep-ratio {self.dsv_min_keep_ratio}, got "
                             f"{self.dsv_keep_ratio}; lower --dsv-min-keep-ratio too")
        if self.dsv_keep_ratio is not None and self.dsv_selection_rule == "mass":
            raise ValueError("--dsv-keep-ratio needs --dsv-selection-rule topk or topk-mass, got mass; the mass rule "
                             "has no fixed share, its target is --dsv-budget-mass")
        if self.dsv_selection_rule in MASS_RULES and self.dsv_score_reduction == "max":
            raise ValueError(f"--dsv-selection-rule {self.dsv_selection_rule} sums scores, so it needs "
                             "--dsv-score-reduction mass or lse, got max; with max use --dsv-selection-rule topk")
        for name in PLANNING:
            if getattr(self, name) is not None and self.dsv_cp_plan != "planned":
                raise ValueError(f"{flag_of(name)} needs --dsv-cp-plan planned, got {self.dsv_cp_plan}; drop one")

    @property
    def corrects_costs(self) -> bool:
        """Whether measured block times act on context-parallel plans."""
        return self.dsv_cp_correction and not self.dsv_deterministic

    @property
    def cube(self) -> tuple[int, int, int] | None:
        """(frames, height, width) in tokens of ``dsv_cube_size``, or None when it is derived."""
        if self.dsv_cube_size is None:
            return None
        frames, height, width = parse_sizes(self.dsv_cube_size)
        return frames, height, width

    @property
    def window_fraction(self) -> float | None:
        """Share of each grid dimension that a window baseline attends to, or None."""
        return WINDOWS.get(self.dsv_attention)

    @property
    def may_be_sparse(self) -> bool:
        """Whether some layer may attend to a selection: a predicted one, or a window."""
        return self.dsv_sparse_stage in ("sparse", "auto") or self.window_fraction is not None

    @property
    def has_predictor(self) -> bool:
        """Whether the layers own predictors: in every stage but dense."""
        return self.dsv_sparse_stage != "dense"
